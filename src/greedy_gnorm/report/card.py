"""README.md of a pruned model."""

from __future__ import annotations

import yaml

from greedy_gnorm.pruning.run import Run
from greedy_gnorm.report.tables import LATENCY_COLUMNS, as_markdown, latency_cells
from greedy_gnorm.units import by_site


def model_card(run: Run, form: str = "pruned") -> str:
    """README.md of the pruned model, with the metadata that the hub reads."""
    summary, config, data = run.summary(), run.header["config"], run.header["data"]
    name = str(run.header["model"]["name"])
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["greedy-gnorm", "pruned", run.header["model"]["type"]],
        "metrics": [run.measure.name],
    }
    quality = [[name, f"{a:.4f}", f"{b:.4f}"] for name, (a, b) in summary["quality"].items()]
    sizes = [[name, *(f"{value:,}" for value in summary[name])] for name in ("parameters", "bytes")]
    speed = as_markdown(LATENCY_COLUMNS, [latency_cells(latency) for latency in run.latencies]) if run.latencies else ""
    heads = "; ".join(f"layer {site}: {', '.join(map(str, gone))}" for site, gone in by_site(run.removed).items())
    return (
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n"
        f"# {name}, pruned\n\n"
        f"{summary['heads']['removed']} of {summary['heads']['total']} attention heads removed by greedy-gnorm "
        f"(method {config['method']}, objective {config['objective']}, seed {config['seed']}).\n\n"
        f"{as_markdown(['', 'before', 'after'], [*quality, *sizes])}\n"
        f"Quality on {data['evaluation']['rows']} rows (fingerprint {data['evaluation']['fingerprint']}), "
        f"heads chosen on {data['scoring']['rows']} rows (fingerprint {data['scoring']['fingerprint']}).\n\n"
        f"{speed}\n{HOW_TO_LOAD[form]}\n"
        f"Removed heads: {heads or 'none'}.\n"
    )


HOW_TO_LOAD = {
    "pruned": """Load it with transformers 5 alone (`modeling_pruned.py` beside the weights is all the code it needs):

```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

model = AutoModelForSequenceClassification.from_pretrained(FOLDER, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
classify = pipeline("text-classification", FOLDER, trust_remote_code=True)
```

or, without any code from the folder, with greedy-gnorm: `greedy_gnorm.load(FOLDER)`.
""",
    "dense": """The weights have their old shapes, with zeros for the removed heads: this copy is no smaller and no
faster than the unpruned model, and loads anywhere without any flag:

```python
from transformers import AutoModelForSequenceClassification

model = AutoModelForSequenceClassification.from_pretrained(FOLDER)
```
""",
}
