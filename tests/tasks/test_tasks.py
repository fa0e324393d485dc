"""What a model predicts: which task fits, its losses and its measures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import tiny_batch, tiny_config, tiny_model
from scipy import stats
from sklearn import metrics
from transformers import BertForMaskedLM

import greedy_gnorm as gg
from greedy_gnorm.data.batches import Batch, ready_batches
from greedy_gnorm.model.modeling_pruned import AUTO_CLASSES
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import evaluate, row_statistics
from greedy_gnorm.tasks.task import TASKS, task_of

NO_BATCH = Batch({}, None, ())
CHANCE = np.random.default_rng(0)
KINDS = {
    "single_label_classification": ({"num_labels": 4}, torch.from_numpy(CHANCE.integers(0, 4, 30))),
    "multi_label_classification": (
        {"num_labels": 4, "problem_type": "multi_label_classification"},
        torch.from_numpy(CHANCE.integers(0, 2, (30, 4)).astype(float)),
    ),
    "regression": ({"num_labels": 1}, torch.from_numpy(CHANCE.normal(size=30))),
}


def by_scikit_learn(name, logits, labels):
    """The measures from all logits at once."""
    if name == "regression":
        return {
            "r2": metrics.r2_score(labels, logits[:, 0]),
            "pearson": stats.pearsonr(labels, logits[:, 0]).statistic,
            "spearman": stats.spearmanr(labels, logits[:, 0]).statistic,
            "mean_absolute_error": metrics.mean_absolute_error(labels, logits[:, 0]),
        }
    if name == "multi_label_classification":
        chosen = (logits > 0).astype(int)
        return {
            "micro_f1": metrics.f1_score(labels, chosen, average="micro", zero_division=0),
            "macro_f1": metrics.f1_score(labels, chosen, average="macro", zero_division=0),
            "accuracy": metrics.accuracy_score(labels, chosen),
        }
    return {
        "accuracy": metrics.accuracy_score(labels, logits.argmax(-1)),
        "macro_f1": metrics.f1_score(labels, logits.argmax(-1), average="macro", zero_division=0),
        "mcc": metrics.matthews_corrcoef(labels, logits.argmax(-1)),
    }


@pytest.mark.parametrize("name", KINDS)
def test_measures_from_the_statistics_of_rows_are_those_of_all_logits(name):
    changes, labels = KINDS[name]
    model = tiny_model("bert", **changes)
    task = task_of(model)
    assert task.name == name
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(30, changes["num_labels"])))
    tables = [
        task.row_statistics(logits[rows], labels[rows], NO_BATCH) for rows in (slice(0, 7), slice(7, 8), slice(8, 30))
    ]
    found = dict(task.measures(torch.cat(tables).numpy()))
    losses = task.row_losses(logits, labels)
    assert found == {**by_scikit_learn(name, logits.numpy(), labels.numpy()), "loss": float(losses.mean())}
    assert task.quality == next(iter(found))


@pytest.mark.parametrize("name", KINDS)
def test_losses_are_those_of_transformers(name):
    changes, labels = KINDS[name]
    model = tiny_model("bert", dtype=torch.float64, **changes)
    task, batch = task_of(model), tiny_batch()
    wanted = labels[:5]
    with torch.no_grad():
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        logits = model(**inputs).logits
        model.config.problem_type = name
        expected = model(**inputs, labels=wanted).loss
    assert float(task.row_losses(logits, wanted).mean()) == pytest.approx(float(expected), rel=1e-12)


def test_no_outputs_are_kept_for_evaluation():
    model = tiny_model("bert", num_labels=3)
    batches = ready_batches([tiny_batch(), tiny_batch(rows=3, seed=4)])
    statistics = row_statistics(find_sites(model, "heads"), batches)
    assert statistics.shape == (8, 4)  # label, prediction, loss, probability
    assert statistics[:, 0].tolist() == [label for batch in batches for label in batch.labels.tolist()]
    assert evaluate(find_sites(model, "heads"), batches)["accuracy"] == float(
        (statistics[:, 0] == statistics[:, 1]).double().mean()
    )


def test_a_model_for_something_else_is_no_classifier():
    model = BertForMaskedLM(tiny_config("bert")).eval()
    with pytest.raises(gg.UnsupportedModel, match="supported tasks are: single_label_classification"):
        gg.score(model, [tiny_batch()])


def test_every_task_says_what_it_is():
    for name in TASKS:
        task = TASKS[name]
        assert task.name == name
        assert task.auto_class in AUTO_CLASSES.values()
        assert task.pipeline
        assert task.quality
