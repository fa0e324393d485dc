"""The cost of a model and of its units: parameters, bytes, multiplications, and milliseconds measured by width."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.data.encoding import longest_sentence
from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.families import image_tokens
from greedy_gnorm.model.modes import evaluating
from greedy_gnorm.model.sites import Site, Sites, find_sites
from greedy_gnorm.model.sizes import parameter_count
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.passes.processes import broadcast
from greedy_gnorm.passes.speed import in_turn, multiplications, random_inputs, torch_runner
from greedy_gnorm.units import Cost, Unit

ROWS = 8
"""The rows of the batch that is timed if the user states no shape."""
WIDTHS = (0.75, 0.5, 0.25, 0.125)
"""The shares of units that are timed, besides all and none."""


class Shape(NamedTuple):
    """The rows that costs are stated for: how many are timed together, their mean length, and its mean square."""

    rows: int
    tokens: float
    squares: float

    def __str__(self) -> str:
        return f"{self.rows} x {self.tokens:g}"


def shape_for(text: str | None, batches: Batches) -> Shape:
    """`8x128`, or the lengths of these rows, so many of which are timed together (`8`)."""
    rows, tokens = (ROWS, None) if text is None else parsed_shape(text)
    if tokens is not None:
        return Shape(rows, tokens, tokens * tokens)
    lengths = np.array(batches.lengths(), dtype=float)
    return Shape(rows, float(lengths.mean()), float(np.square(lengths).mean()))


def parsed_shape(text: str) -> tuple[int, int | None]:
    """The rows of `8x128`, and the tokens, if they are stated."""
    rows, _, tokens = text.partition("x")
    return int(rows), int(tokens) if tokens else None


@dataclass(frozen=True)
class Times:
    """Measured milliseconds of a batch: of the unpruned model, and by the share of a kind's units that is left.

    A model's time is that of the unpruned one less what each site saves, by linear interpolation between the widths.
    """

    whole: float
    by_kind: Mapping[str, Sequence[tuple[float, float]]]  # (share of units left, milliseconds), ascending

    def saved(self, kind: str, share: float) -> float:
        """The milliseconds that are saved if all sites of a kind keep this share of their units."""
        shares, times = zip(*self.by_kind[kind], strict=True)
        return self.whole - float(np.interp(share, shares, times))

    def to_json(self) -> dict[str, Any]:
        """Plain values for run.json."""
        return {"whole": self.whole, "by_kind": {kind: [*map(list, line)] for kind, line in self.by_kind.items()}}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Times:
        """Read what `to_json` wrote."""
        lines = {kind: [(share, time) for share, time in line] for kind, line in content["by_kind"].items()}
        return cls(content["whole"], lines)


class Costs:
    """The cost of a model by the number of units that each site has left."""

    def __init__(self, sites: Sites, bytes_per_parameter: int, shape: Shape | None = None, times: Times | None = None):
        self.shape = shape
        self.times = times
        self._size = bytes_per_parameter
        self._totals = {site.index: (site.kind, site.applications * len(site.survivors)) for site in sites}
        self._start = {site.index: len(site.survivors) for site in sites}
        self._units = {site.index: self._unit(site) for site in sites}
        self._parameters = parameter_count(sites.model)
        self._multiplications = None if shape is None else _model_multiplications(sites, shape)

    def _unit(self, site: Site) -> Cost:
        cost = site.unit_cost() if self.shape is None else site.unit_cost(self.shape.tokens, self.shape.squares)
        time = None
        if self.times is not None and site.survivors:
            time = self.times.saved(site.kind, 0.0) * site.applications / self._applications(site.kind)
        return Cost(cost.parameters, cost.parameters * self._size, cost.multiplications, time)

    def _applications(self, kind: str) -> int:
        """How often sites of a kind run, weighted by their units."""
        return sum(total for other, total in self._totals.values() if other == kind)

    def unit(self, site: Site) -> Cost:
        """What removing a unit of this site saves, on average."""
        return self._units[site.index]

    def of(self, sites: Sites) -> Cost:
        """The cost of a model as it is."""
        return self.at({site.index: len(site.survivors) for site in sites})

    def without(self, sites: Sites, units: Collection[Unit]) -> Cost:
        """The cost of a model after these units are removed."""
        counts = {site.index: len(site.survivors) for site in sites}
        for unit in units:
            counts[unit.site] -= 1
        return self.at(counts)

    def at(self, counts: Mapping[int, int]) -> Cost:
        """The cost of a model with so many units in each site."""
        gone = {index: self._start[index] - count for index, count in counts.items()}
        parameters = self._parameters - sum(self._units[index].parameters * count for index, count in gone.items())
        work = None
        if self._multiplications is not None:
            work = self._multiplications - sum((self._units[i].multiplications or 0) * n for i, n in gone.items())
        return Cost(parameters, parameters * self._size, work, self._time(counts))

    def _time(self, counts: Mapping[int, int]) -> float | None:
        if self.times is None:
            return None
        saved = 0.0
        for index, count in counts.items():
            kind, total = self._totals[index]
            if total:
                saved += self.times.saved(kind, count / self._start[index]) * total / self._applications(kind)
        return self.times.whole - saved


def _model_multiplications(sites: Sites, shape: Shape) -> int:
    """Multiplications of a row of the shape: those of attention, and the rest, which is linear in the tokens."""
    fixed = image_tokens(sites.model.config)
    if fixed is not None:
        return multiplications(sites.model, fixed)
    attention = find_sites(sites.model, "heads")  # also where only neurons are removed

    def of_heads(tokens: float, squares: float) -> float:
        costs = [len(site.survivors) * (site.unit_cost(tokens, squares).multiplications or 0) for site in attention]
        return sum(costs)

    short, long = 2, min(10, longest_sentence(sites.model))
    counts = [multiplications(sites.model, tokens) - of_heads(tokens, tokens**2) for tokens in (short, long)]
    slope = (counts[1] - counts[0]) / (long - short)
    rest = counts[0] + slope * (shape.tokens - short)
    return round(of_heads(shape.tokens, shape.squares) + rest)


def measured_times(sites: Sites, shape: Shape, *, seconds: float = 6.0) -> Times:
    """Time models with fewer units of each kind, all sites alike, in turn with the unpruned one.

    With several processes, the first one measures for all.
    """
    tokens = min(max(round(shape.tokens), 1), longest_sentence(sites.model))
    if shape.tokens > longest_sentence(sites.model):
        raise GnormError(f"shape {shape}: the model takes at most {longest_sentence(sites.model)} tokens.")

    def measure() -> dict[str, Any]:
        kinds = list(dict.fromkeys(site.kind for site in sites))
        points = [(kind, share) for kind in kinds for share in (*WIDTHS, 0.0)]
        models = [sites.model, *(_narrowed(sites, kind, share) for kind, share in points)]
        with ExitStack() as stack, torch.inference_mode():
            for model in models:
                stack.enter_context(evaluating(model))
            inputs = random_inputs(sites.model, shape.rows, tokens)
            times = in_turn([torch_runner(model) for model in models], inputs, seconds=seconds, least=3)
        whole, *rest = (statistics.median(each) for each in times)
        lines: dict[str, list[list[float]]] = {kind: [[1.0, whole]] for kind in kinds}
        for (kind, share), time in zip(points, rest, strict=True):
            # Fewer units never take longer; where they seem to, it is noise
            lines[kind].append([share, min(time, lines[kind][-1][1])])
        return {"whole": whole, "by_kind": {kind: sorted(line) for kind, line in lines.items()}}

    return Times.from_json(broadcast(measure))


def _narrowed(sites: Sites, kind: str, share: float) -> Any:
    """A copy of the model whose sites of a kind have this share of their units."""
    narrow = find_sites(copy.deepcopy(sites.model))
    units = [
        Unit(site.index, index)
        for site in narrow
        if site.kind == kind
        for index in site.survivors[round(share * len(site.survivors)) :]
    ]
    remove(narrow, units)
    return narrow.model.eval()
