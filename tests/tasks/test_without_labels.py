"""Runs, evaluations and tables of tasks whose rows have no labels, or none that can be used."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_batch, tiny_model, tiny_rows, tiny_tokenizer

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.model.sizes import module_counts, parameter_count

TAGS = {"id2label": {0: "O", 1: "B-X", 2: "I-X"}, "label2id": {"O": 0, "B-X": 1, "I-X": 2}, "num_labels": 3}
TEXTS = [{"text": row["text"]} for row in tiny_rows(40)]


def saved(tmp_path, *arguments, **options):
    folder = tmp_path / "whole"
    tiny_model(*arguments, **options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_tagger_that_finds_nothing_has_nothing_to_agree_on():
    model = tiny_model("bert", auto_class="AutoModelForTokenClassification", **TAGS)
    with torch.no_grad():
        model.classifier.bias += torch.tensor([100.0, 0.0, 0.0])
    with pytest.raises(gg.DataError, match=r"agreement with itself is 0\.0000"):
        gg.prune(model, TEXTS, tokenizer=tiny_tokenizer(), labels="own")


@pytest.mark.filterwarnings("ignore:Only|There are only")
def test_a_run_without_labels_is_evaluated_on_rows_without_labels(tmp_path):
    folder = saved(tmp_path, "bert", num_hidden_layers=2)
    run = gg.prune(folder, TEXTS, labels="own", stop="heads=1", out=tmp_path / "run")
    found = gg.evaluate(tmp_path / "run", TEXTS)
    assert run.measure.name == found.leading == "agreement"
    assert found.quality["agreement"][0] == 1.0
    labelled = gg.evaluate(
        tmp_path / "run", tiny_rows(30), label_map={"neg": "LABEL_0", "neutral": "LABEL_1", "pos": "LABEL_2"}
    )
    assert labelled.leading == "accuracy"


@pytest.mark.filterwarnings("ignore:Only|There are only")
def test_ready_batches_need_no_labels_if_the_models_own_are_used():
    model = tiny_model("bert")
    batches = []
    for seed in (1, 2):
        batch = tiny_batch(rows=8, seed=seed)
        del batch["labels"]
        batches.append(batch)
    assert ready_batches(batches).items[0].labels is None
    run = gg.prune(model, batches[:1], eval_data=batches[1:], labels="own", stop="heads=1")
    assert run.steps[0].quality["agreement"] == 1.0


@pytest.mark.parametrize(
    "row", [{"question": "a b", "context": "c d"}, {"premise": "a", "hypothesis": "b"}, {"text": "a", "answers": []}]
)
def test_a_language_model_takes_no_pairs_and_no_answers(row):
    model = tiny_model("llama", auto_class="AutoModelForCausalLM")
    with pytest.raises(gg.DataError, match=r"not a pair|have labels"):
        gg.score(model, [row] * 4, tokenizer=tiny_tokenizer())


def test_the_parts_of_a_bare_encoder_are_listed_once():
    model = tiny_model("bert", auto_class="AutoModel")
    names = [name for name, _ in module_counts(model)]
    assert len(names) == len(set(names))
    assert parameter_count(model) in dict(module_counts(model)).values()
