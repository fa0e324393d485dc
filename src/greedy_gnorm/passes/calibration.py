"""What the output maps of a pruned model receive and what they should return, over calibration rows.

A sublayer adds the result of its output map to a residual. In the unpruned model that sum is the target. The sums of
the unpruned model are computed once, and the inputs and residuals of the pruned model are read site by site, from the
bottom, while the sites below are fitted. Activations are kept on disk, never in memory all at once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from greedy_gnorm.data.batches import Batch, Batches
from greedy_gnorm.errors import UnsupportedModel
from greedy_gnorm.model.modes import evaluating
from greedy_gnorm.model.sites import Site, Sites
from greedy_gnorm.passes.layers import reads_first_token, replace_forward


class Sample(NamedTuple):
    """A site in one batch, applications stacked: the inputs of its output map, (N, D), and the residuals, (N, d)."""

    inputs: Tensor
    residuals: Tensor


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
        exact = tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32))
        exact.contiguous().numpy().tofile(Path(self._folder.name) / name)

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
        unknown = next((site for site in original if site.sum is None), None)
        if unknown is not None:
            family = unknown_family(original.model)
            raise UnsupportedModel(
                f"It is not known where {family} models add the output of {unknown} to its residual."
            )

    def clear(self) -> None:
        """Delete the stored activations; they are computed again when needed."""
        self._spill = Spill()

    def target(self, site: Site, number: int) -> Tensor:
        """The unpruned model's sums at this site for a batch, (N, d); all sites are computed when first needed."""
        name = f"target-{site.index}-{number}"
        if name not in self._spill:
            batch = self.batches.items[number]
            sums: list[list[Tensor]] = [[] for _ in self.original]
            with ExitStack() as stack, evaluating(self.original.model), torch.inference_mode():
                for each in self.original:
                    stack.enter_context(_before(_sum_of(each), sums[each.index].append))
                self.original.model(**batch.inputs)
            for each, found in zip(self.original, sums, strict=True):
                self._spill[f"target-{each.index}-{number}"] = _rows(self.original, each, batch, found)
        return self._spill[name]

    def samples(self, sites: Sites) -> Iterator[tuple[Site, Iterator[tuple[Sample, Tensor]]]]:
        """Each site in running order, with its samples and targets; fit the site before asking for the next one."""
        return (_through_layers if sites.layers else _through_model)(sites, self)

    def hidden(self, number: int) -> Tensor:
        """What enters the present layer of the pruned model in a batch."""
        return self._spill[f"hidden-{number}"]

    def advance(self, number: int, hidden: Tensor) -> None:
        """Set what enters the next layer in a batch."""
        self._spill[f"hidden-{number}"] = hidden


def unknown_family(model: nn.Module) -> str:
    """The model's type, for messages."""
    config: Any = model.config
    return str(config.model_type)


def _through_model(sites: Sites, calibration: Calibration) -> Iterator[tuple[Site, Iterator[tuple[Sample, Tensor]]]]:
    """The whole model runs for each site: always right, and the only way where layers share their weights."""
    for site in sites:

        def samples(site: Site = site) -> Iterator[tuple[Sample, Tensor]]:
            for number, batch in enumerate(calibration.batches):
                inputs: list[Tensor] = []
                results: list[Tensor] = []
                sums: list[Tensor] = []
                with ExitStack() as stack:
                    stack.enter_context(_before(site.output, inputs.append))
                    stack.enter_context(_after(site.output, results.append))
                    stack.enter_context(_before(_sum_of(site), sums.append))
                    sites.model(**batch.inputs)
                residuals = [total - result for total, result in zip(sums, results, strict=True)]
                sample = Sample(_rows(sites, site, batch, inputs), _rows(sites, site, batch, residuals))
                yield sample, calibration.target(site, number)

        yield site, samples()


def _through_layers(sites: Sites, calibration: Calibration) -> Iterator[tuple[Site, Iterator[tuple[Sample, Tensor]]]]:
    """Every layer runs from its stored input: as far as the site to read, and to its end when its sites are fitted."""
    for number, batch in enumerate(calibration.batches):
        calibration.advance(number, _run_layer(sites, 0, batch, None, lambda hidden, layer: hidden))
    for place, layer in enumerate(sites.layers):
        for site in layer.sites:

            def samples(site: Site = site, place: int = place) -> Iterator[tuple[Sample, Tensor]]:
                for number, batch in enumerate(calibration.batches):
                    yield (
                        _layer_sample(sites, site, place, batch, calibration.hidden(number)),
                        calibration.target(site, number),
                    )

            yield site, samples()
        if place + 1 < len(sites.layers):
            for number, batch in enumerate(calibration.batches):
                hidden = calibration.hidden(number)
                calibration.advance(
                    number, _run_layer(sites, place, batch, hidden, lambda hidden, layer: layer(hidden))
                )


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
        with replace_forward(site.output, nothing), _before(_sum_of(site), stop):
            return layer(hidden)

    sums_width = hidden.shape[-1]
    with suppress(_Stop):
        _run_layer(sites, place, batch, hidden, run)
    return Sample(_rows(sites, site, batch, inputs), _rows(sites, site, batch, sums))


def _run_layer(
    sites: Sites,
    place: int,
    batch: Batch,
    hidden: Tensor | None,
    run: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor],
) -> Tensor:
    """Call `run` with what enters a layer (by default the embeddings) and the layer, as the model would call it."""
    result: list[Tensor] = []

    def pass_on(given: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return given

    def this(given: Tensor, *arguments: Any, **options: Any) -> Tensor:
        result.append(
            run(given if hidden is None else hidden, lambda entering: forward(entering, *arguments, **options))
        )
        return given

    forward = sites.layers[place].module.forward
    with ExitStack() as stack:
        for other, layer in enumerate(sites.layers):
            stack.enter_context(replace_forward(layer.module, this if other == place else pass_on))
        sites.model(**batch.inputs)
    return result[0]


def _sum_of(site: Site) -> nn.Module:
    assert site.sum is not None
    return site.sum


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
    """Record the result of every call of a module."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], result: Tensor) -> None:
        record(result)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _rows(sites: Sites, site: Site, batch: Batch, applications: Sequence[Tensor]) -> Tensor:
    """The tokens that count, applications stacked, (N, width): no padding; in the last layer, those that are read."""
    real = batch.real_tokens().bool()
    if sites.layers and site.layer == sites[-1].layer and reads_first_token(sites.model):
        real = torch.zeros_like(real).index_fill(1, torch.tensor([0], device=real.device), True)
    return torch.cat([tensor[real] for tensor in applications])
