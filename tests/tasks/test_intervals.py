"""Intervals of a quality and of its change: Wilson's formula, a bootstrap, and how often they cover the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import tiny_config, tiny_model

from greedy_gnorm.data.batches import Batch
from greedy_gnorm.errors import GnormError
from greedy_gnorm.tasks.classification import MultiLabel, Regression, SingleLabel
from greedy_gnorm.tasks.intervals import change_interval, paired_intervals, quality_interval, resamples
from greedy_gnorm.tasks.task import Task, task_of

NO_BATCH = Batch({}, None, ())
TASK = SingleLabel(tiny_config("bert"))


def answers(right):
    """Statistics of rows that are right or wrong."""
    right = np.asarray(right)
    return np.stack([np.zeros(len(right)), 1.0 - right, np.zeros(len(right))], axis=1)


def change(task, before, after, measure):
    return paired_intervals(task, before, after)[measure]["change"]


def test_wilsons_interval_by_hand():
    n, k, z = 50, 40, 1.959963984540054
    p = k / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert quality_interval(TASK, answers([1] * k + [0] * (n - k)), "accuracy") == pytest.approx(
        (middle - half, middle + half)
    )


def test_a_change_is_paired():
    chance = np.random.default_rng(0)
    before = chance.random(400) < 0.8
    after = before.copy()
    after[:4] = ~after[:4]  # four rows change, whatever the other 396 are
    low, high = change(TASK, answers(before), answers(after), "accuracy")
    assert -0.025 < low <= high < 0.025  # unpaired it would be about 0.055 wide on each side
    assert change(TASK, answers(before), answers(before), "accuracy") == (0.0, 0.0)


def test_a_change_of_right_rows_is_that_of_their_statistics():
    chance = np.random.default_rng(5)
    before, after = chance.random(300) < 0.8, chance.random(300) < 0.7
    by_rows = change(TASK, answers(before), answers(after), "accuracy")
    assert change_interval(before, after) == pytest.approx(by_rows, abs=0.012)
    assert change_interval(before, before) == (0.0, 0.0)


def test_intervals_cover_the_truth():
    chance = np.random.default_rng(1)
    hits = [low <= 0.7 <= high for low, high in (
        quality_interval(TASK, answers(chance.random(80) < 0.7), "accuracy") for _ in range(200)
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
    low, high = quality_interval(task, good, "r2")
    assert low < task.measures(good)["r2"] < high
    assert change(task, good, bad, "r2")[1] < 0, "much worse, and the interval says so"
    assert quality_interval(task, good, "r2") == (low, high), "seeded"


def test_tasks_predict_and_draw_labels():
    import torch

    outputs = torch.tensor([[2.0, -2.0], [-2.0, 2.0]]).repeat(500, 1)
    single = task_of(tiny_model("bert", num_labels=2))
    drawn = single.drawn_labels(outputs, NO_BATCH, torch.Generator().manual_seed(0))
    assert single.predicted_labels(outputs, NO_BATCH).tolist() == [0, 1] * 500
    assert 0.95 <= float((drawn == single.predicted_labels(outputs, NO_BATCH)).float().mean()) < 1.0
    several = task_of(tiny_model("bert", num_labels=2, problem_type="multi_label_classification"))
    assert several.predicted_labels(outputs, NO_BATCH)[:2].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert set(several.drawn_labels(outputs, NO_BATCH, torch.Generator().manual_seed(0)).flatten().tolist()) == {
        0.0,
        1.0,
    }
    number = task_of(tiny_model("bert", num_labels=1))
    noise = number.drawn_labels(outputs[:, :1], NO_BATCH, torch.Generator().manual_seed(0)) - outputs[:, 0]
    assert float(noise.std()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("kind", ["two classes", "five classes", "several labels", "numbers"])
def test_measures_of_samples_are_scikit_learns(kind):
    """Many samples at once by counting, against the measures of each sample; some samples lack a class."""
    chance, rows = np.random.default_rng(3), 40
    if kind == "several labels":
        task = MultiLabel(tiny_config("bert", num_labels=3))
        statistics = np.column_stack([chance.random((rows, 6)) < 0.3, chance.random(rows)]).astype(float)
    elif kind == "numbers":
        task = Regression(tiny_config("bert", num_labels=1))
        statistics = chance.normal(size=(rows, 3)).round(1)  # some numbers are equal, and share a rank
    else:
        count = 2 if kind == "two classes" else 5
        task = SingleLabel(tiny_config("bert", num_labels=count))
        classes = np.minimum(chance.geometric(0.6, size=(rows, 2)) - 1, count - 1)
        statistics = np.column_stack([classes, chance.random(rows)]).astype(float)
    weights = np.concatenate(list(resamples(rows, 60)))
    assert weights.shape == (60, rows)
    assert (weights.sum(axis=1) == rows).all()
    many, single = task.resampled(statistics, weights), Task.resampled(task, statistics, weights)
    assert many.keys() == single.keys() >= {each.name for each in task.offered_metrics()}
    for name, values in single.items():
        np.testing.assert_allclose(many[name], values, atol=1e-9, err_msg=name)


def test_a_constant_label_has_defined_measures():
    task = Regression(tiny_config("bert", num_labels=1))
    for predicted in (2.0, 3.0):
        statistics = np.array([[2.0, predicted, 0.0]] * 4)
        found = task.resampled(statistics, np.ones((1, 4), dtype=int))
        for name in ("r2", "pearson", "spearman"):
            assert found[name] == task.measures(statistics)[name]


def test_a_measure_by_name():
    two, five = (SingleLabel(tiny_config("bert", num_labels=count)) for count in (2, 5))
    assert two.measure("f1").name == "f1"
    assert five.measure().name == "accuracy"
    assert not five.measure("loss").higher_is_better
    with pytest.raises(GnormError, match="accuracy, macro_f1, mcc, loss for this model"):
        five.measure("f1")


def test_doubts_about_evaluation_rows():
    task = SingleLabel(tiny_config("bert", num_labels=3, id2label={0: "no", 1: "yes", 2: "maybe"}))
    assert task.doubts([0, 1, 2, 0], {"accuracy": 0.75}) == []
    (missing,) = task.doubts([0, 1, 0, 0], {"accuracy": 1.0})
    assert "No evaluation row has the label maybe" in missing
    (chance,) = task.doubts([0, 1, 2, 0], {"accuracy": 0.5})
    assert "not above the 50.0% of always answering no" in chance
