"""A model's precision, and context managers that change its mode and restore it, even after an exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn


def convert(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Move a model to a device and a precision, in place.

    Buffers keep their precision, as when transformers loads a model: they hold the frequencies of rotations.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, dtype if parameter.is_floating_point() else None)
    return model.to(device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout) for every module; a decoder keeps no cache of keys and values."""
    training = [(module, module.training) for module in model.modules()]
    config: Any = getattr(model, "config", None)
    cached = getattr(config, "use_cache", False)
    model.eval()
    try:
        if cached:
            config.use_cache = False
        yield
    finally:
        if cached:
            config.use_cache = cached
        for module, mode in training:
            module.training = mode


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with all parameters frozen."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    with evaluating(model):
        model.requires_grad_(False)
        try:
            yield
        finally:
            for parameter, requires_grad in before:
                parameter.requires_grad_(requires_grad)


@contextmanager
def gradient_mode_restored() -> Iterator[None]:
    """Leaves torch's gradient mode as it was, even if an interruption hits an inner context while that is ending."""
    enabled = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(enabled)


def without_gradients(model: nn.Module) -> AbstractContextManager[None]:
    """Inference mode; no_grad if weights are offloaded, because accelerate would load them as inference tensors."""
    offloaded = any(parameter.is_meta for parameter in model.parameters())
    return torch.no_grad() if offloaded else torch.inference_mode()
