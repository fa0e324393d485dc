"""Short names of models and data: what titles say, never a path."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HUB = "hub:"


def model_title(model: Mapping[str, Any]) -> str:
    """A short name for the model of a record: a name on the hub as it is, else that of its folder."""
    name = str(model["name"])
    return name if model.get("on_hub") else folder_name(name)


def folder_name(path: str) -> str:
    """The name of a model's folder; that of the folder above it where it is only called `model`, as in a run."""
    name = last_part(path)
    return last_part(os.path.dirname(os.path.abspath(path))) if name == "model" else name


def data_title(header: Mapping[str, Any]) -> str:
    """A short name for the data of a record."""
    data = header["data"]
    rows = data.get("scoring", data["evaluation"])
    return "rows in memory" if rows.get("in_memory") else data_name(str(rows["source"]))


def data_name(source: str) -> str:
    """A name on the hub, or that of a file or folder without its ending."""
    if source.startswith(HUB):
        return source.removeprefix(HUB).split(":")[0]
    return last_part(source).split(".")[0] or source


def last_part(path: str) -> str:
    """The name of a file or folder without the folders above it."""
    return Path(os.path.abspath(path)).name or path


def title(header: Mapping[str, Any]) -> str:
    """`my-bert on tweets`: what a record is about."""
    return f"{model_title(header['model'])} on {data_title(header)}"


def about(header: Mapping[str, Any]) -> str:
    """The line under a figure: model, data, and the rows that quality was measured on."""
    return f"{title(header)}, quality on {header['data']['evaluation']['rows']:,} rows"
