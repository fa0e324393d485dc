"""Calibration rows, and what the unpruned model makes of them: what the maps of a pruned model should return.

A sublayer adds the result of its output map to a residual. In the unpruned model that sum is the target, and what the
input maps of a sublayer receive there is what they should receive. Both are computed once. Activations are kept on
disk, never in memory all at once.

Layers that share their weights can't be fitted from the bottom, because a change of one application changes all others.
There the inputs and residuals are the unpruned model's own.

The classifier, the linear map that runs last, should return what it does in the unpruned model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from greedy_gnorm.data.batches import Batch, Batches
from greedy_gnorm.errors import GnormError, UnsupportedModel
from greedy_gnorm.model.modes import evaluating, frozen
from greedy_gnorm.model.sites import Site, Sites, features
from greedy_gnorm.passes.hooks import after, at_sum, before, read_rows, real_rows, sum_of
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


class Returns(NamedTuple):
    """What the module of a site returns: its output, or the norm of its sum; alone or first of so many values."""

    normed: bool
    values: int | None

    def pack(self, result: Tensor) -> Any:
        """What the module returns with this result; the other values are no part of it."""
        return result if self.values is None else (result, *[None] * (self.values - 1))


class Spill:
    """Tensors in files of a temporary folder, which is deleted with this object.

    A tensor that is read is a view of its file: use it before another one is written under the same name.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gnorm-calibration-")
        self._kinds: dict[str, tuple[torch.dtype, torch.Size, torch.device]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._kinds

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        path, mode = Path(self._folder.name) / name, "r+b" if name in self else "wb"  # writing over a file is faster
        self._kinds[name] = tensor.dtype, tensor.shape, tensor.device
        exact = tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32)).contiguous().numpy()
        try:
            with path.open(mode) as file:
                file.write(exact.data)
                file.truncate()
        except OSError as error:
            raise GnormError(
                f"Can't store activations in {self._folder.name}: {error.strerror or error}. Set TMPDIR to a folder on "
                f"a disk with more room, or use fewer --calibration-tokens."
            ) from error

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape, device = self._kinds[name]
        if not shape.numel():
            return torch.zeros(shape, dtype=dtype, device=device)
        stored = torch.promote_types(dtype, torch.float32)
        path = str(Path(self._folder.name) / name)
        return torch.from_file(path, size=shape.numel(), dtype=stored).view(shape).to(device, dtype)


class Calibration:
    """Calibration rows and the unpruned model's sums over them; `original` is the unpruned model."""

    def __init__(self, original: Sites, batches: Batches) -> None:
        self.original = original
        self.batches = batches
        self._spill = Spill()
        self._tokens: dict[int, int] = {}  # the padded length of each batch
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
        """The unpruned model's sums at this site for a batch."""
        return Target(self._original(f"sums-{site.index}-{number}", number), self.weights(site, number))

    def weights(self, site: Site, number: int) -> Tensor:
        """The weights of the tokens of a batch at this site, (N,)."""
        return self._original(f"weights-{site.index}-{number}", number)

    def stream(self, site: Site, number: int) -> Tensor:
        """What the input maps of this site receive in the unpruned model for a batch, (N, d)."""
        if site.index not in self.stream_sources:
            return self._original(f"stream-{site.index}-{number}", number)
        source = self.original[self.stream_sources[site.index]]
        stream: Tensor = sum_of(source).module(self._original(f"sums-{source.index}-{number}", number))
        return stream

    @cached_property
    def stream_sources(self) -> dict[int, int]:
        """The sites that read what the norm of an earlier site's sum returns, and that site.

        So it is in post-norm models. Their streams need not be stored or read: the norm is computed again.
        """
        streams, norms = dict[int, list[Tensor]](), dict[int, list[Tensor]]()
        with ExitStack() as stack, evaluating(self.original.model), torch.no_grad():
            self._record_streams(stack, streams)
            for site in self.original:
                if not sum_of(site).returned:
                    stack.enter_context(after(sum_of(site).module, norms.setdefault(site.index, []).append))
            task_of(self.original.model).outputs(self.original.model, self.batches.items[0])
        return {
            index: source
            for index, received in streams.items()
            for source, returned in norms.items()
            if any(received[0] is each for each in returned)
        }

    def _record_streams(self, stack: ExitStack, streams: dict[int, list[Tensor]]) -> None:
        """Record what the input maps of sites receive, in stacks of layers."""
        for site in (site for layer in self.original.layers for site in layer.sites):
            if site.stream and site.survivors:  # the maps of a site without units may not be called
                first = next(iter(site.stream.values()))
                stack.enter_context(before(first, streams.setdefault(site.index, []).append))

    def logits(self, number: int) -> Tensor:
        """What the classifier returns in the unpruned model for a batch."""
        return self._original(f"logits-{number}", number)

    def _original(self, name: str, number: int) -> Tensor:
        """A stored activation of the unpruned model; those of a batch are computed when first needed."""
        if name not in self._spill:
            self._run_original(number)
        return self._spill[name]

    def _run_original(self, number: int) -> None:
        """Store what the sites receive and their sums for a batch, and how much the outputs depend on each token there.

        Where the model has an output for every token, all tokens count alike.
        """
        batch, model = self.batches.items[number], self.original.model
        task = task_of(model)
        sums: list[list[Tensor]] = [[] for _ in self.original]
        streams: dict[int, list[Tensor]] = {}
        logits, classifier = list[Tensor](), self.classifier  # which may run the model, so before there are hooks
        known = self.stream_sources
        alike = task.tokens_alike
        with ExitStack() as stack:
            stack.enter_context(frozen(model))
            stack.enter_context(torch.set_grad_enabled(not alike))
            for each, found in zip(self.original, sums, strict=True):
                stack.enter_context(at_sum(each, found.append if alike else _requiring_gradient(found)))
            self._record_streams(stack, streams)
            if classifier is not None:
                stack.enter_context(after(model.get_submodule(classifier), logits.append))
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
            self._spill[f"sums-{name}"] = real_rows(batch, [tensor.detach() for tensor in found])
            self._spill[f"weights-{name}"] = real_rows(batch, weights)
        for index, received in streams.items():
            if index not in known:
                self._spill[f"stream-{index}-{number}"] = real_rows(batch, [received[0].detach()])
        if logits:
            self._spill[f"logits-{number}"] = read_rows(batch, logits[-1].detach())

    def original_samples(self, index: int) -> Iterator[tuple[Sample, Target]]:
        """The samples and targets of a site in the unpruned model, with all of its units."""
        site = self.original[index]
        for number, batch in enumerate(self.batches):
            inputs: list[Tensor] = []
            results: list[Tensor] = []
            with ExitStack() as stack:
                stack.enter_context(before(site.output, inputs.append))
                stack.enter_context(after(site.output, results.append))
                self.original.model(**batch.inputs)
            target = self.target(site, number)
            yield Sample(real_rows(batch, inputs), target.sums - real_rows(batch, results)), target

    @cached_property
    def input_means(self) -> list[Tensor]:
        """The means of what the output map of each site receives in the unpruned model, (D,) in float64.

        They are over the rows of all processes, with the weights of tokens that targets have.
        """
        sums = [torch.zeros(features(site.output)[0], dtype=torch.float64) for site in self.original]
        totals = torch.zeros(len(sums), dtype=torch.float64)
        for number, batch in enumerate(self.batches):
            weights = [self.weights(site, number) for site in self.original]
            found: list[list[Tensor]] = [[] for _ in sums]
            with ExitStack() as stack, evaluating(self.original.model), torch.no_grad():
                for site, own in zip(self.original, found, strict=True):
                    stack.enter_context(before(site.output, own.append))
                task_of(self.original.model).outputs(self.original.model, batch)
            for index, (own, each) in enumerate(zip(found, weights, strict=True)):
                sums[index] += (each.double() @ real_rows(batch, own).double()).cpu()
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
                stack.enter_context(before(each, note(name)))
            task_of(model).outputs(model, self.batches.items[0])
        of_sites = {each for site in self.original for each in (*site.inputs.values(), site.output)}
        return None if maps[called[-1]] in of_sites else called[-1]

    @cached_property
    def layers_end_with_sums(self) -> bool:
        """Whether each layer returns its last site's sum, as pre-norm models do, or what its last norm makes of it."""
        sums: list[Tensor] = []
        ends: list[Tensor] = []
        with ExitStack() as stack, evaluating(self.original.model), torch.no_grad():
            for layer in self.original.layers:
                stack.enter_context(after(sum_of(layer.sites[-1]).module, sums.append))
                stack.enter_context(after(layer.module, ends.append))
            self.original.model(**self.batches.items[0].inputs)
        return all(total is end for total, end in zip(sums, ends, strict=True))

    @cached_property
    def module_returns(self) -> dict[int, Returns]:
        """What the modules of sites return that have others above them in their layer, if it is of a known kind."""
        found = dict[int, Returns]()
        results, outputs, norms = dict[int, Any](), dict[int, list[Tensor]](), dict[int, list[Tensor]]()
        below = [site for layer in self.original.layers for site in layer.sites[:-1]]
        with ExitStack() as stack, evaluating(self.original.model), torch.no_grad():
            for site in below:
                stack.enter_context(replace_forward(site.module, _recording(site, results)))
                stack.enter_context(after(site.output, outputs.setdefault(site.index, []).append))
                stack.enter_context(after(sum_of(site).module, norms.setdefault(site.index, []).append))
            task_of(self.original.model).outputs(self.original.model, self.batches.items[0])
        for index, result in results.items():
            first, count = layer_output(result), len(result) if isinstance(result, tuple) else None
            if not sum_of(self.original[index]).returned and first is norms[index][0]:
                found[index] = Returns(True, count)
            elif torch.equal(first, outputs[index][0]):
                found[index] = Returns(False, count)
        return found

    def keep(self, site: Site, number: int, sample: Sample) -> None:
        """Store the sample of a batch at a site of the present layer."""
        self._spill[f"{site.kind}-inputs-{number}"], self._spill[f"{site.kind}-residuals-{number}"] = sample

    def kept(self, site: Site, number: int) -> Sample:
        """The sample that was stored for a batch at a site of the present layer."""
        return Sample(self._spill[f"{site.kind}-inputs-{number}"], self._spill[f"{site.kind}-residuals-{number}"])

    def keep_returned(self, site: Site, number: int, result: Tensor) -> None:
        """Store what the module of a site of the present layer returns in a batch, (N, d)."""
        self._spill[f"{site.kind}-returned-{number}"] = result

    def returned(self, site: Site, number: int) -> Tensor:
        """What was stored of the module of a site of the present layer."""
        return self._spill[f"{site.kind}-returned-{number}"]

    def enter(self, number: int, hidden: Tensor) -> None:
        """Set what enters the first of the layers in a batch, (B, T, d)."""
        self._tokens[number] = hidden.shape[1]
        self.advance(number, self.rows(number, hidden))

    def advance(self, number: int, hidden: Tensor) -> None:
        """Set what enters the next layer in a batch, (N, d)."""
        self._spill[f"hidden-{number}"] = hidden

    def hidden(self, number: int) -> Tensor:
        """What enters the present layer of the pruned model in a batch at real tokens, (N, d)."""
        return self._spill[f"hidden-{number}"]

    def entering(self, number: int) -> Tensor:
        """The same with padding, (B, T, d)."""
        return self.padded(number, self.hidden(number))

    def rows(self, number: int, tensor: Tensor) -> Tensor:
        """The real tokens of a batch, (N, d)."""
        return real_rows(self.batches.items[number], [tensor])

    def padded(self, number: int, rows: Tensor) -> Tensor:
        """The real tokens of a batch with padding, (B, T, d), which is zero and which nothing reads."""
        real = self.batches.items[number].real_tokens(self._tokens[number]).bool()
        tensor = rows.new_zeros(*real.shape, rows.shape[1])
        tensor[real] = rows
        return tensor


def _recording(site: Site, results: dict[int, Any]) -> Callable[..., Any]:
    own = site.module.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        results[site.index] = own(*arguments, **options)
        return results[site.index]

    return forward


def outputs_and_states(sites: Sites, batch: Batch) -> tuple[Tensor, Tensor]:
    """The model's outputs for a batch, and what its layers return at real tokens, (layers, N, d).

    A layer that runs several times has a place for each application.
    """
    last = {site.layer: site for site in sites}
    ends = [layer.module for layer in sites.layers] or [sum_of(site).module for site in last.values()]
    states: list[Tensor] = []
    with ExitStack() as stack:
        for module in ends:
            stack.enter_context(after(module, states.append))
        outputs = task_of(sites.model).outputs(sites.model, batch)
    return outputs, torch.stack([real_rows(batch, [state]) for state in states])


def _config(sites: Sites) -> Any:
    return sites.model.config


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
