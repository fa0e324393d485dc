"""Kill -9 or a full disk at any moment: the folder stays readable, --resume goes on, the end is the same to the bit."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import LABEL_NAMES, tiny_model, tiny_rows, tiny_tokenizer

from greedy_gnorm.cli.app import main

HERE = Path(__file__).resolve().parent


def killed(command, folder, kills, seed=0):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(HERE / "killing.py"), command, str(folder), str(kills), str(seed)],
        capture_output=True, text=True, env=environment, cwd=HERE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_handful_of_kills(tmp_path):
    found = killed("prune", tmp_path, 6, 1)
    assert found["kills"] >= 6
    assert found["identical"] == found["runs"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("command", "kills", "runs", "moments"), [("prune", 60, 5, 4), ("compare", 40, 3, 3)])
def test_many_kills(command, kills, runs, moments, tmp_path):
    found = killed(command, tmp_path, kills, 2)
    assert found["kills"] >= kills
    assert found["identical"] == found["runs"] >= runs
    assert len(found["moments"]) >= moments  # not always the same one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "written"), [("prune", ("model", "tables", "figures", "run.json")), ("compare", ("tables", "figures"))]
)
def test_a_kill_before_every_operation_on_a_file(command, written, tmp_path):
    found = killed(command, tmp_path, "files")
    assert found["kills"] == found["runs"] - 1 >= 30
    assert found["identical"] == found["runs"]
    assert {f"while {name} was written" for name in written} <= set(found["moments"])


@contextmanager
def mounted(place, options):
    """A file system of its own; only root may mount one."""
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("needs the right to mount a small file system, which is not given here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    with mounted(tmp_path / "disk", "size=400k") as place:
        yield place


@pytest.fixture
def disk(tmp_path):
    with mounted(tmp_path / "disk", "size=50m") as place:
        yield place


@pytest.fixture
def rows_file(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, tiny_rows(60))))
    return data


def everything(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_read_only_place(disk, model_folder, rows_file, tmp_path, capsys):
    """Models and data may lie in one; a run there is refused, and one that lies there is left as it is."""
    shutil.copytree(model_folder, disk / "model")
    shutil.copy(rows_file, disk / "rows.jsonl")
    call = ["prune", str(disk / "model"), "--data", str(disk / "rows.jsonl"), "--no-latency", "--quiet", "--json"]
    assert main([*call, "--stop", "all", "--out", str(disk / "run")]) == 0
    (disk / "empty").mkdir()
    lines = (disk / "run" / "journal.jsonl").read_text().splitlines(keepends=True)
    shutil.copytree(disk / "run", disk / "half")
    (disk / "half" / "journal.jsonl").write_text("".join(lines[:2]))
    before = everything(disk)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    capsys.readouterr()
    for arguments in (
        [*call, "--out", str(disk / "new")],
        [*call, "--out", str(disk / "empty")],
        [*call, "--stop", "all", "--out", str(disk / "half"), "--resume"],
        ["report", str(disk / "run")],
        ["export", str(disk / "run" / "model"), "--onnx"],
        ["compare", *call[1:4], "--methods", "ae", "--out", str(disk / "compare")],
        ["prune", "--from-run", str(disk / "run"), "--at-step", "1", "--out", str(disk / "taken")],
    ):
        assert main(arguments) == 2, arguments
        err = capsys.readouterr().err
        assert "Read-only file system" in err
        assert str(disk) in err
    assert everything(disk) == before
    assert main([*call, "--stop", "heads=1", "--out", str(tmp_path / "run")]) == 0
    assert main(["report", str(disk / "run"), "--out", str(tmp_path / "page.html")]) == 0


def test_a_lost_terminal(tmp_path):
    """The terminal goes while the run writes to it; the run ends, and goes on elsewhere."""
    model, data, out = tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "run"
    tiny_model("bert", num_hidden_layers=6, **LABEL_NAMES).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    data.write_text("\n".join(map(json.dumps, tiny_rows(200))))
    arguments = ["prune", str(model), "--data", str(data), "--stop", "all", "--no-latency"]
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "greedy_gnorm", *arguments, "--out", str(out)])
    while not (out / "journal.jsonl").exists() or (out / "journal.jsonl").read_text().count("\n") < 3:
        if select.select([terminal], [], [], 0.01)[0]:
            os.read(terminal, 10_000)
    os.close(terminal)
    os.waitpid(child, 0)
    assert 3 <= (out / "journal.jsonl").read_text().count("\n") < 25
    assert not (out / "model").exists()
    assert main([*arguments, "--out", str(out), "--resume", "--quiet"]) == 0
    assert main([*arguments, "--out", str(tmp_path / "whole"), "--quiet"]) == 0
    orders = [
        [json.loads(line)["removed"] for line in (each / "journal.jsonl").read_text().splitlines()]
        for each in (out, tmp_path / "whole")
    ]
    assert orders[0] == orders[1]


@pytest.mark.filterwarnings("ignore:.*torn")
@pytest.mark.parametrize("room", [1, 12, 40, 250])
def test_a_full_disk_is_named_and_the_run_goes_on_behind_it(
    room, small_disk, model_folder, rows_file, tmp_path, capsys
):
    """The disk is full in the journal, while the model is saved, or in the page: kilobytes of room left."""
    call = ["prune", str(model_folder), "--data", str(rows_file), "--stop", "all", "--no-latency", "--quiet", "--json"]
    assert main([*call, "--out", str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    (small_disk / "filler").write_bytes(bytes(1024 * (400 - 4 - room) // 4096 * 4096))
    out = small_disk / "run"
    assert main([*call, "--out", str(out)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    assert main([*call, "--out", str(out), "--resume"]) == 0
    steps, expected = (
        [{**json.loads(line), "seconds": None} for line in (each / "journal.jsonl").read_text().splitlines()]
        for each in (out, tmp_path / "whole")
    )
    assert steps == expected
    weights = [(each / "model" / "model.safetensors").read_bytes() for each in (out, tmp_path / "whole")]
    assert weights[0] == weights[1]
