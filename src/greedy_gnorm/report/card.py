"""README.md of a pruned model."""

from __future__ import annotations

import yaml

from greedy_gnorm.pruning.run import Run, sites_of
from greedy_gnorm.report.page import model_title
from greedy_gnorm.report.tables import LATENCY_COLUMNS, as_markdown, latency_cells, megabytes, stored_precision
from greedy_gnorm.tasks.task import task_of
from greedy_gnorm.units import unit_name


def model_card(run: Run, form: str = "pruned") -> str:
    """README.md of the pruned model, with the metadata that the hub reads."""
    summary, config, data, model = run.summary(), run.header["config"], run.header["data"], run.header["model"]
    task, sites = task_of(run.model), sites_of(run.header)
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": task.pipeline,
        **({"base_model": model["name"]} if model.get("on_hub") else {}),
        "tags": ["greedy-gnorm", "pruned", model["type"]],
        "metrics": [run.measure.name],
    }
    speed = as_markdown(LATENCY_COLUMNS, [latency_cells(latency) for latency in run.latencies]) if run.latencies else ""
    heads = ", ".join(unit_name(sites, head) for head in sorted(run.removed))
    return (
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n"
        f"# {model_title(model)}, pruned\n\n"
        f"{summary['heads']['removed']} of {summary['heads']['total']} attention heads were removed with greedy-gnorm "
        f"(method {config['method']}, objective {config['objective']}, seed {config['seed']}).\n\n"
        f"{as_markdown(['', 'before', 'after'], _before_and_after(run))}\n"
        f"Quality is measured on {data['evaluation']['rows']} rows "
        f"(fingerprint {data['evaluation']['fingerprint']}). The heads were chosen on {data['scoring']['rows']} rows "
        f"(fingerprint {data['scoring']['fingerprint']}).\n\n"
        f"{speed}\n{HOW_TO_LOAD[form].format(auto_class=task.auto_class, pipeline=task.pipeline)}\n"
        f"Removed heads: {heads or 'none'}.\n"
    )


def _before_and_after(run: Run) -> list[list[str]]:
    """Quality and size as rows of text."""
    sides = (run.steps[0], run.solution)
    precision = stored_precision(run.header, run.steps[0])
    return [
        *([name, *(f"{step.quality[name]:.4f}" for step in sides)] for name in run.steps[0].quality),
        ["parameters", *(f"{step.parameters:,}" for step in sides)],
        [f"MB ({precision.name})", *(megabytes(step.bytes) for step in sides)],
    ]


HOW_TO_LOAD = {
    "pruned": """Load it with transformers 5 (`modeling_pruned.py` beside the weights is the only code that it needs):

```python
from transformers import {auto_class}, AutoTokenizer, pipeline

model = {auto_class}.from_pretrained(FOLDER, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
classify = pipeline("{pipeline}", FOLDER, trust_remote_code=True)
```

or with greedy-gnorm, which runs no code from the folder: `greedy_gnorm.load(FOLDER)`.
""",
    "dense": """The weights have their original shapes, with zeros for the removed heads: this copy is no smaller and no
faster than the unpruned model, and loads without any flag:

```python
from transformers import {auto_class}

model = {auto_class}.from_pretrained(FOLDER)
```
""",
}
