"""Labels of the data as the model counts them: one mapping for all rows."""

from __future__ import annotations

import logging

import pytest
from conftest import both_batches, tiny_model, tiny_tokenizer

import greedy_gnorm as gg
from greedy_gnorm.data.columns import LabelColumn
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import task_of

STARS = {"num_labels": 5, "label2id": {str(n + 1): n for n in range(5)}, "id2label": {n: str(n + 1) for n in range(5)}}
"""A model whose labels are called "1" to "5"."""


def rows(labels, split):
    return [{"text": f"good {split} {place}", "label": label, "split": split} for place, label in enumerate(labels)]


def read(data, model, eval_data=None):
    return [labels_of(batches) for batches in both_batches(model, tiny_tokenizer(), data, eval_data)]


def labels_of(batches):
    """In the order of the data."""
    numbers = [number for batch in batches for number in batch.rows]
    labels = [label for batch in batches for label in batch.labels.tolist()]
    return [label for _, label in sorted(zip(numbers, labels, strict=True))]


def test_numbers_that_are_names_in_one_split_and_not_in_the_other():
    """0 to 4 in the data, no 0 among the validation rows: all by number, not the validation rows by name."""
    model = tiny_model("bert", **STARS)
    validation, test = [1, 2, 3, 4, 1], [0, 1, 2, 3, 4]
    assert read([*rows(validation, "validation"), *rows(test, "test")], model) == [validation, test]


def test_rows_that_are_not_used_help_to_decide():
    model = tiny_model("bert", **STARS)
    validation, test = [1, 2, 3, 4, 1], [4, 1, 2, 3]
    data = [*rows([0, 1, 2], "train"), *rows(validation, "validation"), *rows(test, "test")]
    assert read(data, model) == [validation, test]
    by_name = [*rows([5, 1, 2], "train"), *rows(validation, "validation"), *rows(test, "test")]
    assert read(by_name, model) == [[label - 1 for label in some] for some in (validation, test)]


def test_evaluation_data_of_its_own_decides_too():
    model = tiny_model("bert", **STARS)
    scoring = [{"text": f"bad {place}", "label": label} for place, label in enumerate([1, 2, 3, 4])]
    evaluation = [{"text": f"fun {place}", "label": label} for place, label in enumerate([0, 1, 2])]
    assert read(scoring, model, evaluation) == [[1, 2, 3, 4], [0, 1, 2]]


def test_which_way_is_told(caplog):
    model = tiny_model("bert", **STARS)
    with caplog.at_level(logging.INFO, logger="greedy_gnorm"):
        read([*rows([1, 2, 3], "validation"), *rows([0, 1], "test")], model)
        assert "labels are read by number: 0 is '1', 1 is '2'" in caplog.text
        caplog.clear()
        read([*rows([1, 2, 3], "validation"), *rows([5, 1], "test")], model)
        assert "labels are read by name: 1 is '1'" in caplog.text


def test_an_odd_label_in_rows_that_are_not_used_is_no_fault():
    model = tiny_model("bert", **STARS)
    data = [*rows(["?", "n/a"], "train"), *rows(["1", "2"], "validation"), *rows(["3", "5"], "test")]
    assert read(data, model) == [[0, 1], [2, 4]]
    with pytest.raises(gg.DataError, match="does not know the label '9'"):
        read([*rows([1, 2], "validation"), *rows([3, 9], "test")], model)


def test_sets_of_labels_are_mapped_alike():
    model = tiny_model("bert", problem_type="multi_label_classification", **STARS)
    columns = [
        LabelColumn([[1], [2, 4]], None, True),
        LabelColumn([[0, 3]], None, True),
        LabelColumn([[4]], None, False),
    ]
    first, second, unused = task_of(model).map_labels(columns, Settings())
    assert first == [(0, 1, 0, 0, 0), (0, 0, 1, 0, 1)]
    assert second == [(1, 0, 0, 1, 0)]
    assert unused == []
