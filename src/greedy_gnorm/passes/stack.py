"""Running a pruned model through its layers over calibration rows, from the bottom, while its sites are fitted.

Every layer runs from its stored input: as far as the site to read, and to its end when its sites are fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from greedy_gnorm.data.batches import Batch
from greedy_gnorm.model.sites import Layer, Site, Sites, features
from greedy_gnorm.passes.calibration import Calibration, Sample, Target
from greedy_gnorm.passes.hooks import Stop, at_sum, first_received, read_rows, real_rows, received, sum_of
from greedy_gnorm.passes.layers import layer_output, replace_forward


class Stream(NamedTuple):
    """What the input maps of a site receive in one batch, in the pruned model and in the unpruned one, (N, d) each.

    `weights` are those of the tokens, (N,).
    """

    states: Tensor
    original: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Visit:
    """A site whose turn it is: what its input maps receive, and what its output map receives and should return.

    Fit its input maps before asking for the samples, which depend on them.
    """

    site: Site
    streams: Callable[[], Iterator[Stream]]
    samples: Callable[[], Iterator[tuple[Sample, Target]]]


def through_layers(sites: Sites, calibration: Calibration, lowest: int = 0) -> Iterator[Visit]:
    """Each site of a stack of layers in running order, from the lowest layer on.

    Fit the site before asking for the next one, whose inputs depend on it.
    """
    for number, batch in enumerate(calibration.batches):
        calibration.advance(number, received(sites, sites.layers[lowest].module, batch))
    for place, layer in enumerate(sites.layers[lowest:], start=lowest):
        present = _PresentLayer(sites, calibration, place)
        for site in layer.sites:
            yield Visit(site, present.streams_of(site), present.samples_of(site))
        if place + 1 < len(sites.layers) or calibration.classifier is not None:
            present.finish()


class _PresentLayer:
    """The layer whose sites are fitted; samples of those that were fitted before are kept, not computed again."""

    def __init__(self, sites: Sites, calibration: Calibration, place: int) -> None:
        self.sites, self.calibration, self.place = sites, calibration, place
        self.read: set[tuple[int, int]] = set()  # the sites and batches whose samples are stored

    @property
    def layer(self) -> Layer:
        return self.sites.layers[self.place]

    def streams_of(self, site: Site) -> Callable[[], Iterator[Stream]]:
        def streams() -> Iterator[Stream]:
            for number, batch in enumerate(self.calibration.batches):
                weights = self.calibration.target(site, number).weights
                yield Stream(self._states(site, number, batch), self.calibration.stream(site, number), weights)

        return streams

    def _states(self, site: Site, number: int, batch: Batch) -> Tensor:
        """What the input maps of a site receive at real tokens."""
        source = self.calibration.stream_sources.get(site.index)
        if self.sites.savings.kept_layers and source is not None:
            below = self.sites[source]
            if (source, number) in self.read:
                return _after_sum(below, self.calibration.kept(below, number))
            if below.layer != site.layer:  # the norm ends the layer below
                return real_rows(batch, [self.calibration.hidden(number)])
        return real_rows(batch, [self._received(next(iter(site.stream.values())), site, number)])

    def samples_of(self, site: Site) -> Callable[[], Iterator[tuple[Sample, Target]]]:
        def samples() -> Iterator[tuple[Sample, Target]]:
            last = site is self.layer.sites[-1]
            for number in range(len(self.calibration.batches.items)):
                sample = self._sample(site, number)
                if self.sites.savings.kept_layers and (not last or self.calibration.layers_end_with_sums):
                    self.calibration.keep(site, number, sample)
                    self.read.add((site.index, number))
                yield sample, self.calibration.target(site, number)

        return samples

    def finish(self) -> None:
        """Run the layer to its end, and set what enters the next one."""
        *_, last = self.layer.sites
        config: Any = self.sites.model.config
        above = self.place + 1
        for number, batch in enumerate(self.calibration.batches):
            hidden = self.calibration.hidden(number)
            if (last.index, number) in self.read:
                hidden = _end_of_layer(last, batch, hidden, self.calibration.kept(last, number))
            else:
                hidden = self._run(number, lambda hidden, layer: layer(hidden))
            if above < len(self.sites.layers) and self.sites.family.between(config):
                with _standing_in(self.sites, above, hidden):
                    hidden = received(self.sites, self.sites.layers[above].module, batch)
            self.calibration.advance(number, hidden)

    def _received(self, module: Any, site: Site, number: int) -> Tensor:
        """What a module of a site receives first; nothing after it runs."""
        result: list[Tensor] = []

        def run(hidden: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
            with suppress(Stop), first_received(module, result):
                layer(hidden)
            return result[0]

        with self._others_from_inputs(site, number):
            return self._run(number, run)

    def _sample(self, site: Site, number: int) -> Sample:
        """The inputs and residuals of a site, from what enters its layer."""
        inputs: list[Tensor] = []
        sums: list[Tensor] = []

        def nothing(given: Tensor) -> Tensor:
            """Stands for the output map: with zeros for its result, the sum is the residual."""
            inputs.append(given)
            return given.new_zeros((*given.shape[:-1], features(site.output)[1]))

        def stop(total: Tensor) -> None:
            sums.append(total)
            raise Stop

        def run(hidden: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
            at = nullcontext() if sum_of(site).returned else at_sum(site, stop)
            with suppress(Stop), replace_forward(site.output, nothing), at:
                sums.append(layer(hidden))  # not reached if a module has received the sum
            return sums[0]

        with self._others_from_inputs(site, number):
            self._run(number, run)
        batch = self.calibration.batches.items[number]
        return Sample(real_rows(batch, inputs), real_rows(batch, sums))

    @contextmanager
    def _others_from_inputs(self, site: Site, number: int) -> Iterator[None]:
        batch = self.calibration.batches.items[number]
        with ExitStack() as stack:
            for each in self.layer.sites:
                if each is not site and (each.index, number) in self.read:
                    stack.enter_context(_from_inputs(each, batch, self.calibration.kept(each, number).inputs))
            yield

    def _run(self, number: int, run: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]) -> Tensor:
        """Call `run` with what enters the layer and the layer, as the model would call it; no other layer runs."""

        def this(given: Tensor, *arguments: Any, **options: Any) -> Any:
            def layer(entering: Tensor) -> Tensor:
                return layer_output(forward(entering, *arguments, **options))

            result.append(run(self.calibration.hidden(number), layer))
            raise Stop

        result: list[Tensor] = []
        forward = self.layer.module.forward
        with _standing_in(self.sites, self.place), replace_forward(self.layer.module, this), suppress(Stop):
            self.sites.model(**self.calibration.batches.items[number].inputs)
        return result[0]


def classifier_samples(sites: Sites, calibration: Calibration) -> Iterator[tuple[Tensor, Tensor]]:
    """What the classifier receives in the pruned model, and what it returns in the unpruned one, batch by batch.

    The layers must have been run through before.
    """
    classifier = sites.model.get_submodule(str(calibration.classifier))
    for number, batch in enumerate(calibration.batches):
        whole = not sites.layers  # layers that share their weights can't be left out
        with nullcontext() if whole else _standing_in(sites, len(sites.layers), calibration.hidden(number)):
            inputs = received(sites, classifier, batch)
        yield read_rows(batch, inputs), calibration.logits(number)


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
    result = torch.zeros_like(hidden)
    result[batch.real_tokens(hidden.shape[1]).bool()] = _after_sum(site, sample)
    return result


def _after_sum(site: Site, sample: Sample) -> Tensor:
    """What becomes of a sample: the sum of the output and the residual, after the norm if there is one."""
    total: Tensor = site.output(sample.inputs) + sample.residuals
    return total if sum_of(site).returned else sum_of(site).module(total)


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
