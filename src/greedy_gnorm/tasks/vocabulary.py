"""What follows from the logits of a language model, without all of them in memory.

Hidden states are (N, d), one for each position that counts; every function returns one value for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch import Tensor, nn

AT_ONCE = 2**23
"""The logits that are computed at once."""


def chunked(head: nn.Module, function: Callable[..., Tensor], hidden: Tensor, *others: Tensor) -> Tensor:
    """A function of the logits, and of other tensors with an entry for each position, for some positions at a time."""
    import torch

    found = [function(_logits(head, some), *more) for some, *more in _pieces(head, hidden, *others)]
    return torch.cat(found) if found else hidden.new_zeros(0)


def losses(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """The negative log-likelihood of each label."""
    from torch.nn import functional

    def negative(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits, labels, reduction="none")

    return _differentiated(head, negative, hidden, labels)


def divergences(head: nn.Module, hidden: Tensor, reference: Tensor, temperature: float) -> Tensor:
    """The divergence of the distribution at each position from that of another hidden state there."""
    from greedy_gnorm.tasks.task import kl_divergences

    def divergence(logits: Tensor, reference: Tensor) -> Tensor:
        return kl_divergences(logits, _logits(head, reference), temperature)[:, 0]

    return _differentiated(head, divergence, hidden, reference)


def _differentiated(head: nn.Module, function: Callable[..., Tensor], hidden: Tensor, other: Tensor) -> Tensor:
    """A function of the logits as in `chunked`; gradients are computed at once, while the logits are there."""
    import torch

    if not (torch.is_grad_enabled() and hidden.requires_grad and len(hidden)):
        return chunked(head, function, hidden, other)
    values: list[Tensor] = []
    gradients: list[Tensor] = []
    for some, wanted in _pieces(head, hidden.detach(), other):
        found = function(_logits(head, some.requires_grad_()), wanted)
        gradients += torch.autograd.grad(found.sum(), some)
        values.append(found.detach())
    # The same values, with these gradients
    return torch.cat(values) + ((hidden - hidden.detach()) * torch.cat(gradients)).sum(-1)


def _pieces(head: nn.Module, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors for as many positions at a time as have AT_ONCE logits."""
    import torch

    weight: Any = head.weight
    count = max(AT_ONCE // len(weight), 1)
    return zip(*(torch.split(each, count) for each in tensors), strict=True)


def _logits(head: nn.Module, hidden: Tensor) -> Tensor:
    """The logits in the precision of the head, but at least in float32."""
    import torch

    weight: Any = head.weight
    logits: Tensor = head(hidden.to(weight.dtype))
    return logits.to(torch.promote_types(weight.dtype, torch.float32))


def judged(head: nn.Module, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The negative log-likelihood of each label, and 1 where it is the likeliest."""
    import torch
    from torch.nn import functional

    def judge(logits: Tensor, labels: Tensor) -> Tensor:
        negative = functional.cross_entropy(logits, labels, reduction="none")
        return torch.stack([negative, (logits.argmax(-1) == labels).to(negative)], dim=1)

    found = chunked(head, judge, hidden, labels).view(-1, 2)
    return found[:, 0], found[:, 1]


def centred_squares(head: nn.Module, hidden: Tensor) -> Tensor:
    """The squared norm of the logits minus their mean: with W the centred weights, h^T (W^T W) h."""
    import torch
    from torch.nn import functional

    extended = functional.pad(hidden, (0, 1), value=1.0)  # the last entry stands for the bias
    form = _form(head).to(hidden.device, torch.promote_types(hidden.dtype, torch.float32))
    extended = extended.to(form.dtype)
    return ((extended @ form) * extended).sum(-1)


def _form(head: nn.Module) -> Tensor:
    """W^T W of the centred weights and bias of a head, (d + 1, d + 1); computed once for each state of the weights."""
    import torch

    weight: Any = head.weight
    state = weight.data_ptr(), weight.dtype, None if weight.is_inference() else weight._version
    if head in _FORMS and _FORMS[head][0] == state:
        return _FORMS[head][1]
    with torch.inference_mode(False), torch.no_grad():
        place = "cpu" if weight.is_meta else weight.device
        # The head is called instead of read, because its weights may be on disk
        given = torch.eye(weight.shape[1], dtype=weight.dtype, device=place)
        none = head(torch.zeros_like(given[:1]))
        exact = torch.promote_types(weight.dtype, torch.float32)
        logits = torch.cat([head(given).sub_(none), none]).to(exact)
        logits -= logits.mean(1, keepdim=True)
        _FORMS[head] = state, logits @ logits.mT
    return _FORMS[head][1]


_FORMS: WeakKeyDictionary[nn.Module, tuple[Any, Tensor]] = WeakKeyDictionary()
"""The forms of the heads in use, with the state of the weights that they belong to."""
