"""Intervals of a quality and of its change: Wilson's formula, a bootstrap, and how often they cover the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import tiny_config, tiny_model

from greedy_gnorm.tasks.classification import Regression, SingleLabel
from greedy_gnorm.tasks.intervals import difference_interval, quality_interval
from greedy_gnorm.tasks.task import task_of

TASK = SingleLabel(tiny_config("bert"))


def answers(right):
    """Statistics of rows that are right or wrong."""
    right = np.asarray(right)
    return np.stack([np.zeros(len(right)), 1.0 - right, np.zeros(len(right))], axis=1)


def test_wilsons_interval_by_hand():
    n, k, z = 50, 40, 1.959963984540054
    p = k / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert quality_interval(TASK, answers([1] * k + [0] * (n - k))) == pytest.approx((middle - half, middle + half))


def test_a_change_is_paired():
    chance = np.random.default_rng(0)
    before = chance.random(400) < 0.8
    after = before.copy()
    after[:4] = ~after[:4]  # four rows change, whatever the other 396 are
    low, high = difference_interval(TASK, answers(before), answers(after))
    assert -0.025 < low <= high < 0.025  # unpaired it would be about 0.055 wide on each side
    assert difference_interval(TASK, answers(before), answers(before)) == (0.0, 0.0)


def test_intervals_cover_the_truth():
    chance = np.random.default_rng(1)
    hits = [low <= 0.7 <= high for low, high in (
        quality_interval(TASK, answers(chance.random(80) < 0.7)) for _ in range(200)
    )]  # fmt: skip
    assert 0.9 <= np.mean(hits) <= 0.99


def test_other_measures_are_resampled():
    chance = np.random.default_rng(2)
    labels = chance.normal(size=60)
    task = Regression(tiny_config("bert", num_labels=1))

    def statistics(noise):
        predicted = labels + noise * chance.normal(size=60)
        return np.stack([labels, predicted, (labels - predicted) ** 2], axis=1)

    good, bad = statistics(0.2), statistics(1.0)
    low, high = quality_interval(task, good)
    assert low < task.measures(good)["r2"] < high
    assert difference_interval(task, good, bad)[1] < 0, "much worse, and the interval says so"
    assert quality_interval(task, good) == (low, high), "seeded"


def test_tasks_predict_and_draw_labels():
    import torch

    outputs = torch.tensor([[2.0, -2.0], [-2.0, 2.0]]).repeat(500, 1)
    single = task_of(tiny_model("bert", num_labels=2))
    drawn = single.drawn_labels(outputs, torch.Generator().manual_seed(0))
    assert single.predicted_labels(outputs).tolist() == [0, 1] * 500
    assert 0.95 <= float((drawn == single.predicted_labels(outputs)).float().mean()) < 1.0
    several = task_of(tiny_model("bert", num_labels=2, problem_type="multi_label_classification"))
    assert several.predicted_labels(outputs)[:2].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert set(several.drawn_labels(outputs, torch.Generator().manual_seed(0)).flatten().tolist()) == {0.0, 1.0}
    number = task_of(tiny_model("bert", num_labels=1))
    noise = number.drawn_labels(outputs[:, :1], torch.Generator().manual_seed(0)) - outputs[:, 0]
    assert float(noise.std()) == pytest.approx(1.0, abs=0.1)
