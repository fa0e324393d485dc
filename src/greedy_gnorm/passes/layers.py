"""Passes of a model over a batch: its outputs, and gradients inside the sites.

A stack of layers is run layer by layer. Each layer starts from its detached input, so that it has a small graph of its
own, and the backward pass goes down from graph to graph. What a layer computed can therefore be kept: the next pass
over the same batch runs only the lowest layer that changed and those above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from greedy_gnorm.data.batches import Batch
from greedy_gnorm.model.modes import frozen
from greedy_gnorm.model.sites import Layer, Site, Sites
from greedy_gnorm.passes.cache import KeptLayers, cache_of
from greedy_gnorm.tasks.objectives import LOGITS, Objective
from greedy_gnorm.tasks.task import task_of

CONTEXT = "context"
"""The name of what goes into a site's output map: the joint output of its units."""


@dataclass
class Trace:
    """What one site saw in a forward pass: an entry per application (ALBERT has several)."""

    site: Site
    inputs: dict[str, list[Tensor]]  # of each input map, (B, T, d)
    outputs: dict[str, list[Tensor]]  # of each input map, and what goes into the output map, (B, T, D)

    @classmethod
    def of(cls, site: Site) -> Trace:
        return cls(site, {path: [] for path in site.inputs}, {path: [] for path in (*site.inputs, CONTEXT)})

    def named(self, names: Sequence[str]) -> list[Tensor]:
        """The outputs of these names, one after the other."""
        return [output for name in names for output in self.outputs[name]]


@dataclass(frozen=True)
class LayerPass:
    """One layer's last pass over a batch; with a graph of its own, from `source` to `output`, if it was asked for."""

    source: Tensor
    output: Tensor
    traces: list[Trace]


def outputs(sites: Sites, batch: Batch) -> Tensor:
    """The model's outputs without gradients; a forward pass that scoring needs anyway serves for both."""
    task = task_of(sites.model)
    if not (sites.layers and sites.savings.kept_layers):
        with narrowed(sites):
            return task.outputs(sites.model, batch)
    if cache_of(sites).get(batch.inputs, graph=True) is not None:
        with frozen(sites.model), torch.inference_mode(False), torch.enable_grad(), layered(sites, batch, graph=True):
            return task.outputs(sites.model, batch).detach()
    with layered(sites, batch, graph=False):
        return task.outputs(sites.model, batch)


Names = Callable[[Site], Sequence[str]]
"""Which outputs of a site are looked at: paths of its input maps, or CONTEXT."""


def gradients_inside(
    sites: Sites, batch: Batch, objective: Objective, names: Names
) -> Iterator[tuple[Trace, list[Tensor]]]:
    """For each site with units, what it saw and the gradients of the summed objective at its named outputs."""
    if not (sites.layers and sites.savings.kept_layers and objective.reads == LOGITS):
        yield from _gradients_at_once(sites, batch, objective, names)
        return
    with torch.inference_mode(False), torch.enable_grad():
        with layered(sites, batch, graph=True) as stack:
            values = row_values(sites.model, batch, objective)
        kept = cache_of(sites).get(batch.inputs, graph=True) is not None
        lowest = _lowest(sites)
        (gradient,) = torch.autograd.grad(values.sum(), [stack.top])
        for place in reversed(range(lowest, len(stack.passes))):
            this = stack.passes[place]
            traces = [trace for trace in this.traces if trace.site.survivors]
            targets = [target for trace in traces for target in trace.named(names(trace.site))]
            below = [this.source] if place > lowest else []
            found = torch.autograd.grad(this.output, [*targets, *below], gradient, retain_graph=kept)
            gradient = found[-1]
            gradients = iter(found)
            for trace in traces:
                yield trace, [next(gradients) for _ in trace.named(names(trace.site))]


def _gradients_at_once(
    sites: Sites, batch: Batch, objective: Objective, names: Names
) -> Iterator[tuple[Trace, list[Tensor]]]:
    with ExitStack() as stack:
        if objective.reads == LOGITS:
            stack.enter_context(narrowed(sites))
        traces = [Trace.of(site) for site in sites if site.survivors]
        stack.enter_context(traced(traces))
        seen = backward(
            sites.model, batch, objective, lambda: [t for trace in traces for t in trace.named(names(trace.site))]
        )
    gradients = iter(seen)
    for trace in traces:
        yield trace, [next(gradients) for _ in trace.named(names(trace.site))]


def backward(
    model: nn.Module, batch: Batch, objective: Objective, targets: Callable[[], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """The gradients of the summed objective at the tensors that `targets` names once the model has run."""
    with torch.inference_mode(False), torch.enable_grad():
        values = row_values(model, batch, objective)
        where = targets()
        return torch.autograd.grad(values.sum(), where) if where else ()


def row_values(model: nn.Module, batch: Batch, objective: Objective) -> Tensor:
    """The objective's number for each row, (B,)."""
    values = objective(model, batch)
    if values.shape != (len(batch),):
        raise ValueError(f"an objective gives one number per row, not {tuple(values.shape)}")
    return values


@contextmanager
def traced(traces: Sequence[Trace]) -> Iterator[None]:
    """Record what goes through the maps of some sites while the model runs.

    The outputs are where the graph begins: no gradient flows to weights or embeddings.
    """
    with ExitStack() as stack:
        for trace in traces:
            for path, linear in trace.site.inputs.items():
                stack.callback(linear.register_forward_hook(_record(trace, path)).remove)
            stack.callback(trace.site.output.register_forward_pre_hook(_record_context(trace)).remove)
        yield


def _record(trace: Trace, path: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        trace.inputs[path].append(arguments[0].detach())
        trace.outputs[path].append(output.requires_grad_())

    return hook


def _record_context(trace: Trace) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        trace.outputs[CONTEXT].append(arguments[0].requires_grad_())

    return hook


@dataclass
class Stack:
    """The passes of all layers in one pass of the model, and the last output as the classifier got it."""

    passes: list[LayerPass]
    top: Tensor = field(default_factory=lambda: torch.empty(0))


def _lowest(sites: Sites) -> int:
    """The place of the lowest layer that has units."""
    occupied = (place for place, layer in enumerate(sites.layers) if any(site.survivors for site in layer.sites))
    return next(occupied, len(sites.layers))


@contextmanager
def layered(sites: Sites, batch: Batch, *, graph: bool) -> Iterator[Stack]:
    """While the model runs, once, over this batch: unchanged layers give what they gave, the others run from a
    detached input. Afterwards their passes are kept if they fit."""
    cache = cache_of(sites)
    states = [tuple(site.state for site in layer.sites) for layer in sites.layers]
    last = cache.get(batch.inputs, graph=graph)
    first = 0
    if last is not None:
        first = next((place for place, state in enumerate(states) if state != last.states[place]), len(states))
    stack = Stack(list(last.layers[:first]) if last is not None else [])
    with ExitStack() as patches:
        patches.enter_context(narrowed(sites))
        lowest = _lowest(sites)
        for place, layer in enumerate(sites.layers):
            traces = [Trace.of(site) for site in layer.sites]
            if graph and place >= first:
                patches.enter_context(traced([trace for trace in traces if trace.site.survivors]))
            step = _Step(place, place >= first, graph and place > lowest, traces)
            patches.enter_context(_replaced(layer.module, _run_or_recall(layer, stack, step)))
        yield stack
    kept = KeptLayers(batch.inputs, states, stack.passes)
    size = 0 if cache.knows(batch.inputs, graph=graph) else _bytes_of(stack.passes, sites.model)
    cache.keep(kept, graph=graph, size=size)


@dataclass(frozen=True)
class _Step:
    """How one layer takes part in a pass: whether it runs, whether gradients go below it, what its sites see."""

    place: int
    runs: bool
    wants_gradient: bool
    traces: list[Trace]


def _run_or_recall(layer: Layer, stack: Stack, step: _Step) -> Callable[..., Tensor]:
    forward = layer.module.forward

    def run(hidden: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if step.runs:
            source = hidden.detach().requires_grad_(step.wants_gradient)
            stack.passes.append(LayerPass(source, forward(source, *arguments, **options), step.traces))
        stack.top = stack.passes[step.place].output.detach().requires_grad_(torch.is_grad_enabled())
        return stack.top

    return run


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Another forward function for a module, for a while; one that another library put there comes back."""
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
def narrowed(sites: Sites) -> Iterator[None]:
    """Where the classifier reads the first token alone, the last layer computes no other behind its attention."""
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
    """Whether this is transformers' own classifier of its family, all of which look at the first token only."""
    config: Any = model.config
    own: Any = AutoModelForSequenceClassification._model_mapping.get(type(config), None)
    heads = [part for name, part in model.named_children() if part is not getattr(model, "base_model", None)]
    known = ("transformers.models.", "torch.nn.")
    return (
        own is not None
        and type(model).forward is own.forward
        and all(type(part).__module__.startswith(known) for part in heads)
        and not getattr(config, "chunk_size_feed_forward", 0)
    )


def _bytes_of(passes: Sequence[LayerPass], model: nn.Module) -> int:
    """The memory that keeping these passes takes: outputs, and what their graphs hold for the backward pass."""
    seen = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    total = 0
    for this in passes:
        inputs = [tensor for trace in this.traces for some in trace.inputs.values() for tensor in some]
        for tensor in (this.source, this.output, *inputs, *_saved(this.output)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
    return total


def _saved(output: Tensor) -> Iterator[Tensor]:
    """The tensors that the graph behind an output holds."""
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
