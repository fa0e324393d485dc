"""Several processes on one machine, and as two hosts: the same order, the same scores, one writer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_batch, tiny_rows
from passes.ranks import COMPARISON, COMPRESSION, DISTILLATION, SWAPS, TRIALS

import greedy_gnorm as gg
from greedy_gnorm.cli.app import main
from greedy_gnorm.errors import ProcessGone
from greedy_gnorm.passes.peers import LAUNCHER, Coordinator, Peers, _Channel
from greedy_gnorm.records.predictions import read_predictions

HERE = Path(__file__).resolve().parent


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def gnorm(*arguments):
    return ["-m", "greedy_gnorm", *map(str, arguments)]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


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
    assert main([*map(str, pruning(place, place / "alone"))]) == 0
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
@pytest.mark.parametrize(
    "method",
    [
        "ae-greedy",
        "fisher-greedy",
        "leave-one-out",
        "shapley",
        "random",
        "output-norm",
        "kl-fisher-greedy",
        "fisher-joint",
        "reconstruction-greedy",
        "reconstruction-loss-greedy",
    ],
)
def test_every_kind_of_score_is_shared_out(method, place, tmp_path):
    more = ("--method", method)
    assert main([*map(str, pruning(place, tmp_path / "one", *more))]) == 0
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
def test_an_error_on_the_second_host_is_shown_on_the_first(place, tmp_path):
    shutil.copytree(place / "model", tmp_path / "model")  # and no rows
    codes, said = on_two_hosts(pruning(place, tmp_path / "run"), pruning(tmp_path, tmp_path / "run"))
    assert 0 not in codes
    assert "Error: Process 1 failed: " in said[0]
    assert "rows.jsonl" in said[0]
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
    assert main([*map(str, arguments), str(tmp_path / "one")]) == 0
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
    assert "Error: Process 1 is gone" in err  # by the other one, which the launcher ends at the same time
    assert "--resume" in err
    done = launched(torchrun(2), *pruning(place, out, "--resume"))
    assert done.returncode == 0, done.stderr[-3000:]
    agree(steps(out), alone)


@pytest.fixture(scope="module")
def scenarios(place):
    """What two processes returned and printed in each scenario of ranks.py."""
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, HERE / "ranks.py", place], capture_output=True, text=True, env=environment
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_values_are_gathered_and_broadcast(scenarios):
    for rank, process in enumerate(scenarios["exchange"]):
        assert process["code"] == 0, process["err"]
        assert process["value"] == {
            "rank": [rank, 2],
            "gather": [{"é": [0, None, 0.1], "more": ""}, {"é": [1, None, 0.1], "more": "x"}],
            "tensors": [[[0], [1]], [[0, 1], [2, 3]]],
            "rows": [0, 1, 2, 3, 4],
            "nothing": [[1]],
            "broadcast": 10,
            "single": [0, 1, [rank]],
            "failure": "no such thing" if rank == 1 else "Process 1 failed: no such thing",
        }


def test_gathering_takes_a_bounded_multiple_of_the_size(scenarios):
    """Two objects and their encoded forms; as Python integers, the bytes alone would take 16 times the size."""
    for process in scenarios["large"]:
        assert process["value"]["lengths"] == [2**25, 2**25]
        assert 2 <= process["value"]["times"] <= 8


def test_a_busy_process_is_waited_for_beyond_the_timeout(scenarios):
    assert [process["value"] for process in scenarios["slow"]] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("scenario", "victim"),
    [("killed_while_the_first_waits", 1), ("killed_while_the_first_works", 1), ("first_killed", 0)],
)
def test_a_killed_process_is_named_within_seconds(scenario, victim, scenarios):
    processes = scenarios[scenario]
    assert processes[victim]["code"] == -signal.SIGKILL
    survivor = processes[1 - victim]["value"]
    assert f"Process {victim} is gone" in survivor["message"]
    assert "--resume" in survivor["message"]
    assert survivor["seconds"] < 10


@pytest.mark.parametrize("scenario", ["error_in_a_score", "error_in_a_walk"])
def test_the_first_process_says_once_which_other_failed_and_why(scenario, scenarios):
    first, second = scenarios[scenario]
    assert [first["value"], second["value"]] == [2, 2], "the exit code"
    assert first["err"].count("Error") == 1
    assert "Error: Process 1 failed: row 7 is infinite" in first["err"]
    assert "Error" not in second["err"]
    assert "Warning" not in second["err"]


def test_an_unexpected_error_keeps_its_traceback(scenarios):
    first, second = scenarios["unexpected_error"]
    assert first["value"] == 2
    assert "Error: Process 1 failed: KeyError: 'surprise'" in first["err"]
    assert "Traceback" not in first["err"]
    assert "in prune_steps" in second["err"]


def test_an_interruption_of_all_is_said_once(scenarios):
    first, second = scenarios["interrupted"]
    assert [first["value"], second["value"]] == [130, 130]
    assert first["err"].count("Interrupted.") == 1
    assert "Interrupted" not in second["err"]


def test_a_comparison_over_processes_has_the_same_tables(scenarios, place):
    first, second = scenarios["compared"]
    assert first["value"]["curves"] == second["value"]["curves"] == {"greedy-gnorm": 2, "ae": 2, "random": 3}
    gg.compare(place / "model", place / "rows.jsonl", out=place / "one", **COMPARISON)
    tables = {path.name: path.read_text() for path in (place / "one" / "tables").iterdir()}
    assert {path.name: path.read_text() for path in (place / "two" / "tables").iterdir()} == tables
    assert {path.name for path in (place / "two" / "parts").iterdir()} == {
        path.name for path in (place / "one" / "parts").iterdir()
    }


@pytest.mark.filterwarnings("ignore:The calibration rows have")
def test_a_compression_over_processes_has_the_same_order_and_weights(scenarios, place):
    alone = gg.compress(place / "model", place / "rows.jsonl", **COMPRESSION)
    for process in scenarios["compressed"]:
        assert process["code"] == 0, process["err"]
        assert process["value"] == [[list(unit) for unit in step.removed] for step in alone.steps]
    together = gg.load(place / "compressed" / "model")
    for ours, theirs in zip(together.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    predictions = read_predictions(place / "compressed")
    for name in ("rows", "per_class", "confusion", "agreement"):
        assert predictions[name] == alone.predictions[name]
    texts = [{row["text"] for row in each["changed"]} for each in (predictions, alone.predictions)]
    assert texts[0] == texts[1]


def test_swaps_and_trials_over_processes_remove_the_same(scenarios, place):
    inputs = place / "model", place / "rows.jsonl"
    alone = gg.compress(*inputs, **SWAPS), gg.prune(*inputs, **TRIALS)
    for process in scenarios["swapped"]:
        assert process["code"] == 0, process["err"]
        assert process["value"] == [[[list(unit) for unit in step.removed] for step in run.steps] for run in alone]


@pytest.mark.filterwarnings("ignore:The calibration rows have")
def test_a_distillation_over_processes_has_the_same_result(scenarios, place):
    alone = gg.compress(place / "model", place / "rows.jsonl", **DISTILLATION)
    fitted = gg.compress(place / "model", place / "rows.jsonl", **COMPRESSION)
    for process in scenarios["distilled"]:
        assert process["code"] == 0, process["err"]
        for name, values in alone.summary()["distilled"]["quality"].items():
            assert process["value"]["quality"][name] == pytest.approx(values, abs=1e-5)
    together, inputs = gg.load(place / "distilled" / "model"), tiny_batch()
    inputs.pop("labels")
    with torch.no_grad():
        ours, theirs, before = (model(**inputs).logits for model in (together, alone.model, fitted.model))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert (before - theirs).abs().max() > 1e-3
    first, second = (process["value"] for process in scenarios["distilled_further"])
    assert first == second, "both processes end with the same weights"
    assert first[0] == 4
    assert first[1:] == pytest.approx(alone.summary()["distilled"]["quality"]["loss"], abs=1e-5)


def test_where_all_walks_begin_and_end_is_measured_once(scenarios):
    """Two heads of eight are protected, so the end has six heads removed."""
    first, second = (process["value"]["masks"] for process in scenarios["compared"])
    assert first[0] == []
    assert first[1] == [[0, 0], [0, 3], [1, 0], [1, 1], [1, 2], [1, 3]]
    for end in first[:2]:
        assert (first + second).count(end) == 1


@pytest.mark.parametrize(
    "left",
    [
        {"RANK": "1"},
        {"WORLD_SIZE": "2"},
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"RANK": "x", "WORLD_SIZE": "2", "MASTER_PORT": "29500"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    ],
)
def test_stray_variables_of_a_launcher_change_nothing(left, place, tmp_path, monkeypatch, capsys):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    assert main(["score", str(place / "model"), "--data", str(place / "rows.jsonl"), "--out", str(tmp_path)]) == 0
    assert "Lowest scores" in capsys.readouterr().out
    assert main(["score", str(tmp_path / "nothing"), "--data", "x", "--out", str(tmp_path)]) == 2
    assert "Error: " in capsys.readouterr().err


ALONE = """
from datetime import timedelta
from greedy_gnorm.cli.app import main
from greedy_gnorm.passes import processes
processes.TIMEOUT, processes.NOTICE = timedelta(seconds=2), 0.5
raise SystemExit(main(["methods"]))
"""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_other_processes_that_never_come_are_an_error_not_a_hang(rank):
    # In a process of its own: after a failure torch numbers groups differently, and none could meet another any more
    meeting = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=ENVIRONMENT | meeting, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert f"Waiting for 2 processes at 127.0.0.1:{meeting['MASTER_PORT']}" in said
    assert "unset RANK, WORLD_SIZE" in said
    assert "Error: The 2 processes did not meet" in said


@pytest.mark.parametrize(("rank", "size"), [("x", "2"), ("0", "many"), ("2", "2"), ("-1", "2")])
def test_an_impossible_rank_is_refused(rank, size, monkeypatch, capsys):
    for name, value in zip(LAUNCHER, (rank, size, "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert main(["methods"]) == 2
    assert f"RANK is '{rank}' and WORLD_SIZE is '{size}'" in " ".join(capsys.readouterr().err.split())


def test_strangers_can_not_join():
    coordinator = Coordinator(2)
    for hello in (b"GET / HTTP/1.1\r\n", b"0 0\n", b"\xff" * 1000, b"\n"):
        with socket.create_connection(("127.0.0.1", coordinator.port)) as stranger:
            stranger.sendall(hello)
            stranger.settimeout(10)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    peers = [Peers(rank, ("127.0.0.1", coordinator.port), coordinator.token) for rank in range(2)]
    threads = [threading.Thread(target=peer.wait) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    for peer in peers:
        peer.leave()


def test_the_kernel_notices_a_lost_host():
    """Each end of a connection asks whether the other's host is still there, and gives up within two minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as end:
        _Channel(end)
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count = (
            end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        )
        assert idle + interval * count <= 120


def test_a_process_that_connects_after_a_failure_hears_of_it():
    coordinator = Coordinator(2)
    peers = [Peers(0, ("127.0.0.1", coordinator.port), coordinator.token)]
    peers[0].report("no room")
    peers.append(Peers(1, ("127.0.0.1", coordinator.port), coordinator.token))
    for peer in peers:
        with pytest.raises(ProcessGone, match="no room"):
            peer.wait()


def test_a_process_that_ends_early_is_named_to_those_who_wait():
    coordinator = Coordinator(3)
    peers = [Peers(rank, ("127.0.0.1", coordinator.port), coordinator.token) for rank in range(3)]
    peers[2].leave()
    with pytest.raises(ProcessGone, match="Process 2 ended before the others"):
        peers[1].wait()


HOLDS_THE_LOCK = """
import sys
from pathlib import Path
from greedy_gnorm.records.files import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_on_the_same_folder_is_refused(place, tmp_path, capsys):
    out = tmp_path / "run"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_LOCK, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "locked\n"
    assert main([*map(str, pruning(place, out))]) == 2
    other.communicate()
    assert "Another process works in" in capsys.readouterr().err
    assert {path.name for path in out.iterdir()} == {".lock"}
