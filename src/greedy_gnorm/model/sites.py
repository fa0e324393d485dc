"""The sites of a model: the modules that units can be removed from, and the units that each still has."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from greedy_gnorm.errors import GnormError, UnsupportedModel
from greedy_gnorm.model.families import FAMILIES, NO_POSITIONS, RETURNED, Family, Positions, SiteRow
from greedy_gnorm.model.modeling_pruned import RECORDS, unit_channels, unit_width
from greedy_gnorm.settings import Savings
from greedy_gnorm.units import ATTENTION, KINDS, UNIT_WORDS, Cost, SiteInfo, Unit, Vector, by_site

UNIT_PLURALS = {"heads": "attention heads", "ffn": "feed-forward neurons", "both": "heads and neurons"}
"""What `--units` selects, in words."""


class Sum(NamedTuple):
    """Where a site's output plus the residual can be read: what a module receives, or what the layer returns."""

    module: nn.Module
    returned: bool


@dataclass(eq=False)
class Site:
    """A module that units can be removed from: its linear maps, its units in original numbering, its applications.

    `number` counts the sites of one kind, as configurations do; `layout` is the family's row as plain values. `sum` is
    where the output plus the residual can be read. `positions` are what tokens are compared with besides one another,
    and `map_at` receives the attention map, if the family's code is its own. `version` changes with the weights.
    """

    index: int
    number: int
    name: str
    layer: int
    module: nn.Module
    layout: dict[str, Any]
    survivors: list[int]
    applications: int
    sum: Sum | None = None
    positions: Positions = NO_POSITIONS
    map_at: nn.Module | None = None
    gate: tuple[float, ...] | None = None  # the factors on the surviving units while gates are set
    version: int = 0

    @property
    def kind(self) -> str:
        """`attention` or `ffn`."""
        return str(self.layout["kind"])

    @property
    def total(self) -> int:
        """The number of units of the unpruned site."""
        return int(self.layout["units"])

    @property
    def sizes(self) -> Mapping[str, int]:
        """The channels of a unit in each part, wherever they are."""
        maps = [*self.layout["inputs"], self.layout["output"]]
        return {
            part: size * max(each["parts"].count(part) for each in maps) for part, size in self.layout["sizes"].items()
        }

    @property
    def info(self) -> SiteInfo:
        """The description of the site for records."""
        return SiteInfo(self.name, self.kind, self.layer, self.total, self.applications)

    @property
    def state(self) -> Hashable:
        """What the output depends on besides the input: passes in equal states give equal outputs."""
        return tuple(self.survivors), self.gate, self.version

    @property
    def inputs(self) -> dict[str, nn.Module]:
        """The linear maps whose outputs belong to units, by path."""
        return {each["path"]: self.module.get_submodule(each["path"]) for each in self.layout["inputs"]}

    @property
    def stream(self) -> dict[str, nn.Module]:
        """The input maps that read only hidden states, not relative positions, by path."""
        others = {*self.positions.shared, *(each.path for each in self.positions.own)}
        return {path: each for path, each in self.inputs.items() if path not in others}

    @property
    def output(self) -> nn.Module:
        """The linear map whose inputs belong to units."""
        return self.module.get_submodule(self.layout["output"]["path"])

    @property
    def output_size(self) -> int:
        """The channels of a unit at the input of `output`."""
        return unit_width(self.layout["output"], self.layout["sizes"])

    @property
    def owner(self) -> nn.Module:
        """The module that holds the first input map, which computes the attention."""
        return self.module.get_submodule(self.layout["inputs"][0]["path"].rpartition(".")[0])

    @property
    def parts(self) -> dict[str, str]:
        """The path of the input map that holds each part."""
        return {part: each["path"] for each in self.layout["inputs"] for part in each["parts"]}

    def part(self, name: str, outputs: Tensor) -> Tensor:
        """Select one part's channels, unit by unit, from its map's outputs: (..., width) -> (..., units * size)."""
        path = self.parts[name]
        linear_map = next(each for each in self.layout["inputs"] if each["path"] == path)
        if linear_map["parts"] == [name]:
            return outputs
        channels = unit_channels(linear_map, len(self.survivors), self.layout["sizes"])[name]
        places = torch.tensor([channel for unit in channels for channel in unit], dtype=torch.long)
        return outputs.index_select(-1, places.to(outputs.device))

    def by_unit(self, values: Tensor) -> Tensor:
        """Values of the inputs of `output`, or of attention maps, by unit: (..., count) -> (..., units, each)."""
        places, units = len(self.layout["output"]["parts"]), len(self.survivors)
        each = values.shape[-1] // (places * units) if units else 1
        return values.reshape(*values.shape[:-1], places, units, each).transpose(-3, -2).flatten(-2)

    def by_channel(self, values: Tensor) -> Tensor:
        """Repeat values of units for each of their inputs of `output`: (..., units) -> (..., units * output_size)."""
        places = len(self.layout["output"]["parts"])
        return torch.cat([values.repeat_interleave(self.output_size // places, dim=-1)] * places, dim=-1)

    def unit_cost(self, tokens: float | None = None, squares: float | None = None) -> Cost:
        """The cost that removing a unit saves; multiplications are for one row with this many tokens.

        For rows of different lengths, `tokens` is their mean and `squares` the mean of their squares.
        """
        widths = {each["path"]: unit_width(each, self.layout["sizes"]) for each in self.layout["inputs"]}
        weights = {path: widths[path] * features(linear)[0] for path, linear in self.inputs.items()}
        outputs = self.output_size * features(self.output)[1]
        biases = sum(widths[path] for path, linear in self.inputs.items() if linear.bias is not None)
        parameters = sum(weights.values()) + outputs + biases
        if tokens is None:
            return Cost(parameters)
        own = [each.path for each in self.positions.own]
        work = tokens * (sum(weights[path] for path in weights if path not in own) + outputs)
        work += self.positions.count * sum(weights[path] for path in (*self.positions.shared, *own))
        work += self.products_per_unit(tokens, tokens * tokens if squares is None else squares)
        return Cost(parameters, multiplications=round(self.applications * work))

    def products_per_unit(self, tokens: float, squares: float) -> float:
        """Multiplications of a head outside of linear maps, for one row: see `unit_cost`.

        Queries times keys, attention times values, and tokens times relative positions.
        """
        if self.kind != ATTENTION:
            return 0
        positions = self.positions.products * self.positions.count
        return squares * (self.sizes["q"] + self.output_size) + tokens * positions * self.sizes["q"]

    def __str__(self) -> str:
        return f"layer {self.layer} ({self.name})"


class Layer(NamedTuple):
    """A layer of a stack and its sites, in the order they run."""

    module: nn.Module
    sites: list[Site]


class Sites(Sequence[Site]):
    """All sites of one model, in the order they run.

    `layers` are the modules that contain them if every layer runs once, on the output of the one before; otherwise it
    is empty. `savings` says how passes save work; `cache` holds what they can reuse, and `kept` what a long score has
    computed so far.
    """

    def __init__(self, model: nn.Module, family: Family, sites: Sequence[Site], layers: Sequence[Layer] = ()) -> None:
        self.model = model
        self.family = family
        self.layers = list(layers)
        self._sites = list(sites)
        self.kept: Any = None
        self.use(Savings())

    def use(self, savings: Savings) -> Sites:
        """Set how passes over this model save work, and clear the cache."""
        self.savings = savings
        self.cache: Any = None
        return self

    @overload
    def __getitem__(self, index: int) -> Site: ...
    @overload
    def __getitem__(self, index: slice) -> list[Site]: ...
    def __getitem__(self, index: int | slice) -> Site | list[Site]:
        return self._sites[index]

    def __len__(self) -> int:
        return len(self._sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)

    @property
    def infos(self) -> list[SiteInfo]:
        """The descriptions of the sites for records."""
        return [site.info for site in self]

    def survivors(self) -> list[Unit]:
        """The units that are left, sorted by (site, index)."""
        return [Unit(site.index, index) for site in self for index in site.survivors]

    def removed(self) -> list[Unit]:
        """The units that were removed, sorted by (site, index)."""
        units = {Unit(site.index, index) for site in self for index in range(site.total)}
        return sorted(units - set(self.survivors()))

    def expand(self, values: Sequence[Sequence[float] | Vector]) -> list[Vector]:
        """Place the values of each site's surviving units in a vector of all its units, with NaN for removed ones."""
        vectors = [np.full(site.total, np.nan) for site in self]
        for site, vector, row in zip(self, vectors, values, strict=True):
            vector[site.survivors] = row
        return vectors


def features(linear: Any) -> tuple[int, int]:
    """The number of inputs and outputs of a Linear or Conv1D."""
    return (linear.nx, linear.nf) if isinstance(linear, Conv1D) else (linear.in_features, linear.out_features)


def family_of(config: Any, what: str = "") -> Family:
    """The family of a configuration; raises UnsupportedModel if there is none."""
    model_type = str(getattr(config, "model_type", ""))
    if model_type not in FAMILIES:
        found = f"model type {model_type!r}" if model_type else f"{what} without a model_type"
        raise UnsupportedModel(f"Found {found}; supported model types are: {', '.join(FAMILIES)}.")
    return FAMILIES[model_type]


def find_sites(model: nn.Module, units: str = "both") -> Sites:
    """The sites of a model, pruned or not: those of its `heads`, its feed-forward neurons (`ffn`) or `both`.

    Raises UnsupportedModel if the model's family is not supported.
    """
    if units not in KINDS:
        raise GnormError(f"Unknown units {units!r}. Choose from: {', '.join(KINDS)}.")
    config: Any = getattr(model, "config", None)
    family = family_of(config, type(model).__name__)
    base = getattr(model, "base_model", model)
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    rows = family.rows(config)
    found = [_matches(base, row) for row in rows]
    positions = sorted({position for matches in found for position in matches})
    if not positions:
        raise UnsupportedModel(f"No module matches {rows[0].path!r} in this {config.model_type} model.")
    kinds = {row.kind for row in rows if row.kind in KINDS[units]}
    if not kinds:
        raise UnsupportedModel(f"It is not known where {config.model_type} models keep their {UNIT_PLURALS[units]}.")
    gone = {kind: _removed_by_number(config, rows, found, kind) for kind in kinds}
    sites: list[Site] = []
    counts = dict.fromkeys(gone, 0)
    for layer, position in enumerate(positions):
        for row, matches in zip(rows, found, strict=True):
            if row.kind in kinds and position in matches:
                name, module = matches[position]
                layout = row.layout(config)
                missing = set(gone[row.kind].get(counts[row.kind], ()))
                survivors = [unit for unit in range(layout["units"]) if unit not in missing]
                site = Site(
                    len(sites), counts[row.kind], prefix + name, layer, module, layout, survivors,
                    row.applications(config, position), _sum(base, family, row, position), row.positions(config),
                    None if row.map_at is None else module.get_submodule(row.map_at),
                )  # fmt: skip
                _check_widths(site)
                sites.append(site)
                counts[row.kind] += 1
    return Sites(model, family, sites, _layers(base, family, sites))


def _matches(base: nn.Module, row: SiteRow) -> dict[tuple[int, ...], tuple[str, nn.Module]]:
    """The modules that match a row's path, by position."""
    pattern = re.compile(re.escape(row.path).replace(r"\*", r"(\d+)"))
    return {
        tuple(map(int, match.groups())): (name, module)
        for name, module in base.named_modules()
        if (match := pattern.fullmatch(name))
    }


def _sum(base: nn.Module, family: Family, row: SiteRow, position: tuple[int, ...]) -> Sum | None:
    """Where the site's output plus the residual can be read, if the family says so."""
    returned = row.sum_at == RETURNED
    path = family.layer if returned else row.sum_at
    if path is None:
        return None
    numbers = iter(position)
    return Sum(base.get_submodule(re.sub(r"\*", lambda _: str(next(numbers)), path)), returned)


def _layers(base: nn.Module, family: Family, sites: Sequence[Site]) -> list[Layer]:
    """The layers that contain the sites; none if layers are shared or are not transformers' own."""
    if family.layer is None:
        return []
    numbers = sorted({site.layer for site in sites})
    layers = [
        Layer(base.get_submodule(family.layer.replace("*", str(number))), [s for s in sites if s.layer == number])
        for number in numbers
    ]
    known = all(type(layer.module).__module__.startswith("transformers.models.") for layer in layers)
    return layers if known else []


def recorded_units(config: Any, kind: str, limits: Sequence[int]) -> dict[int, list[int]]:
    """The removed units that a configuration records (`pruned_heads` as in transformers 4), checked, by site number.

    `limits` holds the number of units of each site of this kind.
    """
    units = parse_record(config, kind)
    word, record = UNIT_WORDS[kind], RECORDS[kind]
    for unit in units:
        if unit.site >= len(limits):
            raise UnsupportedModel(
                f"{record} in the configuration names layer {unit.site}, but the layers are 0 to {len(limits) - 1}."
            )
        if not 0 <= unit.index < limits[unit.site]:
            raise UnsupportedModel(
                f"{record} in the configuration names {word} {unit.index} of layer {unit.site}, which has {word}s 0 to "
                f"{limits[unit.site] - 1}."
            )
    return by_site(units)


def parse_record(config: Any, kind: str) -> list[Unit]:
    """Parse the removed units that a configuration records; whether they exist in the model is not checked."""
    record = RECORDS[kind]
    recorded = getattr(config, record, None) or {}
    word = UNIT_WORDS[kind]
    pairs: Any = recorded.items() if isinstance(recorded, Mapping) else [("?", recorded)]
    units = []
    for site, indices in pairs:
        numbers: Any = indices if isinstance(indices, list | tuple) else ["?"]
        if not str(site).isdecimal() or not all(type(index) is int for index in numbers):
            raise UnsupportedModel(
                f"{record} in the configuration must map layers to lists of {word} numbers, not {recorded!r:.200}."
            )
        units += [Unit(int(site), index) for index in numbers]
    if len(set(units)) < len(units):
        raise UnsupportedModel(f"{record} in the configuration names a {word} twice: {recorded!r:.200}")
    return units


def _removed_by_number(config: Any, rows: Sequence[SiteRow], found: Sequence[Any], kind: str) -> dict[int, list[int]]:
    own = [(row, matches) for row, matches in zip(rows, found, strict=True) if row.kind == kind]
    positions = sorted({position for _, matches in own for position in matches})
    limits = [row.units(config) for position in positions for row, matches in own if position in matches]
    return recorded_units(config, kind, limits)


def _check_widths(site: Site) -> None:
    """Refuse a site whose linear maps have different widths than the configuration says."""
    expected = {each["path"]: unit_width(each, site.layout["sizes"]) for each in site.layout["inputs"]}
    for path, linear in {**site.inputs, site.layout["output"]["path"]: site.output}.items():
        if not isinstance(linear, nn.Linear | Conv1D):
            raise UnsupportedModel(f"{site.name} has a {type(linear).__name__} where a torch.nn.Linear is required.")
        size, side = (expected[path], 1) if path in expected else (site.output_size, 0)
        width = features(linear)[side]
        if width != len(site.survivors) * size:
            raise UnsupportedModel(
                f"{site.name}.{path} has a width of {width}, but the configuration says {len(site.survivors)} "
                f"{UNIT_WORDS[site.kind]}s of {size}. Was it pruned by another tool?"
            )


def weight_of(linear: nn.Module) -> Tensor:
    """The weight of a linear map, even if accelerate has offloaded it."""
    weight: Any = linear.weight
    offloaded: Any = getattr(getattr(linear, "_hf_hook", None), "weights_map", None)
    found: Tensor = offloaded["weight"] if weight.is_meta and offloaded is not None else weight
    return found
