"""Several processes on one machine, and as two hosts: the same order, the same scores, one writer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
from conftest import LABEL_NAMES, tiny_model, tiny_rows, tiny_tokenizer

from greedy_gnorm.records.files import locked


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, tiny_rows(80))))
    return folder


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def gnorm(*arguments):
    return ["-m", "greedy_gnorm", *map(str, arguments)]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


SLOW = partial(pytest.param, marks=pytest.mark.slow)


def torchrun(processes):
    return ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={free_port()}"]


def accelerate(processes):
    """`accelerate launch` starts several processes when told of several GPUs; without any they are on the CPU."""
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", f"--num_processes={processes}", "--num_machines=1"]
    return [*launcher, "--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={free_port()}"]


def launched(launcher, *arguments):
    return subprocess.run(
        [sys.executable, *launcher, *gnorm(*arguments)], capture_output=True, text=True, env=ENVIRONMENT
    )


def steps(folder):
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def agree(ours, theirs):
    assert [step["removed"] for step in ours] == [step["removed"] for step in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one["quality"] == pytest.approx(other["quality"], rel=1e-9)
        if one["scores"] is not None:
            values = [np.array(step["scores"], dtype=float) for step in (one, other)]
            np.testing.assert_allclose(values[0], values[1], rtol=1e-6)


def pruning(place, out, *more):
    return (
        "prune", place / "model", "--data", place / "rows.jsonl", "--out", out, "--stop", "all", "--no-latency",
        "--tokens-per-batch", "40", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(place):
    done = subprocess.run(
        [sys.executable, *gnorm(*pruning(place, place / "alone"))], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    return steps(place / "alone")


@pytest.mark.parametrize(
    ("launcher", "processes"),
    [
        (torchrun, 2),
        pytest.param(torchrun, 3, marks=pytest.mark.slow),
        pytest.param(accelerate, 2, marks=pytest.mark.slow),
    ],
)
def test_processes_agree_with_one(launcher, processes, place, alone, tmp_path):
    done = launched(launcher(processes), *pruning(place, tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-3000:]
    agree(steps(tmp_path / "run"), alone)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["processes"] == processes
    assert done.stdout.count("Removed ") == 1  # one of them speaks
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ae-greedy", "fisher-greedy", "leave-one-out", "shapley", "random"])
def test_every_kind_of_score_is_shared_out(method, place, tmp_path):
    more = ("--method", method)
    alone = subprocess.run(
        [sys.executable, *gnorm(*pruning(place, tmp_path / "one", *more))], capture_output=True, env=ENVIRONMENT
    )
    assert alone.returncode == 0
    done = launched(torchrun(2), *pruning(place, tmp_path / "two", *more))
    assert done.returncode == 0, done.stderr[-3000:]
    agree(steps(tmp_path / "two"), steps(tmp_path / "one"))


def on_two_hosts(*of_each):
    """Two launchers, as on two machines, on two loopback addresses, with a command each; what they say on stderr."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launch += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    hosts = [
        subprocess.Popen(
            [*launch, f"--node-rank={rank}", f"--local-addr=127.0.0.{rank + 1}", *gnorm(*command)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
        )
        for rank, command in enumerate(of_each)
    ]  # fmt: skip
    said = [host.communicate(timeout=300)[1] for host in hosts]
    return [host.returncode for host in hosts], said


@pytest.mark.slow
def test_two_hosts(place, alone, tmp_path):
    """The second sees no output folder."""
    codes, said = on_two_hosts(*(pruning(place, tmp_path / f"run-{rank}") for rank in range(2)))
    assert codes == [0, 0], said
    agree(steps(tmp_path / "run-0"), alone)
    assert not (tmp_path / "run-1").exists()


@pytest.mark.slow
def test_two_hosts_with_other_data_are_refused(place, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, tiny_rows(90))))
    shutil.copytree(place / "model", tmp_path / "model")
    codes, said = on_two_hosts(pruning(place, tmp_path / "run"), pruning(tmp_path, tmp_path / "run"))
    assert 0 not in codes
    assert "Processes 0 and 1 work on different things: scoring rows" in said[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_comparison_on_two_hosts_is_whole_on_the_first(place, tmp_path):
    arguments = ("compare", place / "model", "--data", place / "rows.jsonl", "--methods", "greedy-gnorm,random",
                 "--runs", "2", "--trajectories", "3", "--samples", "12", "--out")  # fmt: skip
    codes, said = on_two_hosts(*((*arguments, tmp_path / f"run-{rank}") for rank in range(2)))
    assert codes == [0, 0], said
    parts = {path.parent.name for path in (tmp_path / "run-0" / "parts").glob("*/journal.jsonl")}
    assert parts == {"greedy-gnorm-0", "greedy-gnorm-1", "random-0", "random-1", "random-2"}
    assert "greedy-gnorm, run 2" in (tmp_path / "run-0" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "x"), "Unknown method"),
        (("--label", "x"), "no column 'x'"),
        (("--stop", "heads=99"), "from 1 to 8"),
    ],
)
def test_an_error_of_all_is_said_once(arguments, message, place, tmp_path):
    done = launched(torchrun(2), *pruning(place, tmp_path / "run", *arguments))
    assert done.returncode != 0
    assert done.stderr.count("Error: ") - done.stderr.count("ChildFailedError: ") == 1
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_folder_that_one_refuses_is_refused_by_all(place, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    done = launched(torchrun(2), *pruning(place, tmp_path / "run"))
    assert done.returncode != 0
    assert "is not empty and holds no run" in done.stderr
    assert "is gone" not in done.stderr


@pytest.mark.slow
def test_scores_are_written_once(place, tmp_path):
    arguments = ("score", place / "model", "--data", place / "rows.jsonl", "--tokens-per-batch", "40", "--out")
    done = launched(torchrun(2), *arguments, tmp_path / "two")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Lowest scores") == 1
    subprocess.run([sys.executable, *gnorm(*arguments, tmp_path / "one")], check=True, env=ENVIRONMENT)
    values = [json.loads((tmp_path / name / "scores.json").read_text())["values"] for name in ("one", "two")]
    np.testing.assert_allclose(values[1], values[0], rtol=1e-6)


@pytest.mark.slow
def test_a_dead_process_ends_all_and_the_run_is_resumed(place, alone, tmp_path):
    out = tmp_path / "run"
    group = subprocess.Popen(
        [sys.executable, *torchrun(2), *gnorm(*pruning(place, out))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    while not (out / "journal.jsonl").exists() or (out / "journal.jsonl").read_text().count("\n") < 1:
        assert group.poll() is None
        time.sleep(0.005)
    children = subprocess.run(["pgrep", "-P", str(group.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, err = group.communicate(timeout=120)
    assert group.returncode != 0
    assert "--resume" in err  # the other one's last words
    done = launched(torchrun(2), *pruning(place, out, "--resume"))
    assert done.returncode == 0, done.stderr[-3000:]
    agree(steps(out), alone)


def test_a_comparison_is_spread(place, tmp_path):
    arguments = (
        "compare", place / "model", "--data", place / "rows.jsonl", "--methods", "greedy-gnorm,ae,random",
        "--runs", "2", "--trajectories", "3", "--samples", "12",
    )  # fmt: skip
    done = launched(torchrun(2), *arguments, "--out", tmp_path / "two")
    assert done.returncode == 0, done.stderr[-3000:]
    alone = subprocess.run(
        [sys.executable, *gnorm(*arguments, "--out", tmp_path / "one")], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert alone.returncode == 0, alone.stderr
    for name in ("comparison.csv", "solutions.csv"):
        assert (tmp_path / "two/tables" / name).read_text() == (tmp_path / "one/tables" / name).read_text()


def test_a_second_process_on_the_same_folder_is_refused(place, tmp_path):
    out = tmp_path / "run"
    with locked(out):
        done = subprocess.run(
            [sys.executable, *gnorm(*pruning(place, out))], capture_output=True, text=True, env=ENVIRONMENT
        )
    assert done.returncode == 2
    assert "Another process works in" in done.stderr
    assert {path.name for path in out.iterdir()} == {".lock"}
