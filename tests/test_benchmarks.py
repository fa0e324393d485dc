"""The benchmarks in the repository run: tiny models, the same functions."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def speed(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import speed

    yield speed
    for name in ("speed", "pages", "rivals"):
        sys.modules.pop(name, None)


SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}


def test_a_walk_and_a_pass(speed):
    sites, batches = speed.bert(**SMALL), speed.sentences(4, 5, 9)
    assert speed.pass_ratio(sites, batches, 1) > 0
    whole, steps, layers = speed.trajectory(sites, batches)
    assert whole > 0
    assert len(steps) == len(layers) == 4
    assert sorted(layers) == [0, 0, 1, 1]
    assert np.isfinite(steps).all()
