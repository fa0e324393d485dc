"""Running a pruned model through its layers over calibration rows, from the bottom, while its sites are fitted.

Every layer runs from its stored input, as far as the site to read. The sites of a layer that were fitted before do not
run again: what their modules return is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from greedy_gnorm.model.sites import Layer, Site, Sites, features
from greedy_gnorm.passes.calibration import Calibration, Sample, Target
from greedy_gnorm.passes.hooks import Stop, at_sum, first_received, first_returned, read_rows, received, sum_of
from greedy_gnorm.passes.layers import layer_output, replace_forward
from greedy_gnorm.units import ATTENTION

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


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
    calls = _Calls(sites, calibration)
    for number, batch in enumerate(calibration.batches):
        calibration.enter(number, received(sites, sites.layers[lowest].module, batch))
    for place, layer in enumerate(sites.layers[lowest:], start=lowest):
        present = _PresentLayer(sites, calibration, place, calls)
        for site in layer.sites:
            yield Visit(site, present.streams_of(site), present.samples_of(site))
        if place + 1 < len(sites.layers) or calibration.classifier is not None:
            present.finish()


KEPT = 2**26
"""The bytes of masks and other arguments that may be kept in memory; those of further batches are computed again."""


class _Calls:
    """Runs single layers as the model would: with the arguments that it passes to them besides hidden states."""

    def __init__(self, sites: Sites, calibration: Calibration) -> None:
        self.sites, self.calibration = sites, calibration
        self.kept: dict[int, list[_Arguments]] = {}
        self.room = float(KEPT)

    def __call__(self, place: int, number: int, hidden: Tensor) -> Tensor:
        """What a layer makes of hidden states with the arguments that it gets for a batch."""
        arguments, options = self._arguments(number)[place]
        return layer_output(self.sites.layers[place].module.forward(hidden, *arguments, **options))

    def _arguments(self, number: int) -> list[_Arguments]:
        """The arguments of all layers for a batch: the model runs, but no layer does."""
        if number in self.kept:
            return self.kept[number]
        found: list[_Arguments] = []

        def record(hidden: Tensor, *arguments: Any, **options: Any) -> Any:
            found.append((arguments, options))
            if len(found) == len(self.sites.layers):
                raise Stop
            return self.sites.family.returns(hidden)

        with ExitStack() as stack:
            for layer in self.sites.layers:
                stack.enter_context(replace_forward(layer.module, record))
            stack.enter_context(suppress(Stop))
            self.sites.model(**self.calibration.batches.items[number].inputs)
        size = _bytes_of(found, set())
        if size <= self.room:
            self.kept[number] = found
            self.room -= size
        return found


def _bytes_of(arguments: Any, seen: set[int]) -> float:
    """The memory of tensors; without limit if there is something that a layer might change, such as a cache."""
    if isinstance(arguments, Tensor):
        storage = arguments.untyped_storage()
        known = storage.data_ptr() in seen
        seen.add(storage.data_ptr())
        return 0 if known else storage.nbytes()
    if isinstance(arguments, tuple | list | dict):
        values = arguments.values() if isinstance(arguments, dict) else arguments
        return sum(_bytes_of(each, seen) for each in values)
    return 0 if arguments is None or isinstance(arguments, bool | int | float | str) else math.inf


class _PresentLayer:
    """The layer whose sites are fitted; those that were fitted before are not run again, their results are kept."""

    def __init__(self, sites: Sites, calibration: Calibration, place: int, calls: _Calls) -> None:
        self.sites, self.calibration, self.place, self.calls = sites, calibration, place, calls
        self.read: set[tuple[int, int]] = set()  # the sites and batches whose samples are stored
        self.returned: set[tuple[int, int]] = set()  # those for which what the module returns is stored

    @property
    def layer(self) -> Layer:
        return self.sites.layers[self.place]

    def streams_of(self, site: Site) -> Callable[[], Iterator[Stream]]:
        def streams() -> Iterator[Stream]:
            for number in range(len(self.calibration.batches.items)):
                weights = self.calibration.weights(site, number)
                yield Stream(self._states(site, number), self.calibration.stream(site, number), weights)

        return streams

    def _states(self, site: Site, number: int) -> Tensor:
        """What the input maps of a site receive at real tokens."""
        source = self.calibration.stream_sources.get(site.index)
        if self.sites.savings.kept_layers and source is not None and self.sites[source].layer != site.layer:
            return self.calibration.hidden(number)  # the norm ends the layer below
        states: list[Tensor] = []
        with suppress(Stop), first_received(next(iter(site.stream.values())), states):
            self._run(site, number)
        return self._rows(site, number, states[0])

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
            if (last.index, number) in self.read:
                hidden = _after_sum(last, self.calibration.kept(last, number))
            else:
                hidden = self._rows(last, number, self._run(last, number))
            if above < len(self.sites.layers) and self.sites.family.between(config):
                with _standing_in(self.sites, above, self.calibration.padded(number, hidden)):
                    hidden = self.calibration.rows(number, received(self.sites, self.sites.layers[above].module, batch))
            self.calibration.advance(number, hidden)

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

        at = nullcontext() if sum_of(site).returned else at_sum(site, stop)
        with suppress(Stop), replace_forward(site.output, nothing), at:
            sums.append(self._run(site, number))  # not reached if a module has received the sum
        return Sample(self._rows(site, number, inputs[0]), self._rows(site, number, sums[0]))

    def _run(self, site: Site, number: int) -> Tensor:
        """Run the layer for a site; where no attention is read, the real tokens run as one row, (1, N, d)."""
        if not self._without_attention(site):
            return self.calls(self.place, number, self.calibration.entering(number))
        with ExitStack() as stack:
            for below in self._below(site):
                returns, result = self.calibration.module_returns[below.index], self._returned(below, number)
                forward = partial(_ignoring_arguments, returns.pack(result[None]))
                stack.enter_context(replace_forward(below.module, forward))
            return self.calls(self.place, number, self.calibration.hidden(number)[None])

    def _rows(self, site: Site, number: int, tensor: Tensor) -> Tensor:
        """The real tokens of something that `_run` computed."""
        return tensor[0] if self._without_attention(site) else self.calibration.rows(number, tensor)

    def _below(self, site: Site) -> list[Site]:
        return self.layer.sites[: self.layer.sites.index(site)]

    def _without_attention(self, site: Site) -> bool:
        """Whether a site can run from what the modules below it returned: then tokens do not interact."""
        known = self.calibration.module_returns
        return site.kind != ATTENTION and all(below.index in known for below in self._below(site))

    def _returned(self, site: Site, number: int) -> Tensor:
        """What the module of a site that was fitted returns at real tokens; if that is not known, the layer runs."""
        if (site.index, number) in self.returned:
            return self.calibration.returned(site, number)
        if (site.index, number) not in self.read:
            found: list[Tensor] = []
            with suppress(Stop), first_returned(site.module, found):
                self.calls(self.place, number, self.calibration.entering(number))
            return self.calibration.rows(number, found[0])
        sample = self.calibration.kept(site, number)
        normed = self.calibration.module_returns[site.index].normed
        result: Tensor = _after_sum(site, sample) if normed else site.output(sample.inputs)
        self.calibration.keep_returned(site, number, result)
        self.returned.add((site.index, number))
        return result


def _ignoring_arguments(result: Any, *arguments: Any, **options: Any) -> Any:
    return result


def classifier_samples(sites: Sites, calibration: Calibration) -> Iterator[tuple[Tensor, Tensor]]:
    """What the classifier receives in the pruned model, and what it returns in the unpruned one, batch by batch.

    The layers must have been run through before.
    """
    classifier = sites.model.get_submodule(str(calibration.classifier))
    for number, batch in enumerate(calibration.batches):
        whole = not sites.layers  # layers that share their weights can't be left out
        with nullcontext() if whole else _standing_in(sites, len(sites.layers), calibration.entering(number)):
            inputs = received(sites, classifier, batch)
        yield read_rows(batch, inputs), calibration.logits(number)


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
