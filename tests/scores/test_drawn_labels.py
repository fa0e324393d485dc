"""Fisher scores with labels drawn from the unpruned model: no labels of the data are read."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from conftest import EVERY_FAMILY, tiny_batch, tiny_model, tiny_rows
from scores.test_outputs import BATCHES, check, model_in
from twins import slow_effects, slow_squares

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.passes.evaluation import with_drawn_labels

UNLABELLED = [{name: tensor for name, tensor in batch.items() if name != "labels"} for batch in BATCHES]


def drawn(model, batches):
    """The same batches with labels drawn from a model."""
    rows = with_drawn_labels(model, ready_batches(copy.deepcopy(batches)))
    return [{**batch, "labels": item.labels} for batch, item in zip(batches, rows, strict=True)]


@EVERY_FAMILY
@pytest.mark.parametrize("state", ["whole", "cut"])
def test_kl_fisher_adds_squares_of_gates_with_drawn_labels(family, state):
    model = model_in(family, state)
    scores = gg.score(model, UNLABELLED, score="kl-fisher", units="both")
    check(model, scores, slow_squares(model, drawn(model, UNLABELLED)))


@pytest.mark.parametrize(("family", "shared"), [("bert", False), ("albert", True)])
def test_effects_of_a_shared_head_do_not_cancel(family, shared):
    """The square of their sum may be smaller or larger than the sum of their squares; without sharing they are one."""
    model = model_in(family, "whole")
    rows = drawn(model, UNLABELLED)
    sums = [np.square(effects).mean(0) for effects in slow_effects(model, rows)]
    apart = [not np.allclose(one, other) for one, other in zip(slow_squares(model, rows), sums, strict=True)]
    assert all(apart) if shared else not any(apart)


def test_labels_of_the_data_change_nothing():
    model = tiny_model("bert")
    other = [{**batch, "labels": (batch["labels"] + 1) % 3} for batch in BATCHES]
    found = [gg.score(model, batches, score="kl-fisher").values for batches in (BATCHES, other, UNLABELLED)]
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
    assert not np.array_equal(found[0], gg.score(model, BATCHES, score="fisher").values)


def test_later_steps_keep_the_labels_of_the_unpruned_model():
    model = tiny_model("bert", dtype=torch.float64)
    run = gg.prune(model, UNLABELLED, eval_data=[tiny_batch(seed=5)], method="kl-fisher-greedy", stop="heads=3")
    rows = drawn(model, UNLABELLED)
    pruned = copy.deepcopy(model)
    for step in run.steps[1:]:
        np.testing.assert_allclose(step.scores.values, gg.score(pruned, rows, score="fisher").values, rtol=1e-9)
        for unit in step.removed:
            gg.remove_heads(pruned, {unit.site: [unit.index]})


def test_quality_is_still_measured_with_the_labels_of_the_data():
    batches = [tiny_batch(rows=9, seed=5)]
    runs = [gg.prune(tiny_model("bert"), UNLABELLED, eval_data=batches, method="kl-fisher", stop="heads=1")]
    runs.append(gg.prune(tiny_model("bert"), BATCHES, eval_data=batches, method="fisher", stop="heads=1"))
    assert runs[0].steps[0].quality == runs[1].steps[0].quality


@pytest.mark.filterwarnings("ignore:Only|There are only")
def test_a_compression_needs_labels_only_to_measure_quality(model_folder):
    texts = [{"text": row["text"]} for row in tiny_rows(60)]
    options = {"eval_data": tiny_rows(90)[60:], "macs": 0.6, "rounds": 2, "measure_speed": False}
    run = gg.compress(model_folder, texts, method="joint-kl-fisher", **options)
    assert run.measure.name == "accuracy"
    assert len(run.steps) == 3
    with pytest.raises(gg.DataError, match="label"):
        gg.compress(model_folder, texts, method="joint-refit", **options)
