"""Ways to hold a model for a while and give it back as it was, also after an exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout) for every module."""
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in training:
            module.training = mode


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no parameter asks for a gradient."""
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    with evaluating(model):
        model.requires_grad_(False)
        try:
            yield
        finally:
            for parameter, wants in wanted:
                parameter.requires_grad_(wants)


def without_gradients(model: nn.Module) -> AbstractContextManager[None]:
    """Inference mode; no_grad where accelerate brings weights in, which would stay behind as inference tensors."""
    offloaded = any(parameter.is_meta for parameter in model.parameters())
    return torch.no_grad() if offloaded else torch.inference_mode()
