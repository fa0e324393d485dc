"""Kill -9 or a full disk at any moment: the folder stays readable, --resume goes on, the end is the same to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import tiny_rows

from greedy_gnorm.cli import main

HERE = Path(__file__).resolve().parent


def killed(folder, kills, seed=0):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "killing.py"), str(folder), str(kills), str(seed)],
        capture_output=True, text=True, env=environment, cwd=HERE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_handful_of_kills(tmp_path):
    found = killed(tmp_path, 6, 1)
    assert found["kills"] >= 6
    assert found["identical"] == found["runs"] >= 1


@pytest.mark.slow
def test_many_kills(tmp_path):
    found = killed(tmp_path, 60, 2)
    assert found["kills"] >= 50
    assert found["identical"] == found["runs"] >= 5
    assert len(found["moments"]) >= 4  # not always the same one


@pytest.mark.slow
def test_a_kill_before_every_operation_on_a_file(tmp_path):
    found = killed(tmp_path, "files")
    assert found["kills"] == found["runs"] - 1 >= 30
    assert found["identical"] == found["runs"]
    written = {f"while {name} was written" for name in ("model", "tables", "figures", "run.json")}
    assert written <= set(found["moments"])


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, which the caller fills; only root may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a small file system, which is not given here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.filterwarnings("ignore:.*torn")
@pytest.mark.parametrize("room", [1, 12, 40, 250])
def test_a_full_disk_is_named_and_the_run_goes_on_behind_it(room, small_disk, model_folder, tmp_path, capsys):
    """The disk is full in the journal, while the model is saved, or in the page: kilobytes of room left."""
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, tiny_rows(60))))
    call = ["prune", str(model_folder), "--data", str(data), "--stop", "all", "--no-latency", "--quiet", "--json"]
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
