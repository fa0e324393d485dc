"""Passes of a model over a batch: logits, and gradients inside the attention sites.

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

from greedy_gnorm.batches import Batch
from greedy_gnorm.modes import frozen
from greedy_gnorm.objectives import ObjectiveFunction, logits_of
from greedy_gnorm.savings import Runs
from greedy_gnorm.sites import AttentionSite, Sites

CONTEXT = "context"
PROJECTIONS = ("q", "k", "v")


@dataclass
class Trace:
    """What one site saw in a forward pass: an entry per application (ALBERT has several)."""

    site: AttentionSite
    inputs: list[Tensor] = field(default_factory=list)  # (B, T, d)
    outputs: dict[str, list[Tensor]] = field(  # q, k, v and the heads' joint output before its projection, (B, T, D)
        default_factory=lambda: {name: [] for name in (*PROJECTIONS, CONTEXT)}
    )

    def named(self, names: Sequence[str]) -> list[Tensor]:
        """The outputs of these names, one after the other."""
        return [output for name in names for output in self.outputs[name]]


@dataclass(frozen=True)
class LayerRun:
    """One layer's last run over a batch; with a graph of its own, from `source` to `output`, if it was asked for."""

    source: Tensor
    output: Tensor
    trace: Trace


def logits(sites: Sites, batch: Batch) -> Tensor:
    """The model's logits without gradients; a forward pass that scoring needs anyway serves for both."""
    if not (sites.layers and sites.savings.kept_layers):
        with narrowed(sites):
            return logits_of(sites.model, batch)
    if sites.kept.runs(batch.inputs, graph=True) is not None:
        with frozen(sites.model), torch.inference_mode(False), torch.enable_grad(), layered(sites, batch, graph=True):
            return logits_of(sites.model, batch).detach()
    with layered(sites, batch, graph=False):
        return logits_of(sites.model, batch)


def gradients_inside(
    sites: Sites, batch: Batch, objective: ObjectiveFunction, names: Sequence[str]
) -> Iterator[tuple[Trace, list[Tensor]]]:
    """For each site with heads, what it saw and the gradients of the summed objective at its named outputs."""
    if not (sites.layers and sites.savings.kept_layers):
        with narrowed(sites), traced(sites) as traces:
            there = [trace for trace in traces if trace.site.survivors]
            seen = backward(
                sites.model, batch, objective, lambda: [target for trace in there for target in trace.named(names)]
            )
        gradients = iter(seen)
        for trace in there:
            yield trace, [next(gradients) for _ in trace.named(names)]
        return
    with torch.inference_mode(False), torch.enable_grad():
        with layered(sites, batch, graph=True) as stack:
            values = row_values(sites.model, batch, objective)
        kept = sites.kept.runs(batch.inputs, graph=True) is not None
        lowest = next((site.index for site in sites if site.survivors), len(sites))
        (gradient,) = torch.autograd.grad(values.sum(), [stack.top])
        for run in reversed(stack.runs[lowest:]):
            site = run.trace.site
            targets = run.trace.named(names)
            below = [run.source] if site.index > lowest else []
            found = torch.autograd.grad(run.output, [*targets, *below], gradient, retain_graph=kept)
            gradient = found[-1]
            if site.survivors:
                yield run.trace, list(found[: len(targets)])


def backward(
    model: nn.Module, batch: Batch, objective: ObjectiveFunction, targets: Callable[[], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """The gradients of the summed objective at the tensors that `targets` names once the model has run."""
    with torch.inference_mode(False), torch.enable_grad():
        values = row_values(model, batch, objective)
        where = targets()
        return torch.autograd.grad(values.sum(), where) if where else ()


def row_values(model: nn.Module, batch: Batch, objective: ObjectiveFunction) -> Tensor:
    """The objective's number for each row, (B,)."""
    values = objective(model, batch)
    if values.shape != (len(batch),):
        raise ValueError(f"an objective gives one number per row, not {tuple(values.shape)}")
    return values


@contextmanager
def traced(sites: Sites, first: int = 0) -> Iterator[list[Trace]]:
    """Record what goes through the projections of every site from `first` on that has heads, while the model runs.

    The outputs are where the graph begins: no gradient flows to weights or embeddings.
    """
    traces = [Trace(site) for site in sites]
    with ExitStack() as stack:
        for trace in traces[first:]:
            if trace.site.survivors:
                for name, linear in trace.site.projections.items():
                    stack.callback(linear.register_forward_hook(_record(trace, name)).remove)
                stack.callback(trace.site.output.register_forward_pre_hook(_record_context(trace)).remove)
        yield traces


def _record(trace: Trace, name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if name == PROJECTIONS[0]:  # the three share their input
            trace.inputs.append(arguments[0].detach())
        trace.outputs[name].append(output.requires_grad_())

    return hook


def _record_context(trace: Trace) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        trace.outputs[CONTEXT].append(arguments[0].requires_grad_())

    return hook


@dataclass
class Stack:
    """The runs of all layers in one pass, and the last output as the classifier got it."""

    runs: list[LayerRun]
    top: Tensor = field(default_factory=lambda: torch.empty(0))


@contextmanager
def layered(sites: Sites, batch: Batch, *, graph: bool) -> Iterator[Stack]:
    """While the model runs, once, over this batch: unchanged layers give what they gave, the others run from a
    detached input. Afterwards the runs are kept if they fit."""
    states = [site.state for site in sites]
    last = sites.kept.runs(batch.inputs, graph=graph)
    first = 0
    if last is not None:
        first = next((place for place, state in enumerate(states) if state != last.states[place]), len(states))
    stack = Stack(list(last.layers[:first]) if last is not None else [])
    with ExitStack() as patches:
        patches.enter_context(narrowed(sites))
        traces = patches.enter_context(traced(sites, first)) if graph else [Trace(site) for site in sites]
        lowest = next((site.index for site in sites if site.survivors), len(sites))
        for trace, layer in zip(traces, sites.layers, strict=True):
            wants_gradient = graph and trace.site.index > lowest
            patches.enter_context(_replaced(layer, _run_or_recall(layer.forward, stack, trace, first, wants_gradient)))
        yield stack
    runs = Runs(batch.inputs, states, stack.runs)
    size = 0 if sites.kept.knows(batch.inputs, graph=graph) else _bytes_of(stack.runs, sites.model)
    sites.kept.keep(runs, graph=graph, size=size)


def _run_or_recall(
    forward: Callable[..., Tensor], stack: Stack, trace: Trace, first: int, wants_gradient: bool
) -> Callable[..., Tensor]:
    def run(hidden: Tensor, *arguments: Any, **options: Any) -> Tensor:
        place = trace.site.index
        if place >= first:
            source = hidden.detach().requires_grad_(wants_gradient)
            stack.runs.append(LayerRun(source, forward(source, *arguments, **options), trace))
        stack.top = stack.runs[place].output.detach().requires_grad_(torch.is_grad_enabled())
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
    path = sites[0].family.after_attention
    if not (sites.layers and path and sites.savings.first_token and reads_first_token(sites.model)):
        yield
        return
    module = sites.layers[-1].get_submodule(path)
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


def _bytes_of(runs: Sequence[LayerRun], model: nn.Module) -> int:
    """The memory that keeping these runs takes: outputs, and what their graphs hold for the backward pass."""
    seen = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    total = 0
    for run in runs:
        for tensor in (run.source, run.output, *run.trace.inputs, *_saved(run.output)):
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
