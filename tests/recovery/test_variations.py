"""Rows with replaced tokens: which may change, what by, and how often."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_batch, tiny_model
from tasks.test_choices import choice_batch

from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.recovery.distillation import Distillation
from greedy_gnorm.recovery.variations import REPLACED, Variations

FIRST, LAST, PADDING = 1, 2, 0


def marked(rows, length, seed=0):
    """Rows of unequal length that begin and end with a token of their own."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 40, (rows, length), generator=chance)
    ids[:, 0] = FIRST
    mask = torch.ones_like(ids)
    for row in range(rows):
        end = length - row % 4
        ids[row, end - 1], ids[row, end:], mask[row, end:] = LAST, PADDING, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def batches():
    return ready_batches([marked(300, 60), marked(50, 20, seed=1)], seed=3)


def test_marks_and_padding_stay_and_about_a_quarter_of_the_rest_changes(batches):
    batch = batches.items[0]
    varied = Variations(batches)(batch, 0)
    before, after = (each.inputs["input_ids"] for each in (batch, varied))
    stays = (before == FIRST) | (before == LAST) | (before == PADDING)
    assert torch.equal(before[stays], after[stays])
    assert after[~stays].min() >= 5, "no mark is put where none was"
    changed = (before != after).float()
    same_by_chance = 1 / 35
    assert changed[~stays].mean() == pytest.approx(REPLACED * (1 - same_by_chance), abs=0.02)
    by_row = changed.sum(1) / (~stays).sum(1)
    assert by_row.min() < 0.05
    assert 0.4 < by_row.max() < 0.75
    assert torch.equal(varied.inputs["attention_mask"], batch.inputs["attention_mask"])
    assert torch.equal(before, marked(300, 60)["input_ids"]), "the rows themselves are left alone"


def test_tokens_are_drawn_as_often_as_they_occur():
    rows = marked(400, 40)
    body = rows["input_ids"] >= 5
    rows["input_ids"][body] = torch.where(torch.arange(int(body.sum())) % 10 == 0, 7, 6)
    batches = ready_batches([rows])
    after = Variations(batches)(batches.items[0], 5).inputs["input_ids"]
    assert set(after.unique().tolist()) == {PADDING, FIRST, LAST, 6, 7}
    assert (after[body] == 7).float().mean() == pytest.approx(0.1, abs=0.02)


def test_a_step_always_gives_the_same_rows_and_another_one_others(batches):
    batch = batches.items[0]
    one, again = (Variations(batches)(batch, 4).inputs["input_ids"] for _ in range(2))
    assert torch.equal(one, again)
    assert not torch.equal(one, Variations(batches)(batch, 5).inputs["input_ids"])


def test_rows_that_have_no_token_in_common():
    batches = ready_batches([{"input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])}])
    steps = [Variations(batches)(batches.items[0], step).inputs["input_ids"] for step in range(20)]
    assert {int(token) for each in steps for token in each.flatten()} == set(range(5, 13))
    assert any(not torch.equal(each, steps[0]) for each in steps)


def test_choices_keep_their_shape():
    batches = ready_batches([{name: each for name, each in choice_batch(rows=8).items() if name != "labels"}])
    batch = batches.items[0]
    after = Variations(batches)(batch, 0)
    assert after.inputs["input_ids"].shape == batch.inputs["input_ids"].shape
    assert not torch.equal(after.inputs["input_ids"], batch.inputs["input_ids"])


def test_images_and_the_text_of_language_models_stay():
    images = ready_batches([{"pixel_values": torch.rand(3, 3, 8, 8)}])
    assert Variations(images)(images.items[0], 0) is images.items[0]
    rows = {name: each for name, each in tiny_batch().items() if name != "labels"}
    text = ready_batches([rows])
    sites = find_sites(tiny_model("gpt2", auto_class="AutoModelForCausalLM"))
    assert Distillation(sites, text, 1).variations()(text.items[0], 0) is text.items[0]
