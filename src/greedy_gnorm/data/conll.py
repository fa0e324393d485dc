"""Reading CoNLL files: a word and its tag in each line, an empty line after each sentence."""

from __future__ import annotations

from pathlib import Path

from greedy_gnorm.errors import DataError

ENDINGS = (".conll", ".iob", ".bio")
TOKENS, TAGS = "tokens", "tags"


def read_conll(path: Path) -> dict[str, list[list[str]]]:
    """The words and tags of each sentence: the first and last column, which tabs or spaces divide.

    Lines that begin a document (-DOCSTART-) or name a sentence (# id) are skipped. A file of words alone has no tags.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Can't read {path}: {error}") from error
    sentences: list[list[list[str]]] = [[]]
    widths: dict[bool, int] = {}  # whether a line has a tag: the first such line
    for number, line in enumerate(lines, start=1):
        columns = line.split()
        if not columns:
            sentences.append([])
        elif columns[0] != "-DOCSTART-" and columns[:2] != ["#", "id"]:
            widths.setdefault(len(columns) > 1, number)
            sentences[-1].append(columns)
    if len(widths) > 1:
        raise DataError(f"{path} has a tag in line {widths[True]}, but none in line {widths[False]}.")
    sentences = [sentence for sentence in sentences if sentence]
    if not sentences:
        raise DataError(f"{path} has no sentences.")
    words = {TOKENS: [[columns[0] for columns in sentence] for sentence in sentences]}
    tags = {TAGS: [[columns[-1] for columns in sentence] for sentence in sentences]}
    return words | tags if True in widths else words
