"""Passes of a model over a batch: its outputs, and gradients inside its sites.

A stack of layers is run layer by layer. Each layer starts from its detached input, so that it has a small graph of its
own, and the backward pass goes from graph to graph. The results of a layer can therefore be cached: the next pass over
the same batch runs only the lowest layer that changed and those above it. Graphs that would take too much memory are
not kept until the backward pass: their layers run again when it reaches them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForSequenceClassification

from greedy_gnorm.data.batches import Batch
from greedy_gnorm.model.families import Family
from greedy_gnorm.model.modes import frozen
from greedy_gnorm.model.sites import Layer, Site, Sites, family_of
from greedy_gnorm.passes.cache import CachedPass, cache_of
from greedy_gnorm.tasks.objectives import LOGITS, Objective
from greedy_gnorm.tasks.task import task_of

CONTEXT = "context"
"""The name of the input of a site's output map: the concatenated outputs of its units."""
RESULT = "result"
"""The name of the output of a site's output map."""


@dataclass
class Trace:
    """The inputs and outputs of a site in a forward pass, one entry per application (ALBERT has several)."""

    site: Site
    inputs: dict[str, list[Tensor]]  # of each input map, (B, T, d)
    outputs: dict[str, list[Tensor]]  # of each input map, CONTEXT and RESULT, (B, T, D)
    latest: str = ""  # the input map that ran last

    @classmethod
    def of(cls, site: Site) -> Trace:
        return cls(site, {path: [] for path in site.inputs}, {path: [] for path in (*site.inputs, CONTEXT, RESULT)})

    def select(self, names: Sequence[str]) -> list[Tensor]:
        """The outputs with these names, as one list."""
        return [output for name in names for output in self.outputs[name]]

    def joined(self, batch: Batch) -> Trace:
        """The same with the choices of a row one after another along time; what all rows share stays as it is."""

        def join(tensor: Tensor) -> Tensor:
            return batch.joined(tensor) if len(tensor) >= len(batch) else tensor

        inputs, outputs = (
            {name: [join(tensor) for tensor in tensors] for name, tensors in named.items()}
            for named in (self.inputs, self.outputs)
        )
        return Trace(self.site, inputs, outputs)


@dataclass(frozen=True)
class LayerPass:
    """A layer's last pass over a batch; with gradients it has its own graph, from `source` to `output`.

    `source` is `received` without its graph, and `passed` is `output` without its graph. What one layer passes on is
    what the next receives, unless the model changes it between them. If the graph was not kept, `again` runs the layer
    once more, with one.
    """

    received: Tensor
    source: Tensor
    output: Tensor
    passed: Tensor
    traces: list[Trace]
    again: Callable[[], LayerPass] | None = None


def outputs(sites: Sites, batch: Batch) -> Tensor:
    """The model's outputs without gradients; a forward pass made for scoring is reused."""
    task = task_of(sites.model)
    if not (sites.layers and sites.savings.kept_layers):
        with first_token_only(sites):
            return task.outputs(sites.model, batch)
    if cache_of(sites).get(batch.inputs, graph=True) is not None:
        with frozen(sites.model), torch.inference_mode(False), torch.enable_grad(), by_layer(sites, batch, graph=True):
            return task.outputs(sites.model, batch).detach()
    with by_layer(sites, batch, graph=False):
        return task.outputs(sites.model, batch)


Names = Callable[[Site], Sequence[str]]
"""Takes a site and returns the names of the outputs to use: paths of its input maps, CONTEXT or RESULT."""


def site_gradients(
    sites: Sites, batch: Batch, objective: Objective, names: Names
) -> Iterator[tuple[Trace, list[Tensor]]]:
    """For each site with units, its trace and the gradients of the summed objective at the named outputs.

    All tensors are (B, T, ...): a row with several choices is one sequence of all of them.
    """
    for trace, gradients in _site_gradients(sites, batch, objective, names):
        yield trace.joined(batch), [batch.joined(gradient) for gradient in gradients]


def _site_gradients(
    sites: Sites, batch: Batch, objective: Objective, names: Names
) -> Iterator[tuple[Trace, list[Tensor]]]:
    """The same, with tensors as the model has them: choices are rows."""
    if not (sites.layers and sites.savings.kept_layers and objective.reads == LOGITS):
        yield from _gradients_at_once(sites, batch, objective, names)
        return
    with torch.inference_mode(False), torch.enable_grad():
        with by_layer(sites, batch, graph=True) as stack:
            values = row_values(sites.model, batch, objective)
        cached = cache_of(sites).get(batch.inputs, graph=True) is not None
        lowest = _lowest_layer(sites)
        (gradient,) = torch.autograd.grad(values.sum(), [stack.passes[-1].passed])
        for place in reversed(range(lowest, len(stack.passes))):
            this = stack.passes[place]
            if this.again is not None:
                with first_token_only(sites):
                    this = this.again()
            traces = [trace for trace in this.traces if trace.site.survivors]
            targets = [target for trace in traces for target in trace.select(names(trace.site))]
            below = [this.source] if place > lowest else []
            found = torch.autograd.grad(
                this.output, [*targets, *below], gradient, retain_graph=cached, materialize_grads=True
            )
            gradient = found[-1]
            if below and this.received is not stack.passes[place - 1].passed:
                (gradient,) = torch.autograd.grad(
                    this.received, [stack.passes[place - 1].passed], gradient, retain_graph=cached
                )
            gradients = iter(found)
            for trace in traces:
                yield trace, [next(gradients) for _ in trace.select(names(trace.site))]


def _gradients_at_once(
    sites: Sites, batch: Batch, objective: Objective, names: Names
) -> Iterator[tuple[Trace, list[Tensor]]]:
    with ExitStack() as stack:
        if objective.reads == LOGITS:
            stack.enter_context(first_token_only(sites))
        traces = [Trace.of(site) for site in sites if site.survivors]
        stack.enter_context(record_traces(traces))
        found = backward(
            sites.model, batch, objective, lambda: [t for trace in traces for t in trace.select(names(trace.site))]
        )
    gradients = iter(found)
    for trace in traces:
        yield trace, [next(gradients) for _ in trace.select(names(trace.site))]


def backward(
    model: nn.Module, batch: Batch, objective: Objective, targets: Callable[[], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """The gradients of the summed objective at the tensors that `targets` returns after the forward pass."""
    with torch.inference_mode(False), torch.enable_grad():
        values = row_values(model, batch, objective)
        tensors = targets()
        return torch.autograd.grad(values.sum(), tensors, materialize_grads=True) if tensors else ()


def row_values(model: nn.Module, batch: Batch, objective: Objective) -> Tensor:
    """The objective of each row, (B,)."""
    values = objective(model, batch)
    if values.shape != (len(batch),):
        raise ValueError(f"an objective must return one number per row, not shape {tuple(values.shape)}")
    return values


@contextmanager
def record_traces(traces: Sequence[Trace]) -> Iterator[None]:
    """Record the inputs and outputs of the linear maps of some sites while the model runs.

    The graph begins at these outputs: no gradient flows to weights or embeddings.
    """
    with ExitStack() as stack:
        for trace in traces:
            for path, linear in trace.site.inputs.items():
                stack.callback(linear.register_forward_hook(_record(trace, path)).remove)
            if trace.site.positions.shared:
                owner = trace.site.owner
                stack.enter_context(replace_forward(owner, _with_positions_by_row(trace, owner.forward)))
            stack.callback(trace.site.output.register_forward_pre_hook(_record_context(trace)).remove)
            stack.callback(trace.site.output.register_forward_hook(_record_result(trace)).remove)
        yield


def _record(trace: Trace, path: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        trace.inputs[path].append(arguments[0].detach())
        trace.outputs[path].append(output.requires_grad_())
        trace.latest = path

    return hook


def _with_positions_by_row(trace: Trace, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        with _PositionsByRow(trace):
            return forward(*arguments, **options)

    return run


class _PositionsByRow(TorchFunctionMode):
    """Records the outputs of linear maps for relative positions as an own copy for each row.

    All rows share the positions, so a map has one output for them, (1, P, D). The attention turns it to (heads, P,
    size) and repeats it over the rows. Only behind that does every row have its own gradient.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if function is not Tensor.repeat:
            return function(*arguments, **(options or {}))
        by_head, rows = arguments[:2]
        heads, count, size = by_head.shape
        inputs, outputs = self.trace.inputs[self.trace.latest], self.trace.outputs[self.trace.latest]
        inputs[-1] = inputs[-1].expand(rows, -1, -1)
        outputs[-1] = by_head.transpose(0, 1).reshape(1, count, heads * size).expand(rows, -1, -1)
        return outputs[-1].reshape(rows, count, heads, size).transpose(1, 2).flatten(0, 1)


def _record_context(trace: Trace) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        trace.outputs[CONTEXT].append(arguments[0].requires_grad_())

    return hook


def _record_result(trace: Trace) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        trace.outputs[RESULT].append(output)

    return hook


@dataclass
class Stack:
    """The passes of all layers in one pass of the model."""

    passes: list[LayerPass]


def _lowest_layer(sites: Sites) -> int:
    """The index of the lowest layer that has units."""
    occupied = (place for place, layer in enumerate(sites.layers) if any(site.survivors for site in layer.sites))
    return next(occupied, len(sites.layers))


@contextmanager
def by_layer(sites: Sites, batch: Batch, *, graph: bool) -> Iterator[Stack]:
    """Reuse the results of unchanged layers while the model runs once over this batch.

    The other layers run from a detached input, and their passes are cached if they fit.
    """
    cache = cache_of(sites)
    states = [tuple(site.state for site in layer.sites) for layer in sites.layers]
    last = cache.get(batch.inputs, graph=graph)
    first = 0
    if last is not None:
        first = next((place for place, state in enumerate(states) if state != last.states[place]), len(states))
    stack = Stack(list(last.layers[:first]) if last is not None else [])
    room = Room(sites.model, math.inf if last is not None else max(cache.room, LEAST_ROOM))
    with ExitStack() as patches:
        patches.enter_context(first_token_only(sites))
        lowest = _lowest_layer(sites)
        for place, layer in enumerate(sites.layers):
            part = _LayerPart(place, place >= first, graph, graph and place > lowest)
            patches.enter_context(replace_forward(layer.module, _run_or_reuse(layer, stack, part, sites.family, room)))
        yield stack
    current = CachedPass(batch.inputs, states, stack.passes)
    size: float = 0
    if not cache.knows_size(batch.inputs, graph=graph):
        again = any(this.again is not None for this in stack.passes)
        size = math.inf if again else _bytes_of(stack.passes, sites.model)
    cache.store(current, graph=graph, size=size)


LEAST_ROOM = 2**29
"""The bytes that the graphs of a pass may take, even if fewer may be kept between passes."""


@dataclass
class Room:
    """The bytes that the graphs of a pass may still take; layers are alike, so only the first graph is measured."""

    model: nn.Module
    left: float
    each: int = 0

    def take(self, this: LayerPass) -> LayerPass:
        """The pass of a layer, whose graph takes its part of the room."""
        if self.left < math.inf:
            self.each = self.each or _bytes_of([this], self.model)
            self.left -= self.each
        return this


@dataclass(frozen=True)
class _LayerPart:
    """The part of a layer in a pass: whether it runs, whether with a graph, whether its input needs a gradient."""

    place: int
    runs: bool
    graph: bool
    needs_gradient: bool


def _passed_on(output: Tensor) -> Tensor:
    """What the next layer gets, from which gradients are taken anew."""
    return output.detach().requires_grad_(torch.is_grad_enabled())


def _run_or_reuse(layer: Layer, stack: Stack, part: _LayerPart, family: Family, room: Room) -> Callable[..., Any]:
    forward = layer.module.forward

    def run(hidden: Tensor, *arguments: Any, **options: Any) -> Any:
        if part.runs:
            source = hidden.detach().requires_grad_(part.needs_gradient)

            def with_graph() -> LayerPass:
                traces = [Trace.of(site) for site in layer.sites]
                with record_traces([trace for trace in traces if trace.site.survivors]):
                    output = layer_output(forward(source, *arguments, **options))
                return LayerPass(hidden, source, output, _passed_on(output), traces)

            if part.graph and room.left >= room.each:
                stack.passes.append(room.take(with_graph()))
            else:
                with torch.set_grad_enabled(torch.is_grad_enabled() and not part.graph):
                    output = layer_output(forward(source, *arguments, **options))
                again = with_graph if part.graph else None
                stack.passes.append(LayerPass(hidden, source, output, _passed_on(output), [], again))
        return family.returns(stack.passes[part.place].passed)

    return run


def layer_output(returned: Any) -> Tensor:
    """The output of a layer, which may return it with other things."""
    output: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return output


@contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward function; one that another library had set is restored afterwards."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@contextmanager
def first_token_only(sites: Sites) -> Iterator[None]:
    """If the classifier reads only the first token, the last layer computes only that token after its attention."""
    path = sites.family.after_attention
    if not (sites.layers and path and sites.savings.first_token and reads_first_token(sites.model)):
        yield
        return
    module = sites.layers[-1].module.get_submodule(path)
    handle = module.register_forward_pre_hook(lambda module, arguments: tuple(each[:, :1] for each in arguments))
    try:
        yield
    finally:
        handle.remove()


def reads_first_token(model: nn.Module) -> bool:
    """Whether this is one of transformers' own classifiers, of a family where they read only the first token."""
    config: Any = model.config
    own: Any = AutoModelForSequenceClassification._model_mapping.get(type(config), None)
    heads = [part for name, part in model.named_children() if part is not getattr(model, "base_model", None)]
    known = ("transformers.models.", "torch.nn.")
    return (
        own is not None
        and family_of(config).first_token(config)
        and type(model).forward is own.forward
        and all(type(part).__module__.startswith(known) for part in heads)
        and not getattr(config, "chunk_size_feed_forward", 0)
    )


def _bytes_of(passes: Sequence[LayerPass], model: nn.Module) -> int:
    """The memory that these passes take: outputs, and what their graphs store for the backward pass."""
    seen = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    total = 0
    for this in passes:
        inputs = [tensor for trace in this.traces for tensors in trace.inputs.values() for tensor in tensors]
        graphs = (*_saved_tensors(this.received), *_saved_tensors(this.output))
        for tensor in (this.source, this.output, *inputs, *graphs):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
    return total


def _saved_tensors(output: Tensor) -> Iterator[Tensor]:
    """The tensors that the graph of an output stores."""
    nodes, seen = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                yield from (each for each in (value if isinstance(value, tuple) else (value,)) if torch.is_tensor(each))
        nodes += [below for below, _ in node.next_functions]
