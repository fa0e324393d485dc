"""A harness that kills a real process at random moments and lets another go on, until the run is done.

python tests/killing.py FOLDER KILLS SEED: prints the number of kills and how many ends are those of a run that
was never stopped. The package is imported once and every attempt is a fork, so that an attempt costs little.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

from conftest import LABEL_NAMES, tiny_model, tiny_rows, tiny_tokenizer  # noqa: E402

import greedy_gnorm as gg  # noqa: E402


def attempt(model: Path, out: Path, rows: list[dict[str, Any]]) -> None:
    """One process's part of the run, from wherever the one before was killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a torn line is dropped with a word about it
        gg.prune(str(model), None, rows, samples=20, stop="all", out=out, resume=True, latency=False)


def forked(model: Path, out: Path, rows: list[dict[str, Any]], seconds: float | None) -> bool:
    """Run an attempt in a child; kill it after so many seconds. Whether it came to its end."""
    child = os.fork()
    if child == 0:
        try:
            attempt(model, out, rows)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if os.waitstatus_to_exitcode(status) != 0:
                raise SystemExit(f"an attempt failed: {os.waitstatus_to_exitcode(status)}")
            return True
        if end is not None and time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.001)


def record(out: Path) -> dict[str, Any]:
    """All that must not depend on interruptions: every step to the bit, the result, the files of the model."""
    steps = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    result = json.loads((out / "run.json").read_text())["result"]
    files = sorted(path for path in (out / "model").rglob("*") if path.is_file())
    return {
        "steps": [{name: value for name, value in step.items() if name != "seconds"} for step in steps],
        "result": {name: value for name, value in result.items() if name != "seconds"},
        "model": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.name != "README.md"
        },
        "left over": sorted(path.name for path in out.iterdir() if path.name.startswith(".")),
    }


def main(folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    model, rows = folder / "model", tiny_rows(60)
    tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    start = time.monotonic()
    forked(model, folder / "whole", rows, None)
    whole = time.monotonic() - start
    expected, killed, ends, identical = record(folder / "whole"), 0, 0, 0
    while killed < kills:
        out = folder / f"run-{ends}"
        while killed >= kills or not forked(model, out, rows, chance.uniform(0, whole)):
            killed += 1
            if killed >= kills:
                forked(model, out, rows, None)
                break
        ends += 1
        identical += record(out) == expected
    print(json.dumps({"kills": killed, "runs": ends, "identical": identical}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
