"""What a run came to: the solution in figures, and the files that hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from greedy_gnorm import figures
from greedy_gnorm.checkpoint import save
from greedy_gnorm.errors import GnormError
from greedy_gnorm.files import whole_folder, write_text
from greedy_gnorm.heads import Head, Step, by_site, removed_by
from greedy_gnorm.journal import Journal
from greedy_gnorm.measure import HEADER, Counts, as_csv, as_markdown, module_counts, size_table, table_cells
from greedy_gnorm.report import write_report
from greedy_gnorm.speed import HEADER as LATENCY_HEADER
from greedy_gnorm.speed import Latency
from greedy_gnorm.surgery import dense


@dataclass(frozen=True)
class Run:
    """A finished run: every step, the chosen one, and the model pruned to it."""

    steps: list[Step]
    solution: Step
    model: Any
    tokenizer: Any
    header: dict[str, Any]
    counts_before: Counts
    latencies: Sequence[Latency] = ()

    @property
    def removed(self) -> list[Head]:
        """The heads that the solution removes, in the order they went."""
        return removed_by(self.steps[: self.solution.step + 1])

    @property
    def quality(self) -> str:
        """The measure that the rules and the curve follow."""
        return str(self.header["quality"])

    @property
    def reason(self) -> str:
        """Why the run ended."""
        return self.steps[-1].stop or "unfinished"

    def parameter_table(self) -> list[list[str]]:
        """The paper's parameter table for this model and solution, as text cells."""
        rows = size_table(self.counts_before, module_counts(self.model))
        before, after = (step.quality[self.quality] for step in (self.steps[0], self.solution))
        return table_cells(rows, (self.quality, before, after))

    def summary(self) -> dict[str, Any]:
        """The result in plain values, as `gnorm prune --json` prints it."""
        first, chosen = self.steps[0], self.solution
        return {
            "solution": chosen.step,
            "reason": self.reason,
            "heads": {"total": _heads_at_start(self.header), "removed": len(self.removed)},
            "removed": {str(site): heads for site, heads in by_site(self.removed).items()},
            "quality": {name: [first.quality[name], chosen.quality[name]] for name in first.quality},
            "parameters": [first.parameters, chosen.parameters],
            "bytes": [first.bytes, chosen.bytes],
            "latency": [latency.to_json() for latency in self.latencies],
            "steps": len(self.steps) - 1,
            "seconds": sum(sum(step.seconds.values()) for step in self.steps),
        }


def _heads_at_start(header: dict[str, Any]) -> int:
    sites, heads = header["model"]["shape"]
    return int(sites * heads - len(header["model"]["removed"]))


FORMATS = ("pruned", "dense")
"""How a model is written: in the shapes that are left, or in the old ones with zeros."""


def check_format(form: str) -> None:
    """Refuse an unknown way to write a model."""
    if form not in FORMATS:
        raise GnormError(f"Unknown format {form!r}. Choose from: {', '.join(FORMATS)}.")


def write_outcome(run: Run, journal: Journal, form: str = FORMATS[0]) -> None:
    """The model, tables, figures and the page into the run's folder, and the result into run.json."""
    model = dense(run.model) if form == "dense" else run.model
    save(model, run.tokenizer, journal.folder / "model", card=model_card(run, form))
    with whole_folder(journal.folder / "tables") as tables:
        write_text(tables / "curve.csv", curve_csv(run.steps))
        write_text(tables / "parameters.csv", as_csv(HEADER, run.parameter_table()))
        write_text(tables / "parameters.md", as_markdown(HEADER, run.parameter_table()))
        if run.latencies:
            times = [latency.cells() for latency in run.latencies]
            write_text(tables / "latency.csv", as_csv(LATENCY_HEADER, times))
            write_text(tables / "latency.md", as_markdown(LATENCY_HEADER, times))
    with whole_folder(journal.folder / "figures") as folder:
        figures.save(figures.curve(run.steps, run.solution.step, run.quality), folder / "curve")
        figures.save(figures.mask(run.removed, run.header["model"]), folder / "mask")
        scored = next((step.scores for step in run.steps if step.scores is not None), None)
        if scored is not None:
            figures.save(
                figures.heat_map(scored, f"Scores before pruning ({run.header['config']['method']})"), folder / "scores"
            )
    journal.finish(run.summary())
    write_report([journal.folder])


def curve_csv(steps: list[Step]) -> str:
    """Heads removed, quality and size, a line a step."""
    names = list(steps[0].quality)
    cells, gone = [], 0
    for step in steps:
        gone += len(step.removed)
        heads = " ".join(str(head) for head in step.removed)
        cells.append(
            [str(gone), heads, *(repr(step.quality[name]) for name in names), str(step.parameters), str(step.bytes)]
        )
    return as_csv(["heads_removed", "removed", *names, "parameters", "bytes"], cells)


def model_card(run: Run, form: str = FORMATS[0]) -> str:
    """README.md of the pruned model, with the metadata that the hub reads."""
    summary, config, data = run.summary(), run.header["config"], run.header["data"]
    name = str(run.header["model"]["name"])
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["greedy-gnorm", "pruned", run.header["model"]["type"]],
        "metrics": [run.quality],
    }
    quality = [[name, f"{a:.4f}", f"{b:.4f}"] for name, (a, b) in summary["quality"].items()]
    sizes = [[name, *(f"{value:,}" for value in summary[name])] for name in ("parameters", "bytes")]
    speed = as_markdown(LATENCY_HEADER, [latency.cells() for latency in run.latencies]) if run.latencies else ""
    heads = "; ".join(f"site {site}: {', '.join(map(str, gone))}" for site, gone in by_site(run.removed).items())
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
