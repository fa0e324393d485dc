"""What a long score has computed so far, in the output folder until the scores are complete and recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from greedy_gnorm.errors import RunFolderError
from greedy_gnorm.model.sites import Sites
from greedy_gnorm.records.files import RESUME, writing_to

KEPT_FILE = "scoring.jsonl"


class KeptScoring:
    """A file of results by name; its first line is the state of what is scored, such as the units that are gone.

    A step is recorded once its scores are known. Until then an interruption would lose all of them, which for a score
    of many passes can be hours. Numbers are written with all digits: a resumed score equals an uninterrupted one.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / KEPT_FILE
        self._results: dict[str, Any] = {}

    def begin(self, state: Mapping[str, Any]) -> None:
        """Start to keep the results for what is in this state, or continue; those for another state are deleted."""
        self._state = dict(state)
        lines = self._read()
        if lines[:1] == [self._state]:
            self._results = {line["name"]: line["result"] for line in lines[1:]}
        else:
            self.clear()

    def result(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result that was kept under this name, else the computed one, which is then kept."""
        if name not in self._results:
            self._results[name] = compute()
            if len(self._results) == 1:
                self._append(self._state)  # not in `begin`: most scores have no results to keep
            self._append({"name": name, "result": self._results[name]})
        return self._results[name]

    def clear(self) -> None:
        """Forget all results: the scores that they belong to are recorded."""
        self._results = {}
        with writing_to(self.path):
            self.path.unlink(missing_ok=True)

    def _append(self, line: dict[str, Any]) -> None:
        with writing_to(self.path, RESUME):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _read(self) -> list[dict[str, Any]]:
        """The complete lines; the last one may be torn."""
        if not self.path.exists():
            return []
        try:
            whole, newline, rest = self.path.read_text(encoding="utf-8").rpartition("\n")
            lines = [json.loads(line) for line in whole.split("\n")] if newline else []
        except (OSError, ValueError, RecursionError) as error:
            raise RunFolderError(f"{self.path} is damaged ({error}): delete it; that step is scored again.") from error
        if not all(_is_result(line) for line in lines[1:]):
            raise RunFolderError(f"{self.path} is damaged: delete it; that step is scored again.")
        if rest:
            with writing_to(self.path):
                self.path.write_text(whole + newline, encoding="utf-8")
        return lines


@contextmanager
def keeping_scores(sites: Sites, folder: Path, state: Mapping[str, Any], *, resume: bool) -> Iterator[None]:
    """Keep the results of a score outside of a run in this folder until the block is complete."""
    kept = KeptScoring(folder)
    if not resume:
        kept.clear()
    kept.begin(state)
    sites.kept = kept
    yield
    kept.clear()


def _is_result(line: Any) -> bool:
    return isinstance(line, dict) and set(line) == {"name", "result"} and isinstance(line["name"], str)
