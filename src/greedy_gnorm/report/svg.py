"""Small charts as SVG text, for notebooks: no script, no style sheet, readable on light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from matplotlib.ticker import MaxNLocator

BLUE, ORANGE = "#2f86c8", "#d9622b"
FAINT = 'fill="currentColor" fill-opacity=".15"'
DASHES = {"-": "none", "--": "6 3", ":": "2 3", "-.": "7 3 2 3"}
"""Dashes by the name of a line style in matplotlib."""
LEAST_HEIGHT = 0.05
"""The least height of a chart, relative to its values: differences of rounding should not look like a cliff."""
TEXT = 'fill="currentColor" font-size="11" font-family="sans-serif"'


@dataclass(frozen=True)
class Line:
    """A line of a chart: its name, points and colour, and its style as matplotlib writes it."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    style: Any = "-"

    @property
    def dashes(self) -> str:
        """The style as SVG writes it."""
        return " ".join(map(str, self.style[1])) if isinstance(self.style, tuple) else DASHES[self.style]


def line_chart(lines: Sequence[Line], across: str, up: str, *, mark: int | None = None, falling: bool = False) -> str:
    """Lines over common axes that start at the same height, which is drawn dashed.

    `mark` is a point of the first line; `falling` puts the highest number at the left.
    """
    left, top, width, height = 62, 12, 340, 190
    x, y = ([point[axis] for line in lines for point in line.points] for axis in (0, 1))
    (x_low, x_high), (y_low, y_high) = _range(x), _range(y, least=LEAST_HEIGHT * max(map(abs, y)))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        share = (point[0] - x_low) / (x_high - x_low)
        return (
            left + width * (1 - share if falling else share),
            top + height * (1 - (point[1] - y_low) / (y_high - y_low)),
        )

    parts = []
    for tick in _ticks(y_low, y_high):
        _, level = place((x_low, tick))
        parts.append(f'<path d="M{left} {level:.1f}h{width}" stroke="currentColor" stroke-opacity=".18"/>')
        parts.append(_label(left - 6, level + 4, f"{tick:g}", "end"))
    for tick in _ticks(x_low, x_high):
        parts.append(_label(place((tick, y_low))[0], top + height + 16, f"{tick:g}"))
    parts.append(_label(left + width / 2, top + height + 34, across))
    middle = top + height / 2
    turned = f'transform="rotate(-90 14 {middle})"'
    parts.append(f'<text x="14" y="{middle}" text-anchor="middle" {turned} {TEXT}>{escape(up)}</text>')
    _, level = place(lines[0].points[0])
    dashes = f'stroke="currentColor" stroke-opacity=".5" stroke-dasharray="{DASHES["--"]}"'
    parts.append(f'<path d="M{left} {level:.1f}h{width}" {dashes}><title>unpruned</title></path>')
    for number, line in enumerate(lines):
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in map(place, line.points))
        look = f'stroke="{_seen(line.colour)}" stroke-width="2" stroke-dasharray="{line.dashes}"'
        parts.append(f'<polyline points="{path}" fill="none" {look}/>')
        if len(lines) > 1:
            level = top + 6 + 16 * number
            parts.append(f'<path d="M{left + width + 12} {level}h22" {look}/>')
            parts.append(_label(left + width + 40, level + 4, line.name, "start"))
    if mark is not None:
        a, b = place(lines[0].points[mark])
        parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="5" fill="{ORANGE}"><title>solution</title></circle>')
    wide = left + width + (190 if len(lines) > 1 else 14)
    return _drawing(wide, max(top + height + 42, 24 + 16 * len(lines)), f"{up} against {across}", parts)


def cells(colours: Sequence[Sequence[str | None]], rows: Sequence[str], title: str) -> str:
    """A grid of named rows: a colour for each cell, "" for a faint one, None for no cell."""
    size, left, top = 15, 42, 24
    shapes: dict[str, list[str]] = {}
    parts = [_label(left, 14, title, "start")]
    for line, (name, row) in enumerate(zip(rows, colours, strict=True)):
        parts.append(_label(left - 6, top + size * line + 11, name, "end"))
        for column, colour in enumerate(row):
            if colour is not None:
                shapes.setdefault(colour, []).append(f"M{left + size * column} {top + size * line}h13v13h-13z")
    for colour, paths in shapes.items():
        fill = f'fill="{colour}"' if colour else FAINT
        parts.append(f'<path d="{"".join(paths)}" {fill}/>')
    wide = left + max(size * max(map(len, colours)), 7 * len(title))
    return _drawing(wide, top + size * len(rows) + 4, title, parts)


def bars(rows: Sequence[str], counts: Sequence[int], totals: Sequence[int], title: str) -> str:
    """A bar for each row: how many of a total are left, with the number behind it."""
    size, left, top, width = 18, 42, 24, 170
    parts = [_label(left, 14, f"{title}: {sum(counts):,} of {sum(totals):,} kept", "start")]
    longest = max(*totals, 1)
    for line, (name, count, total) in enumerate(zip(rows, counts, totals, strict=True)):
        level = top + size * line
        parts.append(_label(left - 6, level + 11, name, "end"))
        for long, fill in ((width * total / longest, FAINT), (width * count / longest, f'fill="{BLUE}"')):
            parts.append(f'<path d="M{left} {level}h{long:.1f}v14h-{long:.1f}z" {fill}/>')
        parts.append(_label(left + width + 6, level + 11, f"{count:,}", "start"))
    return _drawing(left + width + 50, top + size * len(rows) + 4, title, parts)


def _drawing(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    box = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg {box} role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _label(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {TEXT}>{escape(text)}</text>'


def _seen(colour: str) -> str:
    """The colour, where black takes that of the text, which dark notebooks show bright."""
    return "currentColor" if colour == "#000000" else colour


def _range(values: Sequence[float], least: float = 0.0) -> tuple[float, float]:
    """From the lowest to the highest value, with some room where that is less than `least` or nothing."""
    low, high = min(values), max(values)
    room = max(least - (high - low), 0) / 2 or (0 if high > low else 0.5)
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers within a range."""
    return [float(tick) for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high]
