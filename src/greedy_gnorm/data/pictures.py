"""Images in folders: a folder for each class, below a folder for each split where there are any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from greedy_gnorm.errors import DataError

IMAGE, LABEL = "image", "label"
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def is_image(name: Any) -> bool:
    """Whether this is the name of an image file."""
    return isinstance(name, str) and Path(name).suffix.lower() in IMAGE_ENDINGS


def holds_images(column: Iterable[Any]) -> bool:
    """Whether the cells of a column are names of image files; some may be empty."""
    some = False
    for value in column:
        if value is not None and not is_image(value):
            return False
        some = some or value is not None
    return some


def images_in(folder: Path, splits: Mapping[str, str], whole: str) -> dict[str, dict[str, list[str | None]]]:
    """The columns of the images below a folder, by split; `splits` are names of folders, `whole` that of no split.

    Names of splits are those of classes where they hold images and no further folders.
    """
    parts = [part for part in _folders(folder) if part.name.lower() in splits and _is_split(part)]
    if not parts:
        columns = _classes(folder)
        return {whole: columns} if columns[IMAGE] else {}
    others = [part.name for part in _folders(folder) if part not in parts and part.name.lower() not in splits]
    if others:
        raise DataError(f"{folder} has folders of splits and other folders: {', '.join(others)}. Move them apart.")
    found: dict[str, dict[str, list[str | None]]] = {}
    for part in _folders(folder):
        columns, known = _classes(part), found.setdefault(splits[part.name.lower()], {IMAGE: [], LABEL: []})
        for name in known:
            known[name] += columns.get(name, [None] * len(columns[IMAGE]))
    return {name: columns for name, columns in found.items() if columns[IMAGE]}


def _is_split(folder: Path) -> bool:
    return any(_images(part) for part in _folders(folder))


def _classes(folder: Path) -> dict[str, list[str | None]]:
    """The images in the folder of each class with its name, or those in the folder itself, which have no labels."""
    own = [str(path) for path in sorted(folder.iterdir()) if path.is_file() and is_image(path.name)]
    labelled = [(str(path), part.name) for part in _folders(folder) for path in _images(part)]
    if own and labelled:
        raise DataError(
            f"{folder} has images beside the folders of classes ({Path(own[0]).name}, ...). Move them apart."
        )
    if own:
        return {IMAGE: list(own)}
    return {IMAGE: [path for path, _ in labelled], LABEL: [label for _, label in labelled]}


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if is_image(path.name) and path.is_file())
