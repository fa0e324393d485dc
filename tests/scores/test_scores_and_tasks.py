"""The scores of heads and neurons with the models of every task."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from conftest import tiny_config
from test_families_and_tasks import PAIRS, inputs_for

import greedy_gnorm as gg
from greedy_gnorm.scores import SCORES
from greedy_gnorm.units import FFN

WALKED = [
    (family, auto_class)
    for family, auto_class in PAIRS
    if family in ("bert", "albert", "llama", "vit")
    and "QuestionAnswering" not in auto_class  # ready batches do not say where their contexts are
    and (family, auto_class) != ("vit", "AutoModel")  # sentences are embedded, images are not
]
OF_BOTH = [name for name in SCORES if FFN in SCORES[name].kinds]


@pytest.mark.parametrize(("family", "auto_class"), WALKED)
def test_every_score_takes_every_task_without_labels(family, auto_class):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, auto_class).from_config(tiny_config(family)).double().eval()
    batch = inputs_for(family, auto_class)
    batch = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    alone = [{name: tensor[place : place + 1] for name, tensor in batch.items()} for place in range(3)]
    for name in OF_BOTH:
        scores = gg.score(model, [batch], score=name, units="both", labels="own")
        assert all(np.isfinite(vector).all() for vector in scores.vectors), name
        if name in ("gnorm", "output-norm", "reconstruction"):  # no labels are drawn
            each = gg.score(model, alone, score=name, units="both", labels="own")
            for one, other in zip(scores.vectors, each.vectors, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6)
