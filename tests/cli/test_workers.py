"""Several processes that the command itself starts: the same results, and none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

from conftest import tiny_rows

from greedy_gnorm.cli.app import main
from greedy_gnorm.cli.workers import _environment
from greedy_gnorm.passes.peers import LAUNCHER, launched

ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER, "LOCAL_RANK")}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def comparing(place, out, *more):
    arguments = ("compare", place / "model", "--data", place / "rows.jsonl", "--out", out, "--methods", "ae,random")
    return [*map(str, (*arguments, "--runs", 2, "--trajectories", 4, "--samples", 20, "--tokens-per-batch", 40, *more))]


def gnorm(arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "greedy_gnorm", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, **options,
    )  # fmt: skip


def walks(folder):
    found = {}
    for path in sorted(folder.glob("parts/*/journal.jsonl")):
        steps = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.parent.name] = [(step["removed"], step["quality"]) for step in steps]
    return found


def test_workers_compare_as_one_process_does(place, tmp_path):
    assert main(comparing(place, tmp_path / "one")) == 0
    running = gnorm(comparing(place, tmp_path / "two", "--workers", 2))
    out, err = running.communicate(timeout=300)
    assert running.returncode == 0, err[-3000:]
    assert out.count("Report ") == 1, "one of them speaks"
    assert walks(tmp_path / "two") == walks(tmp_path / "one")
    assert len(walks(tmp_path / "one")) == 6
    assert json.loads((tmp_path / "two" / "experiment.json").read_text())["processes"] == 2


def children_of(process):
    listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    return [int(number) for number in listed.stdout.split()]


def lives(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_no_worker_outlives_the_command(place, tmp_path):
    """A scheduler's SIGTERM after a few steps, kill -9 after a few more; then the comparison is finished."""
    out, walked = tmp_path / "run", 0
    for number, code, resume in ((signal.SIGTERM, 130, []), (signal.SIGKILL, -9, ["--resume"])):
        running = gnorm(comparing(place, out, "--workers", 2, "--trajectories", 12, *resume))
        while steps_of(out) < walked + 2:
            assert running.poll() is None, running.communicate()[1]
            time.sleep(0.01)
        (worker,) = children_of(running)
        os.kill(running.pid, number)
        _, err = running.communicate(timeout=60)  # returns when the worker has closed its outputs too
        assert running.returncode == code
        assert "--resume" in err  # said by the worker if the command was killed
        end = time.monotonic() + 20
        while lives(worker) and time.monotonic() < end:
            time.sleep(0.05)
        assert not lives(worker)
        walked = steps_of(out)
        assert walked < 14 * 9, "interrupted before the end"
    again = gnorm(comparing(place, out, "--workers", 2, "--trajectories", 12, "--resume"))
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0, err[-3000:]
    assert [len(walk) for walk in walks(out).values()] == [9] * 14  # 8 heads, and the unpruned model


def steps_of(folder):
    return sum(path.read_text().count("\n") for path in folder.glob("parts/*/journal.jsonl"))


def test_an_error_is_shown_once_and_ends_all(place, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*tiny_rows(120), {"text": "a", "label": "x"}])))
    arguments = comparing(place, tmp_path / "run", "--workers", 2)
    arguments[arguments.index("--data") + 1] = str(tmp_path / "rows.jsonl")
    running = gnorm(arguments)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 2
    assert err.count("Error:") == 1
    assert "'x'" in err


SLOW_TO_FAIL = """
import os, time
if os.environ.get("RANK") == "1":
    from greedy_gnorm.passes import processes
    gathered = processes.gather
    def gather(value):
        found = gathered(value)
        if any(isinstance(each, str) and "label" in each for each in found):
            open("slow", "w").close()
            time.sleep(5)
        return found
    processes.gather = gather
"""


def test_a_worker_that_is_ended_before_it_could_report_says_nothing(place, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(SLOW_TO_FAIL)
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", str(tmp_path))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*tiny_rows(120), {"text": "a", "label": "x"}])))
    arguments = comparing(place, tmp_path / "run", "--workers", 2)
    arguments[arguments.index("--data") + 1] = str(tmp_path / "rows.jsonl")
    running = gnorm(arguments, cwd=tmp_path)
    _, err = running.communicate(timeout=120)
    assert (tmp_path / "slow").exists()
    assert running.returncode == 2
    assert err.count("Error:") == 1


def test_the_number_is_checked(place, tmp_path, capsys):
    assert main(comparing(place, tmp_path / "run", "--workers", 0)) == 2
    assert "--workers" in capsys.readouterr().err


def test_the_environment_is_a_launchers_and_is_restored(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    with _environment(2):
        assert launched()
        assert os.environ["RANK"] == "0"
        assert int(os.environ["OMP_NUM_THREADS"]) >= 1
    assert not launched()
    assert "OMP_NUM_THREADS" not in os.environ
