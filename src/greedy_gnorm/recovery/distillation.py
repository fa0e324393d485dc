"""Training a pruned model, after it was fitted, to do what the unpruned one does: a few hundred steps, without labels.

The loss of a batch is the divergence of its outputs plus the mean over the layers of the error of their hidden states,

    T^2 KL(unpruned || pruned) at the temperature T   +   mean |h - h0|^2 / mean |h0 - mean h0|^2

The error of a layer is relative to the variance of the unpruned layer over all rows: it is 1 for a layer that returns
nothing but its mean, so layers count alike and both terms have like sizes in every model. Outputs that are no logits
are compared as hidden states are.

Rows are those of the calibration, with some tokens replaced (variations.py): they and their order depend on the seed
alone. There is no dropout. So the trained model too is a function of the unpruned model, the units that are removed and
the rows.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from greedy_gnorm.data.batches import Batch, Batches
from greedy_gnorm.data.rows import PIXELS
from greedy_gnorm.errors import NonFiniteScore
from greedy_gnorm.model.modes import convert, frozen
from greedy_gnorm.model.sites import Sites
from greedy_gnorm.passes.calibration import outputs_and_states
from greedy_gnorm.passes.processes import add_up, broadcast, gather_tensors, is_first, shard_rows
from greedy_gnorm.phases import counted, phase
from greedy_gnorm.recovery.variations import REPLACED, Variations
from greedy_gnorm.tasks.task import task_of

log = logging.getLogger("greedy_gnorm")

TEMPERATURE = 2.0
RATE = 3e-4
"""The highest learning rate; it rises to it during the first steps, and then falls to zero, both in equal steps."""
WARM_UP = 0.1
"""The share of the steps in which the learning rate rises."""
CLIP = 1.0
"""The largest norm of a gradient; larger ones are scaled to it."""
SAVED_EVERY = 50
"""Steps from one checkpoint to the next."""
MANY = 100
"""A warning says when the rows are used more often than this."""

State = Mapping[str, Any]
"""What a training depends on, as plain values: a checkpoint of another one is not used."""


class Checkpoint(Protocol):
    """Where an interrupted training is kept."""

    def load(self, state: State, like: Mapping[str, Tensor]) -> tuple[int, dict[str, Tensor]] | None:
        """The steps that were done and the tensors, which have the names and shapes of those in `like`, if any."""

    def save(self, state: State, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Replace what was kept."""


@dataclass(frozen=True)
class Distillation:
    """Trains pruned models towards `original`, the unpruned one; `batches` are the rows of all processes.

    Each process has a part of the rows of every batch, and gradients are added up.
    """

    original: Sites
    batches: Batches
    steps: int

    def __call__(self, sites: Sites, kept: Checkpoint | None = None) -> None:
        """Train all parameters but the embeddings, in place and in float32 at least; goes on from what was kept."""
        first = next(sites.model.parameters())
        convert(sites.model, first.device, torch.promote_types(first.dtype, torch.float32))
        self._warn_of_many_repeats()
        parameters, order = trained_parameters(sites.model), self.order()
        for parameter in parameters.values():
            parameter.data = parameter.data.clone()  # maps that were fitted may share biases with the unpruned model
        training = _Training(parameters, self.state(sites), kept)
        with torch.enable_grad(), _only(sites.model, parameters), phase("Distilling", self.steps, "step") as work:
            work.done = training.resume()
            if work.done == self.steps:
                return
            targets, varied = Targets(self.original, self.batches), self.variations()
            for step in range(work.done, self.steps):
                batch = varied(self.batches.items[order[step]], step)
                loss = training.step(step, self.steps, partial(targets.loss, sites, batch))
                if step in (0, self.steps - 1):
                    log.info("distillation: the loss of step %d of %d is %.4f", step + 1, self.steps, loss)
                if (step + 1) % SAVED_EVERY == 0 or step + 1 == self.steps:
                    training.save(step + 1)
                work.advance()

    def order(self) -> list[int]:
        """The number of the batch of each step: all batches, shuffled by the seed, again and again."""
        chance, order = torch.Generator().manual_seed(self.batches.seed), list[int]()
        while len(order) < self.steps:
            order += torch.randperm(len(self.batches), generator=chance).tolist()
        return order[: self.steps]

    def variations(self) -> Callable[[Batch, int], Batch]:
        """The rows that a batch is replaced by in a step."""
        return Variations(self.batches) if task_of(self.original.model).varies else lambda batch, step: batch

    def state(self, sites: Sites) -> State:
        """What the result depends on besides the unpruned model."""
        return {
            "removed": [list(unit) for unit in sites.removed()],
            "steps": self.steps,
            "rows": self.batches.fingerprint,
            "batches": [len(batch) for batch in self.batches],
            "seed": self.batches.seed,
            "replaced": REPLACED if task_of(self.original.model).varies else 0.0,
        }

    def _warn_of_many_repeats(self) -> None:
        repeats = self.steps / len(self.batches)
        if repeats > MANY and is_first():
            warnings.warn(
                f"Distillation goes over its {self.batches.rows:,} rows {repeats:.0f} times in {self.steps:,} steps: "
                f"give more rows (--calibration-tokens), or fewer steps (--recover-steps).",
                stacklevel=2,
            )


class Targets:
    """What the unpruned model does with rows, and how much its outputs and states vary over those of `batches`."""

    def __init__(self, original: Sites, batches: Batches) -> None:
        self._original = original
        states, outputs = Spread(), Spread()
        with frozen(original.model), torch.no_grad():
            for batch in counted(batches.items, "Running the unpruned model", "batch"):
                if len(part := shard_rows(batch)):
                    found = outputs_and_states(original, part)
                    states.add(found[1])
                    if not task_of(original.model).gives_chances:
                        outputs.add(found[0][None])
        self._variances = states.variances()
        self._scale = 1 / TEMPERATURE**2 if task_of(original.model).gives_chances else float(outputs.variances())

    def loss(self, sites: Sites, batch: Batch) -> Tensor | None:
        """This process's part of the loss of a batch of all processes; none if it has no rows of it."""
        part, task = shard_rows(batch), task_of(sites.model)
        if not len(part):
            return None
        with frozen(self._original.model), torch.no_grad():
            wanted, targets = outputs_and_states(self._original, part)
        outputs, states = outputs_and_states(sites, part)
        divergences = task.row_divergences(outputs, wanted, part, TEMPERATURE)
        tokens = states.shape[1] * _tokens(batch) / _tokens(part)  # of the whole batch
        errors = (states - targets.to(states)).square().sum((1, 2)) / tokens  # (layers,)
        return divergences.sum() / len(batch) / self._scale + (errors / self._variances.to(errors)).mean()


def _tokens(batch: Batch) -> int:
    """The real tokens of a batch; all images have as many, so that each may count as one."""
    return int(batch.real_tokens(1).sum()) if PIXELS in batch.inputs else int(batch.real_tokens().sum())


class Spread:
    """The variance of vectors around their mean, added batch by batch: the mean of their squared distance from it."""

    def __init__(self) -> None:
        self._sums = torch.zeros(0, 0, dtype=torch.float64)  # for each layer the vectors, their squares, their number

    def add(self, vectors: Tensor) -> None:
        """Add N vectors of each layer, (layers, N, d)."""
        exact = vectors.double()
        sums = [exact.sum(1), exact.square().sum((1, 2))[:, None], torch.full_like(exact[:, :1, 0], exact.shape[1])]
        found = torch.cat(sums, dim=1).cpu()
        self._sums = self._sums + found if len(self._sums) else found

    def variances(self) -> Tensor:
        """Those of the layers over the vectors of all processes, (layers,); 1 where all vectors are the same."""
        sums = torch.stack([part for part in gather_tensors(self._sums) if len(part)]).sum(0)
        vectors, (squares, count) = sums[:, :-2], sums[:, -2:].T
        found = squares / count - (vectors / count[:, None]).square().sum(1)
        return torch.where(found > squares / count * 1e-12, found, 1.0)


class _Training:
    """The parameters under training, their optimizer, and the checkpoint that both are saved to."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], state: State, kept: Checkpoint | None) -> None:
        self._parameters, self._state, self._kept = parameters, state, kept
        self._optimizer = AdamW(parameters.values(), weight_decay=0.0)
        for parameter in parameters.values():
            self._optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, step: int, steps: int, compute: Callable[[], Tensor | None]) -> float:
        """One step down the gradient of the loss that is computed, the parts of all processes added; returns it."""
        parameters = list(self._parameters.values())
        try:
            flat = _gradients(compute(), parameters)
        except KeyboardInterrupt:
            self.save(step)
            raise
        flat = add_up(flat)
        loss, norm = float(flat[-1]), float(flat[:-1].norm())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteScore(
                f"The loss of the distillation is NaN or infinite at step {step + 1}, or its gradient is. Check the "
                f"weights for NaN, use --dtype float32, or recover by least squares alone (--recover least-squares)."
            )
        sizes = [parameter.numel() for parameter in parameters]
        scaled = flat[:-1] * min(1.0, CLIP / max(norm, CLIP))
        for parameter, part in zip(parameters, torch.split(scaled, sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        for group in self._optimizer.param_groups:
            group["lr"] = rate(step, steps)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def save(self, step: int) -> None:
        """Keep the present state, after so many steps, if any."""
        if step and self._kept is not None and is_first():
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self._tensors().items()}
            self._kept.save(self._state, step, tensors)

    def resume(self) -> int:
        """Take up the state that was kept, if any, in all processes; returns the steps that it had done."""
        tensors, found = self._tensors(), dict[str, Tensor]()

        def load() -> int:
            kept = None if self._kept is None else self._kept.load(self._state, tensors)
            found.update({} if kept is None else kept[1])
            return 0 if kept is None else kept[0]

        done = int(broadcast(load))
        if done:
            for name, tensor in tensors.items():
                own = found[name].to(tensor) if is_first() else torch.zeros_like(tensor)
                tensor.detach().copy_(add_up(own))  # the other processes may have no such file
            for parameter in self._parameters.values():
                self._optimizer.state[parameter]["step"].fill_(done)
            log.info("distillation: continued after step %d", done)
        return done

    def _tensors(self) -> dict[str, Tensor]:
        """The weights and the moments by name."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            moments = self._optimizer.state[parameter]
            found |= {f"weight.{name}": parameter, f"mean.{name}": moments["exp_avg"]}
            found[f"square.{name}"] = moments["exp_avg_sq"]
        return found


def rate(step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0."""
    rising = max(1, round(WARM_UP * steps))
    return RATE * min((step + 1) / rising, (steps - step) / max(1, steps - rising))


def _gradients(loss: Tensor | None, parameters: Sequence[nn.Parameter]) -> Tensor:
    """The gradients one after another, and the loss; zeros where the loss does not depend on a parameter."""
    found: Sequence[Tensor | None] = [None] * len(parameters)
    if loss is not None:
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    gradients = [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, found, strict=True)
    ]
    last = gradients[0].new_zeros(1) if loss is None else loss.detach().view(1).to(gradients[0])
    return torch.cat([*(gradient.flatten() for gradient in gradients), last])


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by name, but for the embeddings, the vocabulary of a language model, and those without entries."""
    modules = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    vocabulary: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
    left = {id(each) for module in (*modules, vocabulary) if module is not None for each in module.parameters()}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in left and "embed" not in name and parameter.numel() and parameter.is_floating_point()
    }


@contextmanager
def _only(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Evaluation mode, with gradients for these parameters alone."""
    with frozen(model):
        for parameter in parameters.values():
            parameter.requires_grad_()
        yield
