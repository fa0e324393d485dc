"""README.md of a pruned model."""

from __future__ import annotations

import yaml

from greedy_gnorm.pruning.run import Run, sites_of
from greedy_gnorm.report.compression import (
    MULTIPLICATIONS,
    Kept,
    cost_part,
    is_compression,
    kept_units,
    percent_left,
)
from greedy_gnorm.report.page import model_title
from greedy_gnorm.report.tables import (
    LATENCY_COLUMNS,
    as_markdown,
    choices_table,
    latency_cells,
    megabytes,
    stored_precision,
    test_table,
)
from greedy_gnorm.tasks.task import task_of
from greedy_gnorm.units import unit_name


def model_card(run: Run, form: str = "pruned") -> str:
    """README.md of the pruned model, with the metadata that the hub reads."""
    model, task = run.header["model"], task_of(run.model)
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": task.pipeline,
        **({"base_model": model["name"]} if model.get("on_hub") else {}),
        "tags": ["greedy-gnorm", "pruned", model["type"]],
        "metrics": [run.measure.name],
    }
    speed = as_markdown(LATENCY_COLUMNS, [latency_cells(latency) for latency in run.latencies]) if run.latencies else ""
    result, units = _compressed(run) if is_compression(run.header) else _pruned(run)
    return (
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n"
        f"# {model_title(model)}, pruned\n\n"
        f"{result}"
        f"{speed}\n{HOW_TO_LOAD[form].format(auto_class=task.auto_class, pipeline=task.pipeline)}\n"
        f"{units}"
    )


def _pruned(run: Run) -> tuple[str, str]:
    """What was done, with its result, and the heads that are gone."""
    heads, config, data = run.summary()["heads"], run.header["config"], run.header["data"]
    sites = sites_of(run.header)
    names = ", ".join(unit_name(sites, head) for head in sorted(run.removed))
    return (
        f"{heads['removed']} of {heads['total']} attention heads were removed with greedy-gnorm "
        f"(method {config['method']}, objective {config['objective']}, seed {config['seed']}).\n\n"
        f"{as_markdown(['', 'before', 'after'], _before_and_after(run))}\n"
        f"Quality is measured on {data['evaluation']['rows']} rows "
        f"(fingerprint {data['evaluation']['fingerprint']}). The heads were chosen on {data['scoring']['rows']} rows "
        f"(fingerprint {data['scoring']['fingerprint']}).\n\n",
        f"Removed heads: {names or 'none'}.\n",
    )


def _compressed(run: Run) -> tuple[str, str]:
    """What was done towards a budget, with its result, and the units that each layer has left."""
    config, data, step = run.header["config"], run.header["data"], run.solution.step
    kinds = kept_units(run.header, run.steps)
    gone = " and ".join(f"{kept.gone(step):,} of {kept.total:,} {CARD_WORDS[kept.word]}" for kept in kinds)
    uses = "; ".join(
        f"{use} on {data[part]['rows']:,} rows (fingerprint {data[part]['fingerprint']})"
        for part, use in USES.items()
        if part in data
    )
    parts = [
        f"{gone} were removed with greedy-gnorm (method {config['method']}, objective {config['objective']}, "
        f"seed {config['seed']}).",
        as_markdown(["", "before", "after"], _before_and_after(run)).rstrip(),
        f"The quality in this table is that on the rows that a step was chosen on. {uses[:1].upper()}{uses[1:]}.",
    ]
    if run.test is not None:
        parts.append(as_markdown(*test_table(run.test, run.measure)).rstrip())
    if run.offered:
        parts += [
            f"Other steps of the same run (its step {step} is this model):",
            as_markdown(*choices_table(run.offered, run.steps[0], run.measure)).rstrip(),
        ]
    return "\n\n".join([*parts, ""]), "".join(_left(kept, step) for kept in kinds)


def _left(kept: Kept, step: int) -> str:
    return f"{kept.words.capitalize()} left by layer: {', '.join(f'{count:,}' for count in kept.left[step])}.\n"


CARD_WORDS = {"head": "attention heads", "neuron": "feed-forward neurons"}
"""The units in the words of a model card, which people read without the rest."""
USES = {
    "scoring": "units were ranked",
    "calibration": "what is left was fitted",
    "evaluation": "a step was chosen",
    "test": "the result was tested",
}
"""What a run used each part of the data for."""


def _before_and_after(run: Run) -> list[list[str]]:
    """Quality and size as rows of text."""
    sides = (run.steps[0], run.solution)
    precision = stored_precision(run.header, run.steps[0])
    return [
        *([name, *(f"{step.quality[name]:.4f}" for step in sides)] for name in run.steps[0].quality),
        ["parameters", *(f"{step.parameters:,}" for step in sides)],
        [f"MB ({precision.name})", *(megabytes(step.bytes) for step in sides)],
        *_multiplications(run),
    ]


def _multiplications(run: Run) -> list[list[str]]:
    """The share of the multiplications that a compression left, as a row of text."""
    if not is_compression(run.header) or cost_part([run.steps]) != MULTIPLICATIONS:
        return []
    return [["multiplications", "100%", f"{percent_left(run.steps, MULTIPLICATIONS)[run.solution.step]:.1f}%"]]


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
    "plain": """All layers have the same width, so it is an ordinary checkpoint and loads without any flag:

```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained(FOLDER)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
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
