"""The caller's model is left exactly as it was, however a call ends."""

from __future__ import annotations

import copy
import random
import signal
import time

import numpy as np
import pytest
import sklearn.metrics  # noqa: F401 (loading it draws random numbers)
import torch
from conftest import tiny_model, tiny_rows, tiny_tokenizer

import greedy_gnorm as gg
from greedy_gnorm.scores import SCORES

ROWS = tiny_rows(24, labels=("0", "1", "2"))
HOOKS = [
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_forward_hooks_with_kwargs",
]  # fmt: skip


def odd_model():
    """A model in a state that nobody would restore by guessing: part trained, part frozen, part in training mode."""
    model = tiny_model("bert", num_hidden_layers=2, attn_implementation="sdpa").eval()
    model.bert.encoder.layer[0].train()
    model.bert.encoder.layer[1].output.dropout.train()
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[1].attention.self.value.bias.requires_grad_(False)
    model.classifier.bias.grad = torch.ones_like(model.classifier.bias)
    model.bert.encoder.layer[0].attention.register_forward_hook(lambda *_: None)
    model.register_forward_pre_hook(lambda *_: None)
    return model


def everything(model):
    """All that can be told of a model and of the random state around it."""
    numpy_state = np.random.get_state()
    return {
        "modules": [(name, type(module), id(module), module.training) for name, module in model.named_modules()],
        "own": [sorted(vars(module)) for module in model.modules()],
        "hooks": [[list(getattr(module, name)) for name in HOOKS] for module in model.modules()],
        "parameters": [
            (name, id(each), each.data_ptr(), each.requires_grad, each.grad is None, each.dtype, each.device)
            for name, each in model.named_parameters()
        ],
        "values": [each.detach().numpy().tobytes() for each in model.parameters()],
        "gradients": [each.grad.numpy().tobytes() for each in model.parameters() if each.grad is not None],
        "buffers": [(name, each.data_ptr(), each.numpy().tobytes()) for name, each in model.named_buffers()],
        "config": copy.deepcopy(vars(model.config)),
        "attention": model.config._attn_implementation,
        "modes": (torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()),
        "random": (
            torch.get_rng_state().numpy().tobytes(),
            random.getstate(),
            (numpy_state[1].tobytes(), numpy_state[2:]),
        ),
    }


@pytest.fixture
def model():
    return odd_model()


@pytest.fixture
def left_alone(model):
    before = everything(model)
    yield
    assert everything(model) == before


@pytest.mark.parametrize("score", list(SCORES))
def test_by_a_score(score, model, left_alone):
    options = {"score_options": {"permutations": 2}} if score == "shapley" else {}
    scores = gg.score(model, ROWS, tokenizer=tiny_tokenizer(), score=score, samples=6, **options)
    assert len(scores.units()) == 8


@pytest.mark.parametrize("method", ["greedy-gnorm", "ae-greedy", "tis-greedy", "attribution"])
def test_by_a_run(method, model, left_alone):
    assert len(gg.prune(model, ROWS, tokenizer=tiny_tokenizer(), method=method, samples=6, stop="heads=2").removed) == 2


def test_by_a_failed_run(model, left_alone, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(gg.GnormError):
        gg.prune(model, ROWS, tokenizer=tiny_tokenizer(), samples=6, out=tmp_path / "file" / "run")


def test_by_a_run_that_fails_in_the_middle_of_a_pass():
    model = odd_model()
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.value.weight.fill_(torch.nan)
    before = everything(model)
    with pytest.raises(gg.GnormError):
        gg.score(model, ROWS, tokenizer=tiny_tokenizer(), samples=6)
    with pytest.raises(gg.GnormError):
        gg.prune(model, ROWS, tokenizer=tiny_tokenizer(), samples=6)
    assert everything(model) == before


class Interruption(BaseException):
    """Comes from a timer, at any moment."""


def interrupt(number, frame):
    raise Interruption


@pytest.mark.parametrize("call", ["score", "prune"])
def test_by_an_interruption_at_any_moment(call, model, left_alone):
    """A timer interrupts the call in the middle of passes, of set-up and of tidying up: 40 times."""
    calls = {
        "score": lambda: gg.score(model, ROWS, tokenizer=tokenizer, samples=6, score="tis"),
        "prune": lambda: gg.prune(model, ROWS, tokenizer=tokenizer, samples=6, stop="heads=3"),
    }
    tokenizer, chance, interrupted = tiny_tokenizer(), random.Random(0), 0
    start = time.monotonic()
    calls[call]()
    whole = time.monotonic() - start
    was = signal.signal(signal.SIGALRM, interrupt)
    try:
        while interrupted < 40:
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0005, whole))
                    calls[call]()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interruption:
                interrupted += 1
    finally:
        signal.signal(signal.SIGALRM, was)
    assert interrupted == 40
