"""How many copies of the model a run holds at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from conftest import LABEL_NAMES, tiny_batch, tiny_model, tiny_rows, tiny_tokenizer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import greedy_gnorm as gg
from greedy_gnorm import runs
from greedy_gnorm.deployment.speed import torch_latencies
from greedy_gnorm.passes.cache import Cache

WORDS = 20_000


class LiveCopies(TorchDispatchMode):
    """Counts the copies of the embedding matrix that are alive; a model has one, and no other tensor is as large."""

    def __init__(self, model):
        super().__init__()
        self.rows = WORDS * model.config.hidden_size
        self.alive = {}
        self.most = 0
        self.see(next(each for each in model.parameters() if each.numel() == self.rows))

    def see(self, tensor):
        storage = tensor.untyped_storage()
        if tensor.numel() == self.rows:
            self.alive[storage._cdata] = StorageWeakRef(storage)
        self.alive = {place: storage for place, storage in self.alive.items() if not storage.expired()}
        self.most = max(self.most, len(self.alive))

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return result


@pytest.mark.parametrize(
    ("stored", "options"),
    [
        (torch.float32, {}),
        (torch.float16, {}),
        (torch.float32, {"dtype": "float64"}),
        (torch.float32, {"format": "dense"}),
        (torch.float32, {"objective": "kl"}),
    ],
)
def test_a_run_with_latency_holds_three_copies_at_most(stored, options, tmp_path, monkeypatch):
    """The model as it came, and two more."""
    monkeypatch.setattr(runs, "torch_latencies", partial(torch_latencies, seconds=0))
    model = tiny_model("bert", num_hidden_layers=2, vocab_size=WORDS, dtype=stored, **LABEL_NAMES)
    with LiveCopies(model) as copies:
        run = gg.prune(
            model, tiny_rows(40), tokenizer=tiny_tokenizer(), out=tmp_path / "run", stop="heads=2", latency=True,
            **options,
        )  # fmt: skip
    assert run.latencies
    assert run.unpruned is model
    assert 2 <= copies.most <= 3
    copies.see(torch.zeros(0))
    assert len(copies.alive) == 2, "the model as it came and the solution"


@pytest.mark.parametrize(
    ("prune", "options", "kept"),
    [
        (gg.prune, {"stop": "heads=2"}, True),
        (gg.prune, {"stop": "heads=2", "recover": "least-squares"}, False),
        (gg.compress, {"macs": 0.5, "rounds": 2}, False),
        (gg.compress, {"macs": 0.5, "rounds": 2, "recover": "none"}, False),
    ],
)
def test_layers_are_kept_for_the_next_step_only_if_it_can_use_them(prune, options, kept, monkeypatch):
    stored, own = [], Cache.store
    monkeypatch.setattr(Cache, "store", lambda *given, **named: stored.append(own(*given, **named)))
    rows, evaluation = [tiny_batch(rows=48, seed=1)], [tiny_batch(rows=30, seed=2)]
    prune(tiny_model("bert", num_hidden_layers=2), rows, eval_data=evaluation, **options)
    assert stored
    assert any(stored) == kept
