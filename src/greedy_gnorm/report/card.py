"""README.md of a pruned model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from greedy_gnorm.data.sets import TEST
from greedy_gnorm.pruning.run import Run, sites_of
from greedy_gnorm.records.journal import Journal
from greedy_gnorm.report.choices import choice_columns, choice_rows
from greedy_gnorm.report.compression import Kept, is_compression
from greedy_gnorm.report.names import model_title
from greedy_gnorm.report.page import PageRun
from greedy_gnorm.report.tables import (
    LATENCY_COLUMNS,
    as_markdown,
    distilled_text,
    latency_cells,
    megabytes,
    test_table,
    with_interval,
)
from greedy_gnorm.report.verdict import UNITS
from greedy_gnorm.tasks.task import Task, task_of
from greedy_gnorm.units import unit_name


def model_card(run: Run, form: str = "pruned") -> str:
    """README.md of the pruned model, with the metadata that the hub reads."""
    model, task = run.header["model"], task_of(run.model)
    metadata = {
        "library_name": task.library,
        "pipeline_tag": task.pipeline,
        **({"base_model": model["name"]} if model.get("on_hub") else {}),
        "tags": ["greedy-gnorm", "pruned", model["type"]],
        "metrics": [run.measure.name],
    }
    shown = _as_on_the_page(run)
    left = "".join(_left(kept, run.solution.step) for kept in shown.kept)
    return "\n\n".join(
        [
            f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---",
            f"# {model_title(model)}, pruned",
            *_result(run, shown),
            _how_to_load(task, form),
            *([BY_LIBRARY[task.library].format(trust=TRUST[form])] if task.library in BY_LIBRARY else []),
            left if is_compression(run.header) else f"Removed heads: {_names(run)}.\n",
        ]
    )


def _how_to_load(task: Task, form: str) -> str:
    """The lines of code; those of a pipeline only if transformers has one for the task."""
    from transformers.pipelines import PIPELINE_REGISTRY

    also = predict = ""
    if task.pipeline in PIPELINE_REGISTRY.get_supported_tasks():
        also, predict = ", pipeline", f'predict = pipeline("{task.pipeline}", FOLDER, trust_remote_code=True)\n'
    word, reader = task.reader
    return (
        HOW_TO_LOAD[form]
        .format(auto_class=task.auto_class, also=also, predict=predict, word=word, reader=reader)
        .rstrip()
    )


def _as_on_the_page(run: Run) -> PageRun:
    """The run as its page shows it: from the record alone."""
    method = run.header["config"]["method"]
    return PageRun(method, method, Journal(Path(), {**run.header, "result": run.summary()}, run.steps))


def _result(run: Run, shown: PageRun) -> Iterator[str]:
    """What was done and which choice this is, its quality and size, the rows, the other choices, and the speed."""
    config, data, step = run.header["config"], run.header["data"], run.solution.step
    gone = " and ".join(f"{kept.gone(step):,} of {kept.total:,} {UNITS[kept.word]}" for kept in shown.kept)
    yield (
        f"{gone} were removed with greedy-gnorm (method {config['method']}, objective {config['objective']}, "
        f"seed {config['seed']})."
    )
    if run.distilled is not None:
        yield distilled_text(run.distilled, run.measure)
    columns, rows = choice_columns(shown, run.measure), choice_rows(shown, run.measure)
    if own := [row for row in rows if row.is_solution]:
        yield as_markdown(columns, [[row.name, *row.cells] for row in (rows[0], *own)]).rstrip()
    if run.test is not None:
        yield as_markdown(*test_table(run.test, run.measure)).rstrip()
    yield as_markdown(["", "before", "after"], _before_and_after(run, shown)).rstrip()
    uses = "; ".join(
        f"{use} on {data[part]['rows']:,} rows (fingerprint {data[part]['fingerprint']})"
        for part, use in USES.items()
        if part in data and (part != TEST or run.test is not None)
    )
    yield f"Quality in the table above is that on the rows that a step was chosen on. {uses[:1].upper()}{uses[1:]}."
    if others := [row for row in rows[1:] if not row.is_solution]:
        yield f"Other steps of the same run (its step {step} is this model):"
        yield as_markdown(["step", *columns], [[str(row.step), row.name, *row.cells] for row in others]).rstrip()
    if run.latencies:
        yield as_markdown(LATENCY_COLUMNS, [latency_cells(latency) for latency in run.latencies]).rstrip()


def _names(run: Run) -> str:
    sites = sites_of(run.header)
    return ", ".join(unit_name(sites, head) for head in sorted(run.removed)) or "none"


def _left(kept: Kept, step: int) -> str:
    return f"{kept.words.capitalize()} left by layer: {', '.join(f'{count:,}' for count in kept.left[step])}.\n"


USES = {
    "scoring": "units were ranked",
    "calibration": "what is left was fitted",
    "evaluation": "a step was chosen",
    TEST: "the result was tested",
}
"""What a run used each part of the data for."""


def _before_and_after(run: Run, shown: PageRun) -> list[list[str]]:
    """Quality and size as rows of text."""
    sides, lead = (run.steps[0], run.solution), run.measure.name
    rows = [
        *(
            [name, *(with_interval(step.quality[name], step.interval if name == lead else None) for step in sides)]
            for name in run.steps[0].quality
        ),
        ["parameters", *(f"{step.parameters:,}" for step in sides)],
        [f"MB ({shown.precision.name})", *(megabytes(step.bytes) for step in sides)],
    ]
    before, after = (step.cost.multiplications for step in sides)
    return [*rows, ["multiplications", "100%", f"{after / before:.1%}"]] if before and after else rows


HOW_TO_LOAD = {
    "pruned": """Load it with transformers 5 (`modeling_pruned.py` beside the weights is the only code that it needs):

```python
from transformers import {auto_class}, {reader}{also}

model = {auto_class}.from_pretrained(FOLDER, trust_remote_code=True)
{word} = {reader}.from_pretrained(FOLDER)
{predict}```

or with greedy-gnorm, which runs no code from the folder: `greedy_gnorm.load(FOLDER)`.
""",
    "plain": """All layers have the same width, so it is an ordinary checkpoint and loads without any flag:

```python
from transformers import {auto_class}, {reader}

model = {auto_class}.from_pretrained(FOLDER)
{word} = {reader}.from_pretrained(FOLDER)
```
""",
    "dense": """The weights have their original shapes, with zeros for the removed heads: this copy is no smaller and no
faster than the unpruned model, and loads without any flag:

```python
from transformers import {auto_class}

model = {auto_class}.from_pretrained(FOLDER)
```
""",
}
TRUST = {"pruned": ", trust_remote_code=True", "plain": "", "dense": ""}
"""What a library needs to run the code beside the weights, where there is any."""
BY_LIBRARY = {
    "sentence-transformers": """Or with sentence-transformers, which pools tokens as the unpruned model does:

```python
from sentence_transformers import SentenceTransformer

vectors = SentenceTransformer(FOLDER{trust}).encode(["A text.", "Another one."])
```"""
}
"""How libraries other than transformers load a model."""
