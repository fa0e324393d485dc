"""A run in characters, for a terminal: the mask and the curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from greedy_gnorm.units import Unit

Points = Sequence[tuple[float, float]]

BLOCKS, PLAIN_BLOCKS = " ▁▂▃▄▅▆▇█", " .:#"
CELLS, PLAIN_CELLS = "·■", ".#"  # removed, kept
WIDTH, HEIGHT = 48, 4


def mask(model: Mapping[str, Any], removed: Sequence[Unit], *, plain: bool = False) -> list[str]:
    """A line for each layer: its number, its heads, how many layers share it; `model` is the header's part."""
    gone = {*removed, *(Unit(*head) for head in model["removed"])}
    cells = PLAIN_CELLS if plain else CELLS
    lines = []
    for place, site in enumerate(model["sites"]):
        row = " ".join(cells[Unit(place, index) not in gone] for index in range(site["units"]))
        layers = site["applications"]
        lines.append(f"{site['layer']:>3}  {row}" + (f"  in {layers} layers" if layers > 1 else ""))
    return lines


def curve(points: Points, *, height: int = HEIGHT, width: int = WIDTH, plain: bool = False) -> list[str]:
    """Columns as high as the second number, left to right by the first; the axis goes from 0 to the highest."""
    blocks = PLAIN_BLOCKS if plain else BLOCKS
    across, values = zip(*points, strict=True)
    columns = np.interp(np.linspace(across[0], across[-1], width), across, values)
    top = max(float(columns.max()), 1e-12)
    full = len(blocks) - 1
    eighths = np.ceil(np.clip(columns / top, 0, 1) * height * full - 1e-9).astype(int)
    return [
        "".join(blocks[min(max(int(count) - row * full, 0), full)] for count in eighths)
        for row in reversed(range(height))
    ]


def place(points: Points, point: int, *, width: int = WIDTH) -> int:
    """The column of the curve that a point falls in."""
    first, last = points[0][0], points[-1][0]
    return round((points[point][0] - first) / (last - first) * (width - 1)) if last > first else 0
