"""A run in characters, for a terminal: the mask or the units left in each layer, and the curve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from greedy_gnorm.report.compression import Kept
from greedy_gnorm.units import SiteInfo, Unit, layer_names

Points = Sequence[tuple[float, float]]

BLOCKS, PLAIN_BLOCKS = " ▁▂▃▄▅▆▇█", " .:#"
CELLS, PLAIN_CELLS = "·■", ".#"  # removed, kept
WIDTH, HEIGHT = 48, 4
BAR = 16  # the width of a full bar


def mask(model: Mapping[str, Any], removed: Sequence[Unit], *, plain: bool = False) -> list[str]:
    """A line for each layer: its name, its heads, how many layers share it; `model` is the header's part."""
    gone = {*removed, *(Unit(*head) for head in model["removed"])}
    cells = PLAIN_CELLS if plain else CELLS
    sites = [SiteInfo.from_json(site) for site in model["sites"]]
    names = layer_names(sites)
    width = max(3, *map(len, names))
    lines = []
    for place, site in enumerate(sites):
        row = " ".join(cells[Unit(place, index) not in gone] for index in range(site.units))
        shared = f"  in {site.applications} layers" if site.applications > 1 else ""
        lines.append(f"{names[place]:>{width}}  {row}{shared}")
    return lines


def bars(kinds: Sequence[Kept], step: int, *, plain: bool = False) -> list[str]:
    """A line for each layer: its name, and for each kind of unit a bar of those that are left, and their number."""
    names = list(dict.fromkeys(name for each in kinds for name in each.layers))
    bars_of = [dict(zip(each.layers, _bars(each, step, plain=plain), strict=True)) for each in kinds]
    blanks = [" " * len(next(iter(each.values()))) for each in bars_of]
    width = max(3, *map(len, names))
    lines = []
    for name in names:
        parts = [each.get(name, blank) for each, blank in zip(bars_of, blanks, strict=True)]
        lines.append(f"{name:>{width}}  {'   '.join(parts)}".rstrip())
    return lines


def _bars(kept: Kept, step: int, *, plain: bool) -> Iterator[str]:
    """The bar of each layer, all of one length."""
    cells = PLAIN_CELLS if plain else CELLS
    digits = len(f"{max(kept.totals):,}")
    for left, total in zip(kept.left[step], kept.totals, strict=True):
        full = math.ceil(BAR * left / total) if total else 0
        yield f"{cells[1] * full}{cells[0] * (BAR - full)} {left:{digits},} of {total:{digits},} {kept.words}"


Axis = tuple[float, float]
"""The lowest and the highest value that a curve is drawn between."""


def axis(*curves: Points) -> Axis:
    """An axis for these curves together; it includes 0, so that columns have honest heights."""
    values = [value for points in curves for _, value in points]
    return min(0.0, *values), max(0.0, *values)


def curve(
    points: Points, between: Axis | None = None, *, height: int = HEIGHT, width: int = WIDTH, plain: bool = False
) -> list[str]:
    """Columns from the lowest value of the axis up to the second number of the points, left to right by the first."""
    blocks = PLAIN_BLOCKS if plain else BLOCKS
    across, values = zip(*points, strict=True)
    columns = np.interp(np.linspace(across[0], across[-1], width), across, values)
    low, high = between or axis(points)
    full = len(blocks) - 1
    shares = (columns - low) / (high - low) if high > low else np.zeros(width)
    eighths = np.ceil(shares * height * full - 1e-9).astype(int)
    return [
        "".join(blocks[min(max(int(count) - row * full, 0), full)] for count in eighths)
        for row in reversed(range(height))
    ]


def place(points: Points, point: int, *, width: int = WIDTH) -> int:
    """The column of the curve that a point falls in."""
    first, last = points[0][0], points[-1][0]
    return round((points[point][0] - first) / (last - first) * (width - 1)) if last > first else 0
