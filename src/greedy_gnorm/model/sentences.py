"""Sentence encoders: how a vector is made of the outputs for tokens, as sentence-transformers stores it beside weights.

The library itself is not needed. Its files are read into one entry of the model's configuration, which every copy and
every saved model keeps, and written again beside the weights of a pruned model.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from greedy_gnorm.errors import GnormError, UnsupportedModel

ENTRY = "sentence_encoder"
"""The entry of a configuration that says how sentences are encoded."""
MODULES, TRANSFORMER, GENERAL = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
SUPPORTED = ("Transformer", "Pooling", "Normalize", "Dropout")
"""The modules of sentence-transformers that can be part of a sentence encoder."""

MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""The ways to pool tokens, in the order in which sentence-transformers joins their vectors, and its flag for each."""
DEFAULT = {"pooling": {MODES["mean"]: True}, "normalize": False, "transformer": {}, "general": {}}
"""What a bare encoder does, whose folder does not say how tokens are pooled."""


def read_modules(place: str) -> list[dict[str, Any]]:
    """The modules of a sentence encoder in a folder or on the hub; none if it is not one."""
    modules = _read_json(place, MODULES) or []
    try:
        found = [
            {"kind": str(each["type"]).rpartition(".")[2], "path": _inside(each["path"], place)} for each in modules
        ]
    except (TypeError, KeyError) as error:
        raise GnormError(f"{place}/{MODULES} is not a list of modules with a type and a path each.") from error
    if "Pooling" not in [each["kind"] for each in found]:  # a cross-encoder is a classifier
        return []
    if other := [each["kind"] for each in found if each["kind"] not in SUPPORTED]:
        raise UnsupportedModel(
            f"{place} is a sentence encoder with a module {other[0]}; supported modules are: {', '.join(SUPPORTED)}."
        )
    return found


def subfolder(modules: list[dict[str, Any]]) -> dict[str, str]:
    """Where the transformer lies in the folder, as an option of `from_pretrained`."""
    path = next((each["path"] for each in modules if each["kind"] == "Transformer"), "")
    return {"subfolder": path} if path else {}


def read_settings(place: str, modules: list[dict[str, Any]]) -> dict[str, Any]:
    """How these modules encode sentences, for the configuration of the model."""
    paths = {each["kind"]: each["path"] for each in modules}
    file = _joined(paths["Pooling"], "config.json")
    pooling = _read_json(place, file)
    if not isinstance(pooling, dict):
        raise GnormError(f"{place} has no {file} with the settings of how tokens are pooled.")
    settings = {
        "pooling": pooling,
        "normalize": "Normalize" in paths,
        "transformer": _read_json(place, _joined(paths.get("Transformer", ""), TRANSFORMER)) or {},
        "general": _read_json(place, GENERAL) or {},
    }
    pooling_modes(settings)
    if default_prompt(settings) and not pooling.get("include_prompt", True):
        raise UnsupportedModel(f"{place} leaves its default prompt out when it pools tokens, which is not supported.")
    return settings


def pooling_modes(settings: dict[str, Any]) -> list[str]:
    """The ways in which tokens are pooled, the mean if none is named; the vectors of several are joined."""
    pooling = settings["pooling"]
    flags = {flag: mode for mode, flag in MODES.items()}
    named = pooling.get("pooling_mode") or [
        flags.get(name, name) for name in (*flags, *pooling) if name.startswith("pooling_mode_") and pooling.get(name)
    ]
    modes = [named] if isinstance(named, str) else list(dict.fromkeys(named))
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise UnsupportedModel(
            f"The sentence encoder pools tokens by {unknown[0]!r}; supported are: {', '.join(MODES)}."
        )
    return modes or ["mean"]


def default_prompt(settings: dict[str, Any]) -> str:
    """The words that come before every text unless the user asks for others."""
    general = settings["general"]
    return str((general.get("prompts") or {}).get(general.get("default_prompt_name"), ""))


def write_settings(config: Any, folder: Path) -> None:
    """Make the folder of a saved model one of sentence-transformers."""
    settings = getattr(config, ENTRY, DEFAULT)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")] + [("2_Normalize", "Normalize")] * settings["normalize"]
    listed = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(modules)
    ]
    width = {"word_embedding_dimension": config.hidden_size} if settings == DEFAULT else {}
    files = {
        MODULES: listed,
        "1_Pooling/config.json": width | settings["pooling"],
        TRANSFORMER: settings["transformer"],
        GENERAL: settings["general"],
    }
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, content in files.items():
        if content:
            (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_json(place: str, name: str) -> Any:
    """The content of a file in a folder or on the hub; None if it has no such file."""
    from transformers.utils.hub import cached_file

    path = cached_file(
        place, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    if path is None:
        return None
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise GnormError(f"{place}/{name} is not a JSON file: {error}") from error


def _inside(path: Any, place: str) -> str:
    """The path of a module, which must lie in the folder."""
    parts = PurePosixPath(str(path))
    if parts.is_absolute() or ".." in parts.parts:
        raise GnormError(f"{place}/{MODULES} names {path!r}, which is not in the folder.")
    return "" if str(parts) == "." else str(parts)


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
