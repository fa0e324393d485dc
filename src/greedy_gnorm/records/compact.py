"""Lists and dicts among the settings as one line of text: in commands, and in what 0.1.0 recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from greedy_gnorm.errors import GnormError

_HEAD = re.compile(r"L?(\d{1,9})(?:(?:\.|·?H)(\d{1,9}))?", re.ASCII | re.IGNORECASE)


def parse(name: str, text: str) -> Any:
    """The value of a setting from its compact form, or from JSON, which can say everything."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise GnormError(f"{name}: {text!r:.100} is not valid JSON: {error}.") from error
    return FORMS[name][0](text)


def write(name: str, value: Any) -> str:
    """The compact form of a setting, or JSON where a value does not fit it, such as a label with a comma."""
    text, whole = FORMS[name][1](value), json.dumps(value, ensure_ascii=False)
    return text if _reads_as(name, text) == whole else whole


def _reads_as(name: str, text: str) -> str | None:
    try:
        return json.dumps(parse(name, text), ensure_ascii=False)
    except GnormError:
        return None


def _parse_pairs(name: str, text: str) -> dict[str, str]:
    """`neg=NEGATIVE,pos=POSITIVE`."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not sign or not key.strip() or not value.strip() for key, sign, value in pairs):
        raise GnormError(f"{name} must be pairs such as {EXAMPLES[name]}, not {text!r:.100}.")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _parse_labels(text: str) -> dict[str, str]:
    return _parse_pairs("label_map", text)


def _parse_options(text: str) -> dict[str, Any]:
    """`variant=A,eps=1e-5`: numbers where they can be read as such."""
    return {key: _number_or_text(value) for key, value in _parse_pairs("score_options", text).items()}


def _number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:  # not a number of this kind: try the next one
            continue
    return text


def _write_pairs(pairs: Mapping[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in pairs.items())


def _parse_heads(text: str) -> list[Any]:
    """`0.3,11`, also `L0H3,L11` and `L0·H3`: LAYER.HEAD, or LAYER for all of its heads."""
    heads: list[Any] = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        found = _HEAD.fullmatch(part)
        if found is None:
            raise GnormError(f"protect must be heads and layers such as {EXAMPLES['protect']}, not {part!r:.100}.")
        layer, head = found.groups()
        heads.append(int(layer) if head is None else (int(layer), int(head)))
    return heads


def _write_heads(heads: Sequence[Any]) -> str:
    return ",".join(f"L{each}" if isinstance(each, int) else f"L{each[0]}·H{each[1]}" for each in heads)


def _parse_names(text: str) -> str | list[str]:
    """`all`, `none` or `kept-layers,gram`."""
    names = [name.strip() for name in text.split(",")]
    return names[0] if names in (["all"], ["none"]) else names


def _write_places(places: str | Mapping[str, Any]) -> str:
    return places if isinstance(places, str) else json.dumps(places, ensure_ascii=False)


def _write_names(names: str | Sequence[str]) -> str:
    return names if isinstance(names, str) else ",".join(names) or "none"


FORMS: dict[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    "score_options": (_parse_options, _write_pairs),
    "label_map": (_parse_labels, _write_pairs),
    "protect": (_parse_heads, _write_heads),
    "device_map": (str, _write_places),
    "savings": (_parse_names, _write_names),
}
"""The settings that have a compact form: how it is read and written."""

EXAMPLES = {
    "score_options": "variant=A,eps=1e-5",
    "label_map": "neg=NEGATIVE,pos=POSITIVE",
    "protect": "0.3,11 or L0H3,L11",
    "device_map": """auto or '{"": "disk"}'""",
    "savings": "kept-layers,gram",
}
