"""Reading files, folders, hub data sets and Python objects as tables by split, with the `datasets` library."""

from __future__ import annotations

import glob
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from greedy_gnorm.data.columns import cells
from greedy_gnorm.data.conll import ENDINGS, read_conll
from greedy_gnorm.data.pictures import holds_images, images_in
from greedy_gnorm.errors import DataError

if TYPE_CHECKING:
    import datasets

BUILDERS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".txt": "text",
}
READERS: dict[str, Callable[[Path], dict[str, list[Any]]]] = dict.fromkeys(ENDINGS, read_conll)
"""Formats that the `datasets` library does not read: functions from a file to its columns."""
ENDINGS_READ = (*BUILDERS, *READERS)
SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "validation_matched": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
WHOLE = "all rows"
"""The name of a table without splits."""

TEXT = ("string", "large_string")
"""The types of a column of text."""
LINE = "line"
"""The column of a text file: one row for each line."""

Splits: TypeAlias = "dict[str, datasets.Dataset]"


def read_splits(source: Any) -> Splits:
    """Read tables by split: train, validation, test, or `all rows` if the data has no splits."""
    import datasets

    if isinstance(source, str | Path):
        tables = _read_named(str(source))
    elif isinstance(source, datasets.DatasetDict):
        tables = _by_split_name(dict(source))
    elif isinstance(source, datasets.Dataset):
        tables = {WHOLE: source}
    elif isinstance(source, Sequence) and all(isinstance(row, Mapping) for row in source):
        tables = {WHOLE: _read_safely(lambda: datasets.Dataset.from_list([dict(row) for row in source]), "the rows")}
    else:
        raise DataError(
            f"Data can be a file, a folder, hub:NAME, a datasets.Dataset, a list of dicts or of batches; "
            f"not {type(source).__name__}."
        )
    tables = {name: part for table in tables.items() for name, part in _by_split_column(*table).items()}
    tables = {name: table for name, table in tables.items() if len(table)}
    if not tables:
        raise DataError(f"There are no rows in {source if isinstance(source, str | Path) else 'the data'}.")
    return tables


def check_source(source: str) -> None:
    """Refuse what is certain to hold no data, before anything is loaded."""
    path = Path(source)
    if source.startswith("hub:"):
        _hub_parts(source)
    elif not path.exists():
        raise DataError(f"There is no file or folder {source}. (Write hub:NAME for a data set on the hub.)")
    elif path.is_file() and path.suffix.lower() not in ENDINGS_READ:
        raise DataError(f"{path} is not a supported kind of file: {', '.join(ENDINGS_READ)}.")
    elif path.is_file() and path.stat().st_size == 0:
        raise DataError(f"{path} is empty.")


def _read_named(source: str) -> Splits:
    import datasets

    check_source(source)
    if source.startswith("hub:"):
        return _read_hub(source)
    path = Path(source)
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return read_splits(_read_safely(lambda: datasets.load_from_disk(source), source))
    if path.is_dir():
        return _read_folder(path)
    return {SPLITS.get(path.stem.lower(), WHOLE): _read_file(path)}


def _read_file(path: Path) -> datasets.Dataset:
    import datasets

    check_source(str(path))
    if path.suffix.lower() == ".json" and (articles := _squad_articles(path)) is not None:
        return _read_safely(lambda: _squad_table(articles), str(path))
    if path.suffix.lower() in READERS:
        return datasets.Dataset.from_dict(READERS[path.suffix.lower()](path))
    builder = BUILDERS[path.suffix.lower()]
    options: dict[str, Any] = {}
    if builder == "csv":
        # "NA", "null" and the like are ordinary text
        options = {"keep_default_na": False, "sep": "\t" if path.suffix.lower() == ".tsv" else ","}
    # Not the shared cache, which confuses files of equal name and time
    with tempfile.TemporaryDirectory(prefix="gnorm-data-") as cache:
        options |= {"data_files": [glob.escape(str(path))], "cache_dir": cache, "keep_in_memory": True}
        table = _read_safely(lambda: datasets.load_dataset(builder, split="train", **options), str(path))
    return table.rename_column("text", LINE) if builder == "text" else _with_places_of_images(table, path.parent)


def _with_places_of_images(table: datasets.Dataset, folder: Path) -> datasets.Dataset:
    """A table whose columns of names of images are paths, which are written relative to the folder."""
    texts = [name for name, feature in table.features.items() if getattr(feature, "dtype", "") in TEXT]
    for column in [name for name in texts if holds_images(table[name])]:
        places = [None if value is None else str(folder / value) for value in cells(table, column)]
        table = table.remove_columns(column).add_column(column, places)
    return table


def _squad_articles(path: Path) -> list[Any] | None:
    """The articles of a file in SQuAD's format: {"data": [{"title", "paragraphs": [{"context", "qas"}]}]}."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None  # JSON lines, or a fault that the library of data sets reports
    articles = content.get("data") if isinstance(content, dict) else None
    if (
        isinstance(articles, list)
        and articles
        and all(isinstance(one, dict) and "paragraphs" in one for one in articles)
    ):
        return articles
    return None


def _squad_table(articles: Sequence[Mapping[str, Any]]) -> datasets.Dataset:
    """A row for each question, with columns as in the data set `squad`; impossible questions have no answers."""
    import datasets

    text, number = datasets.Value("string"), datasets.Value("int64")
    answers = {"text": datasets.List(text), "answer_start": datasets.List(number)}
    features = datasets.Features(dict.fromkeys(("id", "title", "context", "question"), text) | {"answers": answers})
    rows: list[dict[str, Any]] = []
    for article in articles:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                found = [] if question.get("is_impossible") else question.get("answers")
                rows.append(
                    {
                        "id": str(question.get("id", len(rows))),
                        "title": article.get("title"),
                        "context": paragraph["context"],
                        "question": question["question"],
                        "answers": found
                        if found is None
                        else {name: [answer[name] for answer in found] for name in answers},
                    }
                )
    return datasets.Dataset.from_list(rows, features=features)


def _read_folder(folder: Path) -> Splits:
    import datasets

    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS_READ and path.is_file())
    if not files and (images := images_in(folder, SPLITS, WHOLE)):
        return {name: datasets.Dataset.from_dict(columns) for name, columns in images.items()}
    if not files:
        raise DataError(
            f"{folder} has no file of a supported kind ({', '.join(ENDINGS_READ)}) and no folders of images."
        )
    groups: dict[str, list[datasets.Dataset]] = {}
    for path in files:
        groups.setdefault(SPLITS.get(path.stem.lower(), WHOLE), []).append(_read_file(path))
    if WHOLE in groups and len(groups) > 1:
        odd = [path.name for path in files if path.stem.lower() not in SPLITS]
        raise DataError(
            f"{folder} has files of splits and other files: {', '.join(odd)}. Give a single file, or move them apart."
        )
    return {
        name: _read_safely(lambda parts=parts: datasets.concatenate_datasets(parts), str(folder))
        for name, parts in groups.items()
    }


def _hub_parts(source: str) -> tuple[str, str | None, str | None]:
    """Name, configuration and split of `hub:NAME[:CONFIG][:SPLIT]`; a single word after the name is a split if it is
    the name of one.
    """
    name, *rest = source.removeprefix("hub:").split(":")
    if not name or len(rest) > 2:
        raise DataError(f"Write a data set on the hub as hub:NAME[:CONFIG][:SPLIT], not {source}.")
    if len(rest) == 1:
        rest = ["", rest[0]] if rest[0].lower() in SPLITS else [rest[0], ""]
    config, split = (part or None for part in (*rest, "", "")[:2])
    return name, config, split


def _read_hub(source: str) -> Splits:
    import datasets

    name, config, split = _hub_parts(source)
    loaded = _read_safely(lambda: datasets.load_dataset(name, config, split=split), source)
    return {WHOLE: loaded} if split else _by_split_name(dict(loaded))


def _read_safely(read: Any, what: str) -> Any:
    """Call a function of the `datasets` library and turn its errors into one message with the cause."""
    try:
        return read()
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        detail = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        if "corresponds to no data" in detail:
            detail = "it has no rows."
        raise DataError(f"Can't read {what}: {detail}") from error


def _by_split_name(tables: Mapping[str, datasets.Dataset]) -> Splits:
    named = {SPLITS[name.lower()]: table for name, table in tables.items() if name.lower() in SPLITS}
    if not named and len(tables) == 1:
        return {WHOLE: next(iter(tables.values()))}
    if not named:
        raise DataError(f"No split has a known name: {', '.join(tables)}. Choose one with hub:NAME:CONFIG:SPLIT.")
    return named


def _by_split_column(name: str, table: datasets.Dataset) -> Splits:
    """Split a table by its `split` column, if it has one."""
    if name != WHOLE or "split" not in table.column_names:
        return {name: table}
    places: dict[str, list[int]] = {}
    values = cells(table, "split")
    for row, value in enumerate(values):
        places.setdefault(SPLITS.get(str(value).lower(), WHOLE), []).append(row)
    if WHOLE in places and len(places) > 1:
        odd = sorted({str(value) for value in values if str(value).lower() not in SPLITS})
        raise DataError(f"The split column has unknown values: {', '.join(odd[:5])}.")
    return {split: table.select(rows) for split, rows in places.items()}
