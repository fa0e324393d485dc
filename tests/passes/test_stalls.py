"""A GPU works ahead of the program until it is asked for a value: passes ask once at their end, not for each batch."""

from __future__ import annotations

import traceback
from collections import Counter

import pytest
from conftest import tiny_batch, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import evaluate
from greedy_gnorm.scores import SCORES
from greedy_gnorm.tasks.objectives import OBJECTIVES

ASKING = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero")


class Questions(TorchDispatchMode):
    """Counts the values that this package asks tensors for; what transformers asks for is not counted."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function._schema.name in ASKING:
            frames = [frame.filename for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
            asked = [name for name in frames if "/greedy_gnorm/" in name or "/transformers/" in name]
            if asked and "/greedy_gnorm/" in asked[-1]:
                self.found[asked[-1].rpartition("/")[2]] += 1
        return function(*arguments, **(options or {}))


def questions(work, count):
    """What is asked in a pass over so many batches; the first pass, which measures sizes, is not counted."""
    batches = ready_batches([tiny_batch(rows=3, seed=seed) for seed in range(count)])
    work(batches)
    with Questions() as asked:
        work(batches)
    return asked.found


@pytest.mark.parametrize("work", ["gnorm", "fisher", "evaluation"])
def test_no_value_is_asked_for_after_each_batch(work):
    sites = find_sites(tiny_model("bert", num_hidden_layers=2))

    def run(batches):
        if work == "evaluation":
            evaluate(sites, batches)
        else:
            SCORES[work](sites, batches, OBJECTIVES["loss" if work == "fisher" else "logit-norm"])

    few, many = questions(run, 2), questions(run, 7)
    assert few == many
    assert few, "nothing was counted at all"
