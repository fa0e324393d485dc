"""What an earlier version and this one cost, in one table: python benchmarks/versions.py REVISION MODEL DATA

Both run the same work in turn on one machine, each in processes of its own: scoring passes at BERT-base's shape, and
with MODEL and DATA the removal of all heads and a comparison of the paper's five methods. REVISION is checked out from
git into a temporary folder. All figures are in plain forward passes timed beside the work, with one thread. They are
kept in runs/, and the table in docs/performance.md is written after each of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from comparison import compared, environment_of, forward_seconds
from pages import write

from greedy_gnorm.report.tables import as_markdown

HERE = Path(__file__).resolve().parents[1]
REPEATS = 2

# These use nothing but what benchmarks/speed.py has in both versions
PASS = """
import sys, speed
sites, batches = speed.bert(), speed.sentences(*map(int, sys.argv[1:]))
ours, forward = (lambda: speed.score(sites, batches)), (lambda: speed.plain_forward(sites.model, batches))
ours(), forward()
times = [(speed.seconds(ours), speed.seconds(forward)) for _ in range(5)]
print(min(own for own, _ in times) / min(unit for _, unit in times))
"""


def printed(tree: Path, code: str, *arguments: int) -> float:
    """The last line that some code prints, run with the package and the benchmarks of a version."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environment_of(tree, threads=1), cwd=tree
    )
    return float(done.stdout.split()[-1])


def works(model: str, data: str) -> dict[str, Callable[[Path], float]]:
    """Each kind of work, as a function of the source tree."""
    return {
        "one scoring pass, 64 sentences of 10 to 32 tokens": lambda tree: printed(tree, PASS, 64, 10, 32),
        "one scoring pass, 16 sentences of 128 tokens": lambda tree: printed(tree, PASS, 16, 128, 128),
        "one scoring pass, 4 sentences of 512 tokens": lambda tree: printed(tree, PASS, 4, 512, 512),
        "a step of `gnorm prune`, 64 rows to score on and 64 to evaluate on": lambda tree: (
            step_seconds(model, data, tree) / forward_seconds(model, data, threads=1)
        ),
        "a comparison of five methods, quality after each head": lambda tree: (
            compared(model, data, [], tree, threads=1)[0] / forward_seconds(model, data, threads=1)
        ),
    }


def step_seconds(model: str, data: str, tree: Path) -> float:
    """The mean time of a step of a version that removes all heads one by one."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "greedy_gnorm", "prune", model, "--data", data, "--out", str(out), "--quiet"]
        options = ["--samples", "64", "--eval-samples", "64", "--stop", "all", "--no-latency"]
        environment = environment_of(tree, threads=1)
        subprocess.run([*command, *options], check=True, capture_output=True, env=environment)
        steps = [json.loads(line) for line in (out / "journal.jsonl").read_text(encoding="utf-8").splitlines()]
    return sum(sum(step["seconds"].values()) for step in steps) / (len(steps) - 1)


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """The files of a revision in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(tree), revision], check=True, cwd=HERE)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], check=True, cwd=HERE)


def table(found: dict[str, list[list[float]]], revision: str) -> str:
    """What was measured so far, all repeats of it."""
    cells = [
        [
            name,
            *(
                " and ".join(f"{value:.{0 if value > 10 else 2}f}" for value in each)
                for each in zip(*both, strict=True)
            ),
        ]
        for name, both in found.items()
    ]
    return "1 thread.\n\n" + as_markdown(["work, in plain forward passes", f"before ({revision})", "now"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("model")
    parser.add_argument("data")
    given = parser.parse_args()
    kept = HERE / "runs" / f"versions-{given.revision}.json"
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    todo = works(str(Path(given.model).resolve()), str(Path(given.data).resolve()))
    with checked_out(given.revision) as before:
        for repeat, (name, work) in itertools.product(range(1, REPEATS + 1), todo.items()):
            if len(found.get(name, [])) < repeat:
                found.setdefault(name, []).append([work(tree) for tree in (before, HERE)])
                kept.parent.mkdir(exist_ok=True)
                kept.write_text(json.dumps(found), encoding="utf-8")
                write("performance.md", "versions", table(found, given.revision))


if __name__ == "__main__":
    main()
