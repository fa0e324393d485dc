"""The form of the files in a run folder: checked when they are read, since they may come from anyone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from greedy_gnorm.errors import GnormError
from greedy_gnorm.records import compact
from greedy_gnorm.settings import SETTINGS, Settings
from greedy_gnorm.units import ATTENTION, UNIT_WORDS, Step, Unit, unpack_rows

MOST_UNITS = 1_000_000
"""More than any model has; it limits what reading a damaged file can allocate."""


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


def _share(value: Any) -> bool:
    return _number(value) and 0 <= value <= 1


def _pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_number, value))


def _nothing_or(inner: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or _mismatch(value, inner, "") is None


_UNITS = [[_count]]
_VECTORS = [[_score]]
_ROWS = {
    "source": _word,
    "rows": _count,
    "batches": _count,
    "tokens?": _count,
    "longest?": _count,
    "truncated": _count,
    "fingerprint": _word,
    "in_memory?": _flag,
}

SCHEMA = 2
"""The schema of run.json and experiment.json that is written; 0.1.0 wrote the first, without a number."""


def _present(value: Any) -> bool:
    return bool(value == SCHEMA)


_SITE = {"name": _word, "kind": _word, "layer": _count, "units": _count, "applications": _count}

RUN: dict[str, Any] = {
    "schema": _present,
    "model": {
        "name": _word,
        "type": _word,
        "weights": _word,
        "parameters": _count,
        "sites": [_SITE],
        "removed": _UNITS,
        "configuration?": _word,
        "dtype?": _word,
        "in_memory?": _flag,
        "on_hub?": _flag,
    },
    "data": {"scoring": _ROWS, "evaluation": _ROWS},
    "config": {"method": _word, "objective": _word},
    "seed": _number,
    "quality": _word,
    "higher_is_better": _flag,
    "versions": {"*": _word},
    "processes?": _count,
    "threads?": _count,
    "started": _word,
    "result?": {
        "solution": _count,
        "quality?": {"*": [_number]},
        "distilled?": {"steps": _count, "quality": {"*": _pair}},
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
        "test?": {
            "rows": _count,
            "quality": {"*": _pair},
            "intervals": {"*": {"before": _pair, "after": _pair, "change": _pair}},
        },
        "choices?": [
            {
                "name": _word,
                "step": _count,
                "quality": _number,
                "parameters": _count,
                "bytes": _count,
                "multiplications?": _nothing_or(_count),
                "promised?": _nothing_or(_positive),
                "measured?": _nothing_or(_positive),
                "milliseconds?": _nothing_or(_positive),
                "removed?": _nothing_or(_count),
                "interval?": _nothing_or(_pair),
            }
        ],
    },
    "taken?": {"run": _word, "step": _count},
}
"""run.json. A name with ? may be missing, * stands for any other name, a list for any number of equal entries."""

EXPERIMENT: dict[str, Any] = {
    **RUN,
    "data": {"evaluation": _ROWS},
    "methods": [_word],
    "draws?": _positive,
    "runs": _count,
    "trajectories": _count,
}
"""experiment.json."""

STEP: dict[str, Any] = {
    "step": _count,
    "removed": _UNITS,
    "scores": _nothing_or(_VECTORS),
    "log_scores?": _VECTORS,
    "quality": {"*": _number},
    "parameters": _count,
    "bytes": _count,
    "multiplications?": _positive,
    "milliseconds?": _positive,
    "seconds": {"*": _number},
    "stop": _nothing_or(_word),
    "interval?": _pair,
    "right?": _word,
    "seal?": _word,
}
"""A line of journal.jsonl."""

_CLASS_SCORES = {"precision": _share, "recall": _share, "f1": _share}
_PREDICTION = {"label": _word, "probability": _share}
PREDICTIONS: dict[str, Any] = {
    "rows": _count,
    "labels?": _word,
    "classes": [_word],
    "counted?": _word,
    "per_class": [{"class": _word, "rows": _count, "before": _CLASS_SCORES, "after": _CLASS_SCORES}],
    "confusion?": {"before": [[_count]], "after": [[_count]]},
    "agreement?": _share,
    "changed_count?": _count,
    "changed?": [
        {
            "text": _word,
            "text_pair": _nothing_or(_word),
            "label": _nothing_or(_word),
            "before": _PREDICTION,
            "after": _PREDICTION,
        }
    ],
}
"""predictions.json."""


def upgraded(header: Any) -> Any:
    """A header in the present schema, from one of an earlier schema; anything else is returned unchanged."""
    if not isinstance(header, dict) or "schema" in header:
        return header
    model, config = header.get("model"), header.get("config")
    if not isinstance(model, dict) or not isinstance(config, dict):
        return header
    if not {"shape", "sites", "applications"} <= set(model):
        return header
    shape, names, applications = (model[name] for name in ("shape", "sites", "applications"))
    fits = all(isinstance(each, list) for each in (shape, names, applications)) and len(shape) == 2
    if not fits or not len(names) == len(applications) == shape[0]:
        return header
    sites = [
        {"name": name, "kind": ATTENTION, "layer": layer, "units": shape[1], "applications": times}
        for layer, (name, times) in enumerate(zip(names, applications, strict=True))
    ]
    rest = {name: value for name, value in model.items() if name not in ("shape", "applications")}
    config = _upgraded_settings(config)
    if "methods" in header:  # comparisons of 0.1.0 recorded these settings but did not apply them
        config |= {"protect": [], "min_heads": 0}
    return {**header, "schema": SCHEMA, "model": {**rest, "sites": sites}, "config": config, "higher_is_better": True}


def _upgraded_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of 0.1.0, which recorded lists and dicts in their compact form."""
    given = {
        name: compact.parse(name, value) if name in compact.FORMS and isinstance(value, str) else value
        for name, value in config.items()
    }
    return {**config, **complete_settings(given)}


def complete_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a record, in their normal form; one that the record does not have yet has its default."""
    return Settings.of({name: config[name] for name in SETTINGS if name in config}).to_json()


def header_fault(header: Any, shape: Mapping[str, Any] = RUN) -> str | None:
    """What is wrong with run.json or experiment.json, if anything."""
    fault = _mismatch(header, shape, "")
    if fault is not None:
        return fault
    try:
        complete_settings(header["config"])
    except GnormError as error:
        return f"config: {error}".rstrip(".")
    sites = header["model"]["sites"]
    total = sum(site["units"] for site in sites)
    if not 0 < total <= MOST_UNITS or not all(site["kind"] in UNIT_WORDS for site in sites):
        return f"model.sites is {sites!r:.60}"
    if not all(site["units"] > 0 and 0 < site["applications"] <= MOST_UNITS for site in sites):
        return f"model.sites is {sites!r:.60}"
    fault = _units_fault(header["model"]["removed"], sites, set())
    return "no head is left" if fault is None and len(header["model"]["removed"]) == total else fault


def predictions_fault(content: Any) -> str | None:
    """What is wrong with predictions.json, if anything."""
    fault = _mismatch(content, PREDICTIONS, "")
    if fault is not None:
        return fault
    classes = content["classes"]
    if [row["class"] for row in content["per_class"]] != classes:
        return "per_class does not have the classes"
    together = {"confusion", "agreement", "changed_count", "changed"}
    if not together & content.keys():
        return None  # a row may have several classes
    if not together <= content.keys():
        return f"{min(together - content.keys())} is missing"
    for side in ("before", "after"):
        matrix = content["confusion"][side]
        if len(matrix) != len(classes) or any(len(row) != len(classes) for row in matrix):
            return f"confusion.{side} does not have a row and a column for each class"
    if len(content["changed"]) > content["changed_count"]:
        return "more rows have changed than are counted"
    return None


def is_later(header: Any) -> bool:
    """Whether a later version of the program wrote this header."""
    number = header.get("schema") if isinstance(header, dict) else None
    return isinstance(number, int) and number > SCHEMA


def steps_fault(header: Mapping[str, Any], steps: list[Step]) -> str | None:
    """What does not fit together in a run's steps, if anything: unknown or removed units, scores of another shape."""
    sites, gone = header["model"]["sites"], {Unit(*unit) for unit in header["model"]["removed"]}
    for step in steps:
        fault = _units_fault(step.removed, sites, gone) or _scores_fault(step, sites, gone)
        if header["quality"] not in step.quality or step.quality.keys() != steps[0].quality.keys():
            fault = f"its measures of quality are {', '.join(step.quality)}"
        if step.right is not None and not _fits(step.right, header["data"]["evaluation"]["rows"]):
            fault = "the rows that are right are not those of the evaluation rows"
        if step.parameters == 0 or step.bytes == 0:
            fault = "the model has no parameters"
        if step.stop is not None and step is not steps[-1]:
            fault = "it ends the run, but steps follow"
        if step is not steps[0] and not step.removed:
            fault = "it removes no head"
        if fault is not None:
            return f"step {step.step}: {fault}"
        gone |= set(step.removed)
    result = header.get("result", {})
    if result.get("solution", 0) >= max(len(steps), 1):
        return f"the solution is step {result['solution']}, which does not exist"
    if steps and "distilled" in result and result["distilled"]["quality"].keys() != steps[0].quality.keys():
        return f"the measures of quality after training are {', '.join(result['distilled']['quality'])}"
    for choice in result.get("choices", []):
        if choice["step"] >= len(steps):
            return f"the choice {choice['name']!r:.60} is step {choice['step']}, which does not exist"
    return None


def _fits(right: str, rows: int) -> bool:
    try:
        unpack_rows(right, rows)
    except ValueError:  # binascii's error is one too
        return False
    return True


def line_fault(line: Any) -> str | None:
    """What is wrong with a line of the journal, if anything."""
    return _mismatch(line, STEP, "")


def _units_fault(removed: Any, sites: Sequence[Mapping[str, Any]], gone: set[Unit]) -> str | None:
    seen = set(gone)
    for unit in removed:
        exists = len(unit) == 2 and unit[0] < len(sites) and unit[1] < sites[unit[0]]["units"]
        if not exists:
            return f"the model has no head {list(unit)}"
        if Unit(*unit) in seen:
            return f"head {Unit(*unit)} was removed before"
        seen.add(Unit(*unit))
    return None


def _scores_fault(step: Step, sites: Sequence[Mapping[str, Any]], gone: set[Unit]) -> str | None:
    for vectors in [] if step.scores is None else [step.scores.vectors, step.scores.keys]:
        if [len(vector) for vector in vectors] != [site["units"] for site in sites]:
            return "the number of scores is not that of the model's heads"
        missing = {
            Unit(site, int(index)) for site, each in enumerate(vectors) for index in np.flatnonzero(np.isnan(each))
        }
        if missing != gone:
            return "a removed head has a score, or a remaining head has none"
    return None


def _mismatch(value: Any, shape: Any, place: str) -> str | None:
    """The first entry that is missing or has the wrong form, with its place in the file."""
    if callable(shape):
        return None if shape(value) else f"{place.lstrip('.')} is {value!r:.60}"
    if not isinstance(value, type(shape)):
        return f"{place.lstrip('.') or 'the content'} is {value!r:.60}"
    if isinstance(shape, list):
        faults = (_mismatch(each, shape[0], f"{place}[{number}]") for number, each in enumerate(value))
    else:
        for name in shape:
            if name != "*" and not name.endswith("?") and name not in value:
                return f"{place}.{name} is missing".lstrip(".")
        faults = (
            _mismatch(each, shape.get(name, shape.get(f"{name}?", shape.get("*", _anything))), f"{place}.{name}")
            for name, each in value.items()
        )
    return next((fault for fault in faults if fault is not None), None)


def _anything(value: Any) -> bool:
    """Further entries may come from a later version."""
    return True
