"""Every class of transformers that a family and a task have: exact norms; gates equal cuts equal reloaded models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import FAMILY_CONFIGS, IMAGE_CONFIGS, LIKE_LLAMA, model_type, tiny_batch, tiny_config, tiny_model
from twins import rows_of

import greedy_gnorm as gg
from greedy_gnorm.data.batches import Batch, ready_batches
from greedy_gnorm.model.checkpoint import save
from greedy_gnorm.model.families import FAMILIES
from greedy_gnorm.model.gates import gates
from greedy_gnorm.model.modeling_pruned import AUTO_CLASSES
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.passes.gradients import gradient_norms
from greedy_gnorm.tasks.objectives import LOGITS, Objective
from greedy_gnorm.tasks.task import TASKS, task_of
from greedy_gnorm.units import Unit

CHOICES = 3
PAIRS = [
    (family, auto_class)
    for family in (*FAMILY_CONFIGS, *IMAGE_CONFIGS)
    for auto_class in dict.fromkeys(AUTO_CLASSES.values())
    if type(tiny_config(family)) in getattr(transformers, auto_class)._model_mapping
    and any(TASKS[task].auto_class == auto_class for task in TASKS)
]


def test_the_walk_is_complete():
    """All families and all tasks are walked, and what a model predicts is known from its class."""
    assert {model_type(family) for family, _ in PAIRS} >= set(FAMILIES) - set(IMAGE_CONFIGS)
    assert {auto_class for _, auto_class in PAIRS} == {TASKS[task].auto_class for task in TASKS}
    assert len(PAIRS) > 70


def inputs_for(family: str, auto_class: str) -> dict[str, torch.Tensor]:
    if family in IMAGE_CONFIGS:
        return {"pixel_values": torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
    batch = tiny_batch(rows=3 * CHOICES if auto_class == "AutoModelForMultipleChoice" else 3, longest=9)
    del batch["labels"]
    if auto_class == "AutoModelForMultipleChoice":
        return {name: each.view(3, CHOICES, -1) for name, each in batch.items()}
    return batch


def row_values(model: Any, batch: Batch) -> torch.Tensor:
    """The norm of all outputs of a row, at real tokens where there is one for every token."""
    output = model(**batch.inputs)[0]
    squares = output.square().reshape(*output.shape[:2], -1).sum(-1)
    tokens = batch.inputs.get("attention_mask")
    if tokens is not None and squares.shape == tokens.shape:
        squares = squares * tokens
    return squares.sum(1).sqrt()


ALL_OUTPUTS = Objective("all outputs", "", False, False, LOGITS, row_values)


def alone(inputs: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One row, without padding that all of its sequences share."""
    one = {name: each[row : row + 1] for name, each in inputs.items()}
    if "attention_mask" not in one:
        return one
    length = int(one["attention_mask"].sum(-1).max())
    return {name: each[..., :length] for name, each in one.items()}


def marked(family: str, auto_class: str) -> Any:
    """Families built like Llama differ where they generate; their other classes are left to the slow tests."""
    is_slow = family in LIKE_LLAMA and auto_class != "AutoModelForCausalLM"
    return pytest.param(family, auto_class, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize(("family", "auto_class"), [marked(*pair) for pair in PAIRS])
def test_exact_norms_and_cuts(family, auto_class, tmp_path):
    changes = {"num_labels": 2} if auto_class == "AutoModelForQuestionAnswering" else {}
    model = tiny_model(family, auto_class=auto_class, dtype=torch.float64, **changes)
    assert task_of(model).auto_class == auto_class
    inputs = inputs_for(family, auto_class)
    if family in IMAGE_CONFIGS:
        inputs["pixel_values"] = inputs["pixel_values"].double()

    sites = find_sites(model, "heads")
    fast = gradient_norms(sites, ready_batches([inputs]), ALL_OUTPUTS)
    assert list(fast) == (["q"] if family.endswith("-each") else ["q", "k", "v"])
    slow = {name: [np.zeros(site.total) for site in sites] for name in fast}
    for row in range(3):
        model.zero_grad()
        row_values(model, Batch(alone(inputs, row), None, (0,))).backward()
        for site in sites:
            for name in slow:
                norms = [float(block.norm()) for block in rows_of(site, name, gradient=True)]
                slow[name][site.index] += np.array(norms) / 3
    model.zero_grad()
    for name in slow:
        for ours, theirs in zip(fast[name], slow[name], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9)

    sites = find_sites(model)
    emptied = [Unit(1, index) for index in range(sites[1].total)]
    units = list(dict.fromkeys([Unit(0, 1), *emptied, *(Unit(len(sites) - 1, index) for index in (3, 7))]))
    shut = {
        site.index: torch.tensor([float(Unit(site.index, index) not in units) for index in range(site.total)])
        for site in sites
    }

    def first_output(model: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(**inputs)[0]
        return found

    with gates(sites, shut):
        gated = first_output(model)
    remove(sites, units)
    cut = first_output(model)
    torch.testing.assert_close(cut, gated, rtol=0, atol=1e-9)
    save(model, None, tmp_path / "model")
    plainly = getattr(transformers, auto_class).from_pretrained(tmp_path / "model", trust_remote_code=True)
    for loaded in (plainly.eval(), gg.load(tmp_path / "model")):
        assert type(loaded).__name__ == type(model).__name__
        torch.testing.assert_close(first_output(loaded.double()), cut, rtol=0, atol=1e-6)
