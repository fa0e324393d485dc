"""What a model predicts: which task fits, its losses and its measures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import LABEL_NAMES, tiny_batch, tiny_config, tiny_model, tiny_rows, tiny_tokenizer
from scipy import stats
from sklearn import metrics
from transformers import BertForMaskedLM

import greedy_gnorm as gg
from greedy_gnorm.data.batches import Batch, ready_batches
from greedy_gnorm.model.modeling_pruned import AUTO_CLASSES
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import evaluate, row_statistics
from greedy_gnorm.tasks.predictions import class_measures, confusion
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


@pytest.mark.parametrize("classes", [2, 3, 20, 150])
@pytest.mark.parametrize("rows", [1, 40, 917])
def test_measures_of_classes_have_the_digits_of_scikit_learn(classes, rows):
    """Also where classes are missing, and where all labels or all predictions are the same."""
    task, chance = task_of(tiny_model("bert", num_labels=classes)), np.random.default_rng(classes * rows)
    for most in (classes, max(classes // 3, 1), 1):
        labels, guesses = chance.integers(0, most, rows), chance.integers(0, classes, rows)
        predicted = np.where(chance.random(rows) < 0.7, labels, guesses)
        for first, second in ((labels, predicted), (predicted, labels), (labels, labels)):
            table = np.stack([first, second, chance.random(rows), chance.random(rows)], axis=1).astype(float)
            found = dict(task.measures(table))
            assert found.pop("loss") == pytest.approx(table[:, 2].mean())
            assert found == {
                "accuracy": metrics.accuracy_score(first, second),
                "macro_f1": metrics.f1_score(first, second, average="macro", zero_division=0),
                "mcc": metrics.matthews_corrcoef(first, second) if len({*first, *second}) > 1 else 0.0,
                **({"f1": metrics.f1_score(first, second, zero_division=0)} if classes == 2 else {}),
            }
            predictions = task.predictions(table)
            each = metrics.precision_recall_fscore_support(first, second, labels=range(classes), zero_division=0)
            by_class = class_measures(predictions, classes)
            assert [tuple(row.values()) for row in by_class] == list(zip(*map(np.ndarray.tolist, each), strict=True))
            matrix = metrics.confusion_matrix(first, second, labels=range(classes))
            assert confusion(predictions, classes) == matrix.tolist()


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


def test_a_threshold_of_labels():
    task = task_of(tiny_model("bert", num_labels=2, problem_type="multi_label_classification"))
    logits = torch.tensor([[3.0, 1.0], [-1.0, 3.0]])  # probabilities 0.95, 0.73, 0.27, 0.95
    for threshold, predicted in ((None, [[1, 1], [0, 1]]), (0.9, [[1, 0], [0, 1]]), (0.2, [[1, 1], [1, 1]])):
        (batch,) = ready_batches([tiny_batch(rows=2)], threshold=threshold)
        assert task.predicted_labels(logits, batch).tolist() == predicted
        labels = torch.ones(2, 2)
        assert task.row_statistics(logits.double(), labels, batch)[:, 2:4].tolist() == predicted


def test_a_threshold_and_a_correlation_in_runs():
    rows = [
        {"text": row["text"], "label": [row["label"]], "number": place % 7} for place, row in enumerate(tiny_rows())
    ]
    several = tiny_model("bert", problem_type="multi_label_classification", **LABEL_NAMES)
    options = {"tokenizer": tiny_tokenizer(), "stop": "heads=1"}
    usual, strict = (gg.prune(several, rows, threshold=each, **options) for each in (None, 0.95))
    assert usual.steps[0].quality["loss"] == strict.steps[0].quality["loss"]
    assert usual.steps[0].quality["micro_f1"] != strict.steps[0].quality["micro_f1"]
    again = [gg.evaluate(strict, rows, threshold=each).quality["micro_f1"][0] for each in (None, 0.95, 0.5)]
    assert again[0] == again[1] != again[2], "the threshold of the run, unless another is given"
    with pytest.raises(gg.GnormError, match="threshold must be a share between 0 and 1"):
        gg.prune(several, rows, threshold=1.0, **options)
    number = gg.prune(tiny_model("bert", num_labels=1), rows, label="number", metric="spearman", **options)
    assert number.measure.name == "spearman"
    assert -1 <= number.solution.quality["pearson"] <= 1
