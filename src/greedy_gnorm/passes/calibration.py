"""What the output maps of a pruned model receive and what they should return, over calibration rows.

A sublayer adds the result of its output map to a residual. In the unpruned model that sum is the target. The sums of
the unpruned model are computed once, and the inputs and residuals of the pruned model are read site by site, from the
bottom, while the sites below are fitted. Activations are kept on disk, never in memory all at once.

Layers that share their weights can't be fitted from the bottom, because a change of one application changes all others.
There the inputs and residuals are the unpruned model's own.

The classifier, the linear map that runs last, should return what it does in the unpruned model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from greedy_gnorm.data.batches import Batch, Batches
from greedy_gnorm.errors import GnormError, UnsupportedModel
from greedy_gnorm.model.modes import evaluating, frozen
from greedy_gnorm.model.sites import Site, Sites, Sum, features
from greedy_gnorm.passes.layers import layer_output, replace_forward
from greedy_gnorm.passes.processes import add_up
from greedy_gnorm.tasks.task import task_of

BY_GRADIENT = 0.5
"""The part of a token's weight that follows how much the model's outputs depend on it."""


class Sample(NamedTuple):
    """A site in one batch, applications stacked: the inputs of its output map, (N, D), and the residuals, (N, d)."""

    inputs: Tensor
    residuals: Tensor


class Target(NamedTuple):
    """What the unpruned model has at a site in one batch: the sums, (N, d), and the weight of each token, (N,)."""

    sums: Tensor
    weights: Tensor


class _Stop(Exception):
    """Ends a pass where the rest of the model is not needed."""


class Spill:
    """Tensors in files of a temporary folder, which is deleted with this object."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gnorm-calibration-")
        self._kinds: dict[str, tuple[torch.dtype, torch.Size, torch.device]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._kinds

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._kinds[name] = tensor.dtype, tensor.shape, tensor.device
        exact = tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32)).contiguous().numpy()
        try:
            exact.tofile(Path(self._folder.name) / name)
        except OSError as error:
            raise GnormError(
                f"Can't store activations in {self._folder.name}: {error.strerror or error}. Set TMPDIR to a folder on "
                f"a disk with more room, or use fewer --calibration-tokens."
            ) from error

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape, device = self._kinds[name]
        stored = np.float64 if dtype == torch.float64 else np.float32
        flat = np.fromfile(Path(self._folder.name) / name, dtype=stored)
        return torch.from_numpy(flat).view(shape).to(device, dtype)


class Calibration:
    """Calibration rows and the unpruned model's sums over them; `original` is the unpruned model."""

    def __init__(self, original: Sites, batches: Batches) -> None:
        self.original = original
        self.batches = batches
        self._spill = Spill()
        if getattr(_config(original), "chunk_size_feed_forward", 0):
            raise UnsupportedModel("Recovery reads feed-forwards as a whole: set chunk_size_feed_forward to 0.")
        unknown = next((site for site in original if site.sum is None), None)
        if unknown is not None:
            family = str(_config(original).model_type)
            raise UnsupportedModel(
                f"It is not known where {family} models add the output of {unknown} to its residual."
            )

    def clear(self) -> None:
        """Delete the stored activations; they are computed again when needed."""
        self._spill = Spill()

    def target(self, site: Site, number: int) -> Target:
        """The unpruned model's sums at this site for a batch; all sites are computed when first needed."""
        name = f"{site.index}-{number}"
        if f"sums-{name}" not in self._spill:
            self._run_original(number)
        return Target(self._spill[f"sums-{name}"], self._spill[f"weights-{name}"])

    def _run_original(self, number: int) -> None:
        """Store the sums of all sites for a batch, and how much the outputs depend on each token there.

        Where the model has an output for every token, all tokens count alike.
        """
        batch, model = self.batches.items[number], self.original.model
        task = task_of(model)
        sums: list[list[Tensor]] = [[] for _ in self.original]
        logits, classifier = list[Tensor](), self.classifier  # which may run the model, so before there are hooks
        alike = task.tokens_alike
        with ExitStack() as stack:
            stack.enter_context(frozen(model))
            stack.enter_context(torch.set_grad_enabled(not alike))
            for each, found in zip(self.original, sums, strict=True):
                stack.enter_context(_at_sum(each, found.append if alike else _requiring_gradient(found)))
            if classifier is not None:
                stack.enter_context(_after(model.get_submodule(classifier), logits.append))
            outputs = task.outputs(model, batch)
            tensors = [tensor for found in sums for tensor in found]
            squares = [torch.ones_like(tensor[..., 0]) for tensor in tensors]
            if not alike:
                values = outputs * _signs(outputs, batch, self.batches.seed)
                squares = [each.square().sum(-1) for each in torch.autograd.grad(values.sum(), tensors)]  # (B, T)
        remaining = iter(squares)
        for each, found in zip(self.original, sums, strict=True):
            name = f"{each.index}-{number}"
            weights = [_token_weights(batch, next(remaining)) for _ in found]
            self._spill[f"sums-{name}"] = _rows(batch, [tensor.detach() for tensor in found])
            self._spill[f"weights-{name}"] = _rows(batch, weights)
        if logits:
            self._spill[f"logits-{number}"] = _read_rows(batch, logits[-1].detach())

    def samples(self, sites: Sites, lowest: int = 0) -> Iterator[tuple[Site, Iterator[tuple[Sample, Target]]]]:
        """Each site of a stack of layers in running order, with its samples and targets, from the lowest layer on.

        Fit the site before asking for the next one, whose samples depend on it.
        """
        return _through_layers(sites, self, lowest)

    def original_samples(self, index: int) -> Iterator[tuple[Sample, Target]]:
        """The samples and targets of a site in the unpruned model, with all of its units."""
        site = self.original[index]
        for number, batch in enumerate(self.batches):
            inputs: list[Tensor] = []
            results: list[Tensor] = []
            with ExitStack() as stack:
                stack.enter_context(_before(site.output, inputs.append))
                stack.enter_context(_after(site.output, results.append))
                self.original.model(**batch.inputs)
            target = self.target(site, number)
            yield Sample(_rows(batch, inputs), target.sums - _rows(batch, results)), target

    @cached_property
    def input_means(self) -> list[Tensor]:
        """The means of what the output map of each site receives in the unpruned model, (D,) in float64.

        They are over the rows of all processes, with the weights of tokens that targets have.
        """
        sums = [torch.zeros(features(site.output)[0], dtype=torch.float64) for site in self.original]
        totals = torch.zeros(len(sums), dtype=torch.float64)
        for number, batch in enumerate(self.batches):
            weights = [self.target(site, number).weights for site in self.original]
            found: list[list[Tensor]] = [[] for _ in sums]
            with ExitStack() as stack, evaluating(self.original.model), torch.no_grad():
                for site, own in zip(self.original, found, strict=True):
                    stack.enter_context(_before(site.output, own.append))
                task_of(self.original.model).outputs(self.original.model, batch)
            for index, (own, each) in enumerate(zip(found, weights, strict=True)):
                sums[index] += (each.double() @ _rows(batch, own).double()).cpu()
                totals[index] += each.sum(dtype=torch.float64).cpu()
        sums = [add_up(each) for each in sums]
        return [each / total for each, total in zip(sums, add_up(totals), strict=True)]

    @cached_property
    def classifier(self) -> str | None:
        """The name of the linear map that runs last, after all sites; none for vocabularies and bare encoders."""
        model, called = self.original.model, list[str]()

        def note(name: str) -> Callable[[Tensor], None]:
            return lambda given: called.append(name)

        if task_of(model).own_labels:
            return None
        maps = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear | Conv1D)}
        with ExitStack() as stack, evaluating(model), torch.no_grad():
            for name, each in maps.items():
                stack.enter_context(_before(each, note(name)))
            task_of(model).outputs(model, self.batches.items[0])
        of_sites = {each for site in self.original for each in (*site.inputs.values(), site.output)}
        return None if maps[called[-1]] in of_sites else called[-1]

    def classifier_samples(self, sites: Sites) -> Iterator[tuple[Tensor, Tensor]]:
        """What the classifier receives in the pruned model, and what it returns in the unpruned one, batch by batch.

        The layers must have been run through before.
        """
        for number, batch in enumerate(self.batches):
            if f"logits-{number}" not in self._spill:
                self._run_original(number)
            whole = not sites.layers  # layers that share their weights can't be left out
            with nullcontext() if whole else _standing_in(sites, len(sites.layers), self.hidden(number)):
                inputs = _received(sites, sites.model.get_submodule(str(self.classifier)), batch)
            yield _read_rows(batch, inputs), self._spill[f"logits-{number}"]

    @cached_property
    def layers_end_with_sums(self) -> bool:
        """Whether each layer returns its last site's sum, as pre-norm models do, or what its last norm makes of it."""
        sums: list[Tensor] = []
        ends: list[Tensor] = []
        with ExitStack() as stack, evaluating(self.original.model), torch.no_grad():
            for layer in self.original.layers:
                stack.enter_context(_after(_sum_of(layer.sites[-1]).module, sums.append))
                stack.enter_context(_after(layer.module, ends.append))
            self.original.model(**self.batches.items[0].inputs)
        return all(total is end for total, end in zip(sums, ends, strict=True))

    def keep(self, site: Site, number: int, sample: Sample) -> None:
        """Store the sample of a batch at a site of the present layer."""
        self._spill[f"{site.kind}-inputs-{number}"], self._spill[f"{site.kind}-residuals-{number}"] = sample

    def kept(self, site: Site, number: int) -> Sample:
        """The sample that was stored for a batch at a site of the present layer."""
        return Sample(self._spill[f"{site.kind}-inputs-{number}"], self._spill[f"{site.kind}-residuals-{number}"])

    def hidden(self, number: int) -> Tensor:
        """What enters the present layer of the pruned model in a batch."""
        return self._spill[f"hidden-{number}"]

    def advance(self, number: int, hidden: Tensor) -> None:
        """Set what enters the next layer in a batch."""
        self._spill[f"hidden-{number}"] = hidden


def outputs_and_states(sites: Sites, batch: Batch) -> tuple[Tensor, Tensor]:
    """The model's outputs for a batch, and what its layers return at real tokens, (layers, N, d).

    A layer that runs several times has a place for each application.
    """
    last = {site.layer: site for site in sites}
    ends = [layer.module for layer in sites.layers] or [_sum_of(site).module for site in last.values()]
    states: list[Tensor] = []
    with ExitStack() as stack:
        for module in ends:
            stack.enter_context(_after(module, states.append))
        outputs = task_of(sites.model).outputs(sites.model, batch)
    return outputs, torch.stack([_rows(batch, [state]) for state in states])


def _config(sites: Sites) -> Any:
    return sites.model.config


def _through_layers(
    sites: Sites, calibration: Calibration, lowest: int
) -> Iterator[tuple[Site, Iterator[tuple[Sample, Target]]]]:
    """Every layer runs from its stored input: as far as the site to read, and to its end when its sites are fitted.

    Sites of the layer that were fitted before need not run again as a whole: their samples are kept.
    """
    for number, batch in enumerate(calibration.batches):
        calibration.advance(number, _received(sites, sites.layers[lowest].module, batch))
    for place, layer in enumerate(sites.layers[lowest:], start=lowest):
        read: set[tuple[int, int]] = set()  # the sites and batches whose samples are stored
        for site in layer.sites:

            def samples(
                site: Site = site, place: int = place, read: set[tuple[int, int]] = read
            ) -> Iterator[tuple[Sample, Target]]:
                *_, last = own = sites.layers[place].sites
                for number, batch in enumerate(calibration.batches):
                    with ExitStack() as stack:
                        for each in (each for each in own if (each.index, number) in read and each is not site):
                            stack.enter_context(_from_inputs(each, batch, calibration.kept(each, number).inputs))
                        sample = _layer_sample(sites, site, place, batch, calibration.hidden(number))
                    if sites.savings.kept_layers and (site is not last or calibration.layers_end_with_sums):
                        calibration.keep(site, number, sample)
                        read.add((site.index, number))
                    yield sample, calibration.target(site, number)

            yield site, samples()
        highest = place + 1 == len(sites.layers)
        if not highest or calibration.classifier is not None:
            for number, batch in enumerate(calibration.batches):
                hidden = calibration.hidden(number)
                if (layer.sites[-1].index, number) in read:
                    sample = calibration.kept(layer.sites[-1], number)
                    hidden = _end_of_layer(layer.sites[-1], batch, hidden, sample)
                else:
                    hidden = _run_layer(sites, place, batch, hidden, lambda hidden, layer: layer(hidden))
                if not highest and sites.family.between(_config(sites)):
                    with _standing_in(sites, place + 1, hidden):
                        hidden = _received(sites, sites.layers[place + 1].module, batch)
                calibration.advance(number, hidden)


@contextmanager
def _from_inputs(site: Site, batch: Batch, inputs: Tensor) -> Iterator[None]:
    """A site runs from what its output map receives at real tokens; its input maps return zeros that nothing reads."""

    def zeros(width: int) -> Callable[[Tensor], Tensor]:
        return lambda given: given.new_zeros((*given.shape[:-1], width))

    def output(given: Tensor) -> Tensor:
        known = torch.zeros_like(given)
        known[batch.real_tokens(given.shape[1]).bool()] = inputs
        return own(known)

    own: Callable[[Tensor], Tensor] = site.output.forward
    with ExitStack() as stack:
        for linear in site.inputs.values():
            stack.enter_context(replace_forward(linear, zeros(features(linear)[1])))
        stack.enter_context(replace_forward(site.output, output))
        yield


def _end_of_layer(site: Site, batch: Batch, hidden: Tensor, sample: Sample) -> Tensor:
    """The output of a layer from what its last site receives; padding, which nothing reads, is zero."""
    result, place = torch.zeros_like(hidden), _sum_of(site)
    total = site.output(sample.inputs) + sample.residuals
    result[batch.real_tokens(hidden.shape[1]).bool()] = total if place.returned else place.module(total)
    return result


def _layer_sample(sites: Sites, site: Site, place: int, batch: Batch, hidden: Tensor) -> Sample:
    """The inputs and residuals of a site, from what enters its layer."""
    inputs: list[Tensor] = []
    sums: list[Tensor] = []

    def nothing(given: Tensor) -> Tensor:
        """Stands for the output map: with zeros for its result, the sum is the residual."""
        inputs.append(given)
        return given.new_zeros((*given.shape[:-1], sums_width))

    def stop(total: Tensor) -> None:
        sums.append(total)
        raise _Stop

    def run(hidden: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        at_sum = nullcontext() if returned else _at_sum(site, stop)
        with suppress(_Stop), replace_forward(site.output, nothing), at_sum:
            sums.append(layer(hidden))  # not reached if a module has received the sum
        return sums[0]

    sums_width, returned = hidden.shape[-1], _sum_of(site).returned
    _run_layer(sites, place, batch, hidden, run)
    return Sample(_rows(batch, inputs), _rows(batch, sums))


def _run_layer(
    sites: Sites,
    place: int,
    batch: Batch,
    hidden: Tensor,
    run: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor],
) -> Tensor:
    """Call `run` with what enters a layer and the layer, as the model would call it; no other layer runs."""

    def this(given: Tensor, *arguments: Any, **options: Any) -> Any:
        def layer(entering: Tensor) -> Tensor:
            return layer_output(forward(entering, *arguments, **options))

        result.append(run(hidden, layer))
        raise _Stop

    result: list[Tensor] = []
    forward = sites.layers[place].module.forward
    with _standing_in(sites, place), replace_forward(sites.layers[place].module, this), suppress(_Stop):
        sites.model(**batch.inputs)
    return result[0]


def _received(sites: Sites, module: nn.Module, batch: Batch) -> Tensor:
    """What a module receives first when the model runs over a batch; nothing after it runs."""

    def stop(given: Tensor) -> None:
        result.append(given)
        raise _Stop

    result: list[Tensor] = []
    with _before(module, stop), suppress(_Stop):
        task_of(sites.model).outputs(sites.model, batch)
    return result[0]


@contextmanager
def _standing_in(sites: Sites, count: int, result: Tensor | None = None) -> Iterator[None]:
    """The first layers return what they receive instead of running; the last of them returns this result, if given."""

    def returning(given: Tensor | None) -> Callable[..., Any]:
        def forward(received: Tensor, *arguments: Any, **options: Any) -> Any:
            return sites.family.returns(received if given is None else given)

        return forward

    with ExitStack() as stack:
        for place, layer in enumerate(sites.layers[:count], start=1):
            stack.enter_context(replace_forward(layer.module, returning(result if place == count else None)))
        yield


def _sum_of(site: Site) -> Sum:
    assert site.sum is not None
    return site.sum


def _at_sum(site: Site, record: Callable[[Tensor], None]) -> AbstractContextManager[None]:
    """Record every sum of a site's output and the residual."""
    place = _sum_of(site)
    return _after(place.module, record) if place.returned else _before(place.module, record)


@contextmanager
def _before(module: nn.Module, record: Callable[[Tensor], None]) -> Iterator[None]:
    """Record the first argument of every call of a module."""

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        record(arguments[0])

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _after(module: nn.Module, record: Callable[[Tensor], None]) -> Iterator[None]:
    """Record the result of every call of a linear map or a layer."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        record(layer_output(result))

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _requiring_gradient(found: list[Tensor]) -> Callable[[Tensor], None]:
    def record(tensor: Tensor) -> None:
        found.append(tensor if tensor.requires_grad else tensor.requires_grad_())

    return record


def _signs(outputs: Tensor, batch: Batch, seed: int) -> Tensor:
    """A random sign for each output, the same for a row in any batch: gradients of the sum stand for all outputs."""
    signs = [
        torch.randint(0, 2, outputs.shape[1:], generator=torch.Generator().manual_seed(seed * 2**32 + row))
        for row in batch.rows
    ]
    return (2 * torch.stack(signs) - 1).to(outputs)


def _token_weights(batch: Batch, squares: Tensor) -> Tensor:
    """Weights with a mean of 1 over the tokens of each row: half equal, half by the squared gradients, as given."""
    shape, real = squares.shape, batch.joined(batch.real_tokens(squares.shape[1])).to(squares)
    squares = batch.joined(squares) * real
    share = squares / squares.sum(1, keepdim=True).clamp_min(torch.finfo(squares.dtype).tiny)
    weights = real * ((1 - BY_GRADIENT) + BY_GRADIENT * share * real.sum(1, keepdim=True))
    return weights.view(shape)


def _read_rows(batch: Batch, tensor: Tensor) -> Tensor:
    """What a classifier reads or returns, (N, ...) in float32 at least: a vector for each row or each real token."""
    exact = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return _rows(batch, [exact]) if exact.dim() == 3 else exact


def _rows(batch: Batch, applications: Sequence[Tensor]) -> Tensor:
    """The real tokens, applications stacked, (N, ...)."""
    real = batch.real_tokens(applications[0].shape[1]).bool()
    return torch.cat([tensor[real] for tensor in applications])
