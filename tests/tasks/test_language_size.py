"""What scoring a real language model costs: SmolLM2-135M, where GNORM_SMOLLM2 names its folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "language.py"


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["logit-norm", "loss"])
def test_memory_and_time_of_scoring(objective):
    folder = os.environ.get("GNORM_SMOLLM2")
    if folder is None:
        pytest.skip("needs SmolLM2-135M: set GNORM_SMOLLM2 to its folder")
    command = [sys.executable, str(BENCHMARK), folder, "--objective", objective, "--repeats", "3"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["memory ratio"] <= 2.5
    assert found["time ratio"] <= 2.6
