"""Kill -9 at any moment: the folder stays readable, --resume goes on, the end is the same to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def killed(folder, kills, seed):
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
