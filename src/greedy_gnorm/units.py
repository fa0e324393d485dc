"""The basic types of a run: units, their scores, quality, cost and steps. This module does not import torch."""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from string import ascii_lowercase
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.shown import Shown

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

ATTENTION, FFN = "attention", "ffn"
UNIT_WORDS = {ATTENTION: "head", FFN: "neuron"}
"""The name of a unit, by the kind of its site."""
KINDS = {"heads": (ATTENTION,), "ffn": (FFN,), "both": (ATTENTION, FFN)}
"""What `--units` selects: the kinds of sites."""
ENDS = 4
"""How many units are named where there may be thousands."""


class Unit(NamedTuple):
    """A head or a neuron that can be removed from a site; `index` is its number in the unpruned model."""

    site: int
    index: int  # type: ignore[assignment]  # shadows tuple.index, which is not used

    def __str__(self) -> str:
        return f"L{self.site}·H{self.index}"


@dataclass(frozen=True)
class SiteInfo:
    """The description of a site in records: its module, kind, layer and units, and how often it is applied."""

    name: str
    kind: str
    layer: int
    units: int
    applications: int = 1

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SiteInfo:
        """The site from a record, which may say more of it."""
        return cls(**{name: content[name] for name in cls.__dataclass_fields__})


def unit_name(sites: Sequence[SiteInfo], unit: Unit) -> str:
    """`L3·H10` for head 10 of layer 3, `L3·N512` for a neuron; sites of one kind in one layer get a letter each."""
    return f"L{_layer_labels(sites)[unit.site]}·{_initial(sites[unit.site])}{unit.index}"


def unit_names(sites: Sequence[SiteInfo]) -> list[str]:
    """The names of all units, site after site."""
    labels = zip(_layer_labels(sites), sites, strict=True)
    return [f"L{label}·{_initial(site)}{index}" for label, site in labels for index in range(site.units)]


def layer_names(sites: Sequence[SiteInfo]) -> list[str]:
    """A name for each site as a row of a mask: `3`, or `3a` and `3b`, or `3·H` and `3·N` where kinds are mixed."""
    labels = _layer_labels(sites)
    if len({site.kind for site in sites}) == 1:
        return labels
    return [f"{label}·{_initial(site)}" for label, site in zip(labels, sites, strict=True)]


def counted_units(sites: Sequence[SiteInfo], units: Iterable[Unit]) -> str:
    """`4 heads, 1,210 neurons`."""
    counts = Counter(sites[unit.site].kind for unit in units)
    counted = ((counts[kind], word) for kind, word in UNIT_WORDS.items() if counts[kind])
    return ", ".join(f"{count:,} {word}{'s' * (count != 1)}" for count, word in counted) or "no units"


def _layer_labels(sites: Sequence[SiteInfo]) -> list[str]:
    """The number of each site's layer, with a letter where the layer has several sites of its kind."""
    groups = [(site.layer, site.kind) for site in sites]
    sizes, seen, labels = Counter(groups), Counter[tuple[int, str]](), []
    for group in groups:
        repeats, letter = divmod(seen[group], len(ascii_lowercase))
        labels.append(str(group[0]) + (ascii_lowercase[letter] * (repeats + 1) if sizes[group] > 1 else ""))
        seen[group] += 1
    return labels


def _initial(site: SiteInfo) -> str:
    return UNIT_WORDS[site.kind][0].upper()


@dataclass(frozen=True, repr=False)
class Scores(Shown):
    """A score for each unit: one vector per site, NaN for removed units. Sites may differ in their number of units.

    Units are ordered by `logs` if it is given: a product of small norms can underflow, its logarithm can't.
    `parts` are the numbers that make up the score, such as the norms of the Q, K and V gradients. `sites` give units
    their names; without them every vector stands for the heads of a layer.
    """

    vectors: Sequence[Vector]
    logs: Sequence[Vector] | None = None
    parts: Mapping[str, Sequence[Vector]] = field(default_factory=dict)
    sites: Sequence[SiteInfo] = ()

    def __post_init__(self) -> None:
        if not self.sites:
            sizes = enumerate(map(len, self.vectors))
            object.__setattr__(self, "sites", [SiteInfo("", ATTENTION, layer, units) for layer, units in sizes])

    def __repr__(self) -> str:
        order, layers = self.order(), {site.layer for site in self.sites}
        lines = [f"Scores of {counted_units(self.sites, order)} in {len(layers)} layers"]
        for word, units in (("lowest", order[:ENDS]), ("highest", order[::-1][:ENDS])):
            shown = (f"{unit_name(self.sites, unit)} {self.vectors[unit.site][unit.index]:.3g}" for unit in units)
            lines.append(f"  {word:<8} {', '.join(shown)}")
        return "\n".join(lines if order else lines[:1])

    @property
    def keys(self) -> Sequence[Vector]:
        """The values by which units are ordered, one vector per site."""
        return self.vectors if self.logs is None else self.logs

    def key(self, unit: Unit) -> float:
        """The value by which a unit is ordered."""
        return float(self.keys[unit.site][unit.index])

    @property
    def values(self) -> Matrix:
        """The scores as a matrix, sites x units, padded with NaN where a site has fewer units than the largest."""
        return as_matrix(self.vectors)

    def units(self) -> list[Unit]:
        """The units that have a score, sorted by (site, index)."""
        return [
            Unit(site, int(index))
            for site, vector in enumerate(self.vectors)
            for index in np.flatnonzero(~np.isnan(vector))
        ]

    def order(self, *, highest_first: bool = False) -> list[Unit]:
        """The scored units in the order of removal; ties are broken by (site, index)."""
        sign = -1.0 if highest_first else 1.0
        return sorted(self.units(), key=lambda unit: (sign * self.key(unit), unit))

    def without(self, units: Iterable[Unit]) -> Scores:
        """A copy of the scores with these units marked as removed."""
        removed = list(units)

        def mark(vectors: Sequence[Vector]) -> list[Vector]:
            vectors = [vector.copy() for vector in vectors]
            for unit in removed:
                vectors[unit.site][unit.index] = np.nan
            return vectors

        logs = None if self.logs is None else mark(self.logs)
        return Scores(mark(self.vectors), logs, {name: mark(part) for name, part in self.parts.items()}, self.sites)


def in_order(values: Iterable[float]) -> list[float]:
    """The values, each at least a little larger than all before it: sorting by them gives the order that they have."""
    found: list[float] = []
    for value in values:
        found.append(max(value, math.nextafter(found[-1], math.inf)) if found else value)
    return found


def as_matrix(vectors: Sequence[Vector]) -> Matrix:
    """Stack vectors as the rows of a matrix, padding the shorter ones with NaN."""
    matrix = np.full((len(vectors), max(map(len, vectors))), np.nan)
    for row, vector in zip(matrix, vectors, strict=True):
        row[: len(vector)] = vector
    return matrix


def quality_text(value: float, sign: str = "") -> str:
    """A quality, or a change if `sign` is +, as people read it: four decimals of a share, two of a large value."""
    return f"{value:{sign}.{2 if abs(value) >= LARGE else 4}f}"


LARGE = 10
"""The value of a measure from which on two decimals are enough."""


@dataclass(frozen=True)
class Measure:
    """The measure of quality that rules and curves use, its direction, and its largest value if it has one.

    Differences of a measure without a largest value are relative: one point of accuracy, but one per cent of a loss.
    A measure that `grows_fast` is the exponential of a mean, and curves of it are read by its logarithm.
    """

    name: str
    higher_is_better: bool = True
    largest: float | None = None
    grows_fast: bool = False

    def of(self, step: Step) -> float:
        """The value after a step."""
        return step.quality[self.name]

    def worth(self, value: float) -> float:
        """The value, negated where lower is better, so that more is always better."""
        return value if self.higher_is_better else -value

    def height(self, value: float) -> float:
        """The value on the scale of curves."""
        return math.log(value) if self.grows_fast else value

    @property
    def is_relative(self) -> bool:
        """Whether differences are shares of the unpruned model's value."""
        return self.largest is None

    def drop(self, before: float, after: float) -> float:
        """How much quality is lost from one value to another."""
        lost = self.worth(before) - self.worth(after)
        return lost / abs(before) if self.is_relative and before else lost

    def amount(self, drop: float) -> str:
        """A drop in words."""
        return f"{100 * drop:g} %" if self.is_relative else f"{drop:g}"


@dataclass(frozen=True)
class Cost:
    """The cost of a model or a unit: size, multiplications for one row, measured time; None where it is unknown."""

    parameters: int
    bytes: int | None = None
    multiplications: int | None = None
    milliseconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The entries that are known."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Cost:
        """Read the cost from a line of a journal."""
        return cls(**{name: content[name] for name in cls.__dataclass_fields__ if name in content})


@dataclass(frozen=True, repr=False)
class Step:
    """One iteration of the loop: the scores, the units removed, and the quality and cost afterwards.

    `stop` is the reason why the run ended; only the last step has one. `interval` is the 95 % interval of the leading
    measure, `right` the rows that the model is right on, as `pack_rows` writes them, where rows are right or wrong.
    """

    step: int
    removed: tuple[Unit, ...]
    scores: Scores | None
    quality: Mapping[str, float]
    cost: Cost
    seconds: Mapping[str, float]
    stop: str | None = None
    interval: tuple[float, float] | None = None
    right: str | None = None

    def __repr__(self) -> str:
        parts = [", ".join(f"{name} {value:.4g}" for name, value in self.quality.items())]
        if self.scores is not None:
            parts.append(f"removed {self._removed(self.scores.sites)}")
        parts += [f"{self.parameters:,} parameters", f"{sum(self.seconds.values()):.1f} s"]
        return f"Step {self.step}: {'; '.join(parts)}" + (f"; stopped: {self.stop}" if self.stop else "")

    def _removed(self, sites: Sequence[SiteInfo]) -> str:
        if len(self.removed) > ENDS:
            return counted_units(sites, self.removed)
        return ", ".join(unit_name(sites, unit) for unit in self.removed)

    @property
    def parameters(self) -> int:
        return self.cost.parameters

    @property
    def bytes(self) -> int:
        """The size of the weights as they are stored."""
        assert self.cost.bytes is not None
        return self.cost.bytes

    def to_json(self) -> dict[str, Any]:
        """The step as one line of the journal."""
        line: dict[str, Any] = {
            "step": self.step,
            "removed": [list(unit) for unit in self.removed],
            "scores": None if self.scores is None else vectors_to_json(self.scores.vectors),
            "quality": {name: number_to_json(value) for name, value in self.quality.items()},
            **self.cost.to_json(),
            "seconds": dict(self.seconds),
            "stop": self.stop,
        }
        if self.interval is not None:
            line["interval"] = list(self.interval)
        if self.right is not None:
            line["right"] = self.right
        if self.scores is not None and self.scores.logs is not None:
            line["log_scores"] = vectors_to_json(self.scores.logs)
        return line

    @classmethod
    def from_json(cls, line: Mapping[str, Any], sites: Sequence[SiteInfo] = ()) -> Step:
        """Read what `to_json` wrote; raises KeyError, TypeError or ValueError for anything else.

        `sites` are those of the run's header, which a line does not repeat.
        """
        scores = None
        if line["scores"] is not None:
            logs = vectors_from_json(line["log_scores"]) if "log_scores" in line else None
            scores = Scores(vectors_from_json(line["scores"]), logs, sites=sites)
        return cls(
            step=int(line["step"]),
            removed=tuple(Unit(int(site), int(index)) for site, index in line["removed"]),
            scores=scores,
            quality={name: number_from_json(value) for name, value in line["quality"].items()},
            cost=Cost.from_json(line),
            seconds=dict(line["seconds"]),
            stop=line["stop"],
            interval=(line["interval"][0], line["interval"][1]) if "interval" in line else None,
            right=line.get("right"),
        )


def pack_rows(right: NDArray[np.bool_]) -> str:
    """One bit for each row, as text."""
    return b64encode(np.packbits(right).tobytes()).decode()


def unpack_rows(text: str, rows: int) -> NDArray[np.bool_]:
    """Read what `pack_rows` wrote; raises ValueError if it is not about so many rows."""
    packed = np.frombuffer(b64decode(text, validate=True), dtype=np.uint8)
    if len(packed) != -(-rows // 8):
        raise ValueError(f"{8 * len(packed)} bits are not those of {rows} rows")
    return np.unpackbits(packed, count=rows).astype(bool)


def removed_by(steps: Iterable[Step]) -> list[Unit]:
    """All units that these steps removed, in the order of removal."""
    return [unit for step in steps for unit in step.removed]


def by_site(units: Iterable[Unit]) -> dict[int, list[int]]:
    """Group unit numbers by site, both in ascending order."""
    groups: dict[int, list[int]] = {}
    for unit in sorted(units):
        groups.setdefault(unit.site, []).append(unit.index)
    return groups


@dataclass(frozen=True)
class Latency:
    """Milliseconds for one batch before and after pruning: the median and the quartiles around it."""

    runtime: str
    batch: int
    tokens: int
    threads: int
    repeats: int
    before_ms: float
    before_spread: tuple[float, float]
    after_ms: float
    after_spread: tuple[float, float]
    promised: float | None = None  # the speed-up expected from the multiplications saved

    @property
    def speed_up(self) -> float:
        """The time before divided by the time after."""
        return self.before_ms / self.after_ms

    def to_json(self) -> dict[str, Any]:
        """Plain values for run.json."""
        return {**asdict(self), "before_spread": list(self.before_spread), "after_spread": list(self.after_spread)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Latency:
        spreads = {name: tuple(content[name]) for name in ("before_spread", "after_spread")}
        return cls(**{**content, **spreads})


def number_to_json(value: float) -> float | str | None:
    """Write NaN as null and infinities as strings, because JSON has neither."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def number_from_json(value: float | str | None) -> float:
    """Read what `number_to_json` wrote."""
    return math.nan if value is None else float(value)


def vectors_to_json(vectors: Sequence[Vector]) -> list[list[float | str | None]]:
    """Write vectors as lists of numbers, exact to the last bit."""
    return [[number_to_json(value) for value in vector.tolist()] for vector in vectors]


def vectors_from_json(rows: list[list[float | str | None]]) -> list[Vector]:
    """Read what `vectors_to_json` wrote."""
    return [np.array([number_from_json(value) for value in row], dtype=np.float64) for row in rows]
