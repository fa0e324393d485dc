"""A harness that kills a real process and lets another go on, until the run is done, and compares the end.

python tests/records/killing.py prune|compare FOLDER KILLS SEED, with `tests` on PYTHONPATH: kills at so many random
moments or, where KILLS is `files`, before every operation on a file of the folder. The package is imported once; every
attempt is a fork and costs little.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

from conftest import LABEL_NAMES, tiny_model, tiny_rows, tiny_tokenizer  # noqa: E402

import greedy_gnorm as gg  # noqa: E402
import greedy_gnorm.cli.commands  # noqa: E402 (whatever a run needs, before it is forked)

ROWS = tiny_rows(60)
BETWEEN = "between two steps' lines"


class Harness:
    """Runs of one small model in a folder, and what the end of each must be."""

    def __init__(self, command: str, folder: Path) -> None:
        self.go_on, self.record = COMMANDS[command]
        self.folder = folder
        self.model = folder / "model"
        tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES).save_pretrained(self.model)
        tiny_tokenizer().save_pretrained(self.model)
        start = time.monotonic()
        self.finish(folder / "whole")
        self.seconds = time.monotonic() - start
        self.expected = self.record(folder / "whole")
        assert self.expected.get("result", {"removed": True})["removed"]  # or the model would be the one as it came
        self.kills: Counter[str] = Counter()
        self.runs = 0
        self.identical = 0

    def finish(self, out: Path) -> None:
        """An attempt that nobody kills."""
        if not self.attempt(out):
            raise SystemExit(f"an attempt in {out} was killed by another hand")

    def attempt(self, out: Path, prepare: Callable[[], None] | None = None, seconds: float | None = None) -> bool:
        """Go on with a run in a child that kills itself, is killed or neither; whether it came to its end."""
        child = os.fork()
        if child == 0:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a torn line is dropped with a word about it
                    if prepare is not None:
                        prepare()
                    self.go_on(self.model, out)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                if code not in (0, -signal.SIGKILL):
                    raise SystemExit(f"an attempt in {out} failed: {code}")
                if code != 0:
                    self.kills[moment(out)] += 1
                return code == 0
            if end is not None and time.monotonic() >= end:
                os.kill(child, signal.SIGKILL)
                end = None
            time.sleep(0.001)

    def tear(self, out: Path, share: float) -> None:
        """Cut the last line of a journal that is not complete, as a kill in the middle of its writing would."""
        journal = out / "journal.jsonl"
        if not journal.exists() or moment(out) != BETWEEN:
            return
        lines = journal.read_bytes()
        start = lines.rstrip(b"\n").rfind(b"\n") + 1
        os.truncate(journal, start + int(share * (len(lines) - start - 1)))
        self.kills[BETWEEN] -= 1
        self.kills[moment(out)] += 1

    def check(self, out: Path) -> None:
        self.runs += 1
        self.identical += self.record(out) == self.expected

    def report(self) -> dict[str, Any]:
        return {
            "kills": self.kills.total(), "runs": self.runs, "identical": self.identical, "moments": dict(self.kills)
        }  # fmt: skip


def at_random(harness: Harness, kills: int, seed: int) -> None:
    """Kill after a random time, again and again, until a run ends between two kills or there were enough.

    The page takes longest, so half of the times are short; one kill of three leaves half a line, as within a write.
    """
    chance = random.Random(seed)
    while harness.kills.total() < kills:
        out = harness.folder / f"run-{harness.runs}"
        while harness.kills.total() < kills:
            if harness.attempt(out, seconds=chance.uniform(0, chance.choice((0.3, 1.5)) * harness.seconds)):
                break
            if chance.random() < 1 / 3:
                harness.tear(out, chance.random())
        else:
            harness.finish(out)
        harness.check(out)


def at_every_file_operation(harness: Harness) -> None:
    """Kill before the first operation on a file of the folder, in another run before the second, and so on."""
    number, ended = 0, False
    while not ended:
        out = harness.folder / f"file-{number}"
        ended = harness.attempt(out, prepare=lambda out=out, number=number: kill_before_operation(out, number))  # type: ignore[misc]
        if not ended:
            harness.finish(out)
        harness.check(out)
        number += 1


def kill_before_operation(out: Path, number: int) -> None:
    """Python tells of every file that is opened, moved, made or removed: end the process at a certain one in `out`."""
    seen = 0

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")
        changes = changes or (event == "open" and arguments[1] is not None and set(arguments[1]) & set("wax+"))
        if changes and str(arguments[0]).startswith(str(out)):
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(hear)


def moment(out: Path) -> str:
    """How far a killed run had come, by what it left."""
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    if "experiment.json" in names:
        return moment_of_a_comparison(out, names)
    if "run.json" not in names:
        return "before its record began"
    lines = (out / "journal.jsonl").read_bytes()
    if lines and not lines.endswith(b"\n"):
        return "in the middle of a journal's line"
    if "result" in json.loads((out / "run.json").read_text()):
        return "after its result was told"
    for name in sorted(names):
        if name.endswith(".partial"):
            return f"while {re.sub(r'^[.]|([.][0-9]+|[.]old)?[.]partial$', '', name)} was written"
    if "model" in names:
        return "after the model was saved"
    return BETWEEN


def moment_of_a_comparison(out: Path, names: set[str]) -> str:
    for name in ("tables", "figures"):
        if f".{name}.partial" in names:
            return f"while {name} was written"
    if "figures" in names:
        return "after its figures were written"
    parts = len(list((out / "parts").glob("*/run.json")))
    return f"with {parts} walks begun"


def prune(model: Path, out: Path) -> None:
    gg.prune(str(model), ROWS, samples=20, stop="heads=6", out=out, resume=True, latency=False)


def compare(model: Path, out: Path) -> None:
    methods = {"methods": "greedy-gnorm,ae,random", "runs": 2, "trajectories": 3}
    gg.compare(str(model), ROWS, samples=12, out=out, resume=True, **methods)


def steps_of(journal: Path) -> list[dict[str, Any]]:
    steps = [json.loads(line) for line in journal.read_text().splitlines()]
    return [{name: value for name, value in step.items() if name != "seconds"} for step in steps]


def names_in(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob("*"))


def record_of_a_comparison(out: Path) -> dict[str, Any]:
    """Every step of every walk to the bit, the tables, the files."""
    return {
        "steps": {path.parent.name: steps_of(path) for path in sorted(out.glob("parts/*/journal.jsonl"))},
        "tables": {path.name: path.read_text() for path in sorted(out.glob("tables/*"))},
        "in the folder": names_in(out),
    }


def record_of_a_run(out: Path) -> dict[str, Any]:
    """All that must not depend on interruptions: every step to the bit, the result, the files."""
    result = json.loads((out / "run.json").read_text())["result"]
    files = sorted(path for path in (out / "model").rglob("*") if path.is_file())
    return {
        "steps": steps_of(out / "journal.jsonl"),
        "result": {name: value for name, value in result.items() if name != "seconds"},
        "model": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.name != "README.md"
        },
        "in the folder": names_in(out),
    }


COMMANDS = {"prune": (prune, record_of_a_run), "compare": (compare, record_of_a_comparison)}


def main(command: str, folder: Path, kills: str, seed: int) -> None:
    harness = Harness(command, folder)
    if kills == "files":
        at_every_file_operation(harness)
    else:
        at_random(harness, int(kills), seed)
    print(json.dumps(harness.report()))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
