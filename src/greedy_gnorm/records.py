"""What the files of a run folder must say: they may come from a stranger, and all that reads them relies on this."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from greedy_gnorm.heads import Head, Step

MOST_HEADS = 100_000
"""More than any model has: a folder can't make its reader allocate what it likes."""


def _word(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def _score(value: Any) -> bool:
    return value is None or value in ("inf", "-inf") or (isinstance(value, float | int) and abs(value) < math.inf)


def _setting(value: Any) -> bool:
    plain = value is None or isinstance(value, str | bool) or _number(value)
    return plain or (isinstance(value, list) and all(map(_word, value)))


def _nothing_or(inner: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or _misfit(value, inner, "") is None


_HEADS = [[_count]]
_MATRIX = [[_score]]
_ROWS = {
    "source": _word,
    "rows": _count,
    "batches": _count,
    "truncated": _count,
    "fingerprint": _word,
    "in_memory?": _flag,
}

HEADER: dict[str, Any] = {
    "model": {
        "name": _word,
        "type": _word,
        "weights": _word,
        "parameters": _count,
        "shape": [_count],
        "sites": [_word],
        "applications": [_count],
        "removed": _HEADS,
        "configuration?": _word,
        "in_memory?": _flag,
    },
    "data": {"scoring": _ROWS, "evaluation": _ROWS},
    "config": {"method": _word, "objective": _word, "*": _setting},
    "seed": _number,
    "quality": _word,
    "versions": {"*": _word},
    "processes?": _count,
    "threads?": _count,
    "started": _word,
    "result?": {
        "solution": _count,
        "quality?": {"*": [_number]},
        "latency?": [
            {
                "runtime": _word,
                "batch": _count,
                "tokens": _count,
                "threads": _count,
                "repeats": _count,
                "before_ms": _positive,
                "before_spread": [_number],
                "after_ms": _positive,
                "after_spread": [_number],
                "promised": _nothing_or(_number),
            }
        ],
    },
    "taken?": {"run": _word, "step": _count},
}
"""run.json. A name with ? may be missing, * stands for any other name, a list for any number of the same."""

EXPERIMENT: dict[str, Any] = {
    **HEADER,
    "data": {"evaluation": _ROWS},
    "methods": [_word],
    "draws?": _positive,
    "runs": _count,
    "trajectories": _count,
}
"""experiment.json."""

STEP: dict[str, Any] = {
    "step": _count,
    "removed": _HEADS,
    "scores": _nothing_or(_MATRIX),
    "log_scores?": _MATRIX,
    "quality": {"*": _number},
    "parameters": _count,
    "bytes": _count,
    "seconds": {"*": _number},
    "stop": _nothing_or(_word),
    "seal?": _word,
}
"""A line of journal.jsonl."""


def header_fault(header: Any, shape: Mapping[str, Any] = HEADER) -> str | None:
    """What is wrong with run.json or experiment.json, if anything."""
    fault = _misfit(header, shape, "")
    if fault is not None:
        return fault
    model = header["model"]
    if len(model["shape"]) != 2 or not 0 < math.prod(model["shape"]) <= MOST_HEADS:
        return f"model.shape is {model['shape']}"
    sites, heads = model["shape"]
    if not len(model["sites"]) == len(model["applications"]) == sites:
        return "model.sites or model.applications has another length than model.shape says"
    if not all(0 < layers <= MOST_HEADS for layers in model["applications"]):
        return f"model.applications is {model['applications']}"
    fault = _heads_fault(model["removed"], sites, heads, set())
    return "no head is left" if fault is None and len(model["removed"]) == sites * heads else fault


def steps_fault(header: Mapping[str, Any], steps: list[Step]) -> str | None:
    """What does not fit in a run's steps, if anything: heads that it has not or no longer, scores of another shape."""
    (sites, heads), gone = header["model"]["shape"], {Head(*head) for head in header["model"]["removed"]}
    for step in steps:
        fault = _heads_fault(step.removed, sites, heads, gone) or _scores_fault(step, sites, heads, gone)
        if header["quality"] not in step.quality or step.quality.keys() != steps[0].quality.keys():
            fault = f"the quality is {', '.join(step.quality)}"
        if step.parameters == 0 or step.bytes == 0:
            fault = "nothing is left of the model"
        if (step.stop is not None and step is not steps[-1]) or (step is not steps[0] and not step.removed):
            fault = "the run goes on behind its end, or without removing a head"
        if fault is not None:
            return f"step {step.step}: {fault}"
        gone |= set(step.removed)
    if header.get("result", {}).get("solution", 0) >= max(len(steps), 1):
        return f"the solution is step {header['result']['solution']}, which is not there"
    return None


def line_fault(line: Any) -> str | None:
    """What is wrong with a line of the journal, if anything."""
    return _misfit(line, STEP, "")


def _heads_fault(removed: Any, sites: int, heads: int, gone: set[Head]) -> str | None:
    for place, head in enumerate(removed):
        there = len(head) == 2 and head[0] < sites and head[1] < heads
        if not there or Head(*head) in gone or head in removed[:place]:
            return f"head {'.'.join(map(str, head))} is not there to be removed"
    return None


def _scores_fault(step: Step, sites: int, heads: int, gone: set[Head]) -> str | None:
    for matrix in [] if step.scores is None else [step.scores.values, step.scores.keys]:
        if matrix.shape != (sites, heads):
            return f"the scores are not {sites} x {heads}"
        if {Head(*map(int, head)) for head in np.argwhere(np.isnan(matrix))} != gone:
            return "a head that is gone has a score, or one that is there has none"
    return None


def _misfit(value: Any, shape: Any, place: str) -> str | None:
    """The first place where a value is not of its shape."""
    if callable(shape):
        return None if shape(value) else f"{place.lstrip('.')} is {value!r:.60}"
    if not isinstance(value, type(shape)):
        return f"{place.lstrip('.') or 'it'} is {value!r:.60}"
    if isinstance(shape, list):
        faults = (_misfit(each, shape[0], f"{place}[{number}]") for number, each in enumerate(value))
    else:
        for name in shape:
            if name != "*" and not name.endswith("?") and name not in value:
                return f"{place}.{name} is missing".lstrip(".")
        faults = (
            _misfit(each, shape.get(name, shape.get(f"{name}?", shape.get("*", _anything))), f"{place}.{name}")
            for name, each in value.items()
        )
    return next((fault for fault in faults if fault is not None), None)


def _anything(value: Any) -> bool:
    """A later version may say more."""
    return True
