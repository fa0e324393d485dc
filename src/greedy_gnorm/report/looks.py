"""Colours and lines: a method looks the same in every chart and figure, whichever others are shown beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from greedy_gnorm.pruning.methods import GREEDY, JOINT, METHODS

# Okabe and Ito's colours, which colour-blind readers can tell apart
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
DARK, ACCENT, MUTED, LIGHT = "#1b3a57", "#c8553d", "#8d99a6", "#dfe6ec"

FLAGSHIPS = (GREEDY, JOINT)
"""The methods that come first and are drawn strongest: of heads, and of heads and neurons."""

FEWEST_POINTS = 3
"""A line through fewer points is not drawn: a table says more."""

DASHES: dict[str, tuple[Any, str]] = {
    "solid": ("-", "none"),
    "dash": ("--", "7 4"),
    "dot": (":", "2 3"),
    "dashdot": ("-.", "7 3 2 3"),
    "longdash": ((0, (8, 3)), "12 4"),
    "longdashdot": ((0, (8, 3, 2, 3)), "12 4 2 4"),
    "1px,6px": ((0, (1, 5)), "1 6"),
    "12px,3px,2px,3px,2px,3px": ((0, (8, 2, 1.5, 2, 1.5, 2)), "12 3 2 3 2 3"),
}
"""Line styles by what plotly calls them, a name or lengths: for matplotlib, and for SVG."""


@dataclass(frozen=True)
class Look:
    """How the line of a method is drawn; lines that differ only in their strength look the same."""

    colour: str
    dash: str
    is_strong: bool = field(default=False, compare=False)

    @property
    def for_plotly(self) -> dict[str, Any]:
        """The line in a chart of the page."""
        return {"color": self.colour, "dash": self.dash, "width": 3 if self.is_strong else 2}

    @property
    def for_matplotlib(self) -> dict[str, Any]:
        """The line in a figure."""
        width = 2.4 if self.is_strong else 1.5
        return {"color": self.colour, "linestyle": DASHES[self.dash][0], "linewidth": width}

    @property
    def for_svg(self) -> dict[str, Any]:
        """The line in the page's list of methods."""
        return {"stroke": self.colour, "stroke-width": 3 if self.is_strong else 2,
                "stroke-dasharray": DASHES[self.dash][1]}  # fmt: skip


# Eight styles and seven colours: 56 lines until a combination repeats
_ALL = [Look(COLOURS[place % len(COLOURS)], tuple(DASHES)[place % len(DASHES)])
        for place in range(len(COLOURS) * len(DASHES))]  # fmt: skip


def _of_methods() -> dict[str, Look]:
    flagships = {name: Look(COLOURS[place], "solid", is_strong=True) for place, name in enumerate(FLAGSHIPS)}
    free = [look for look in _ALL if look not in flagships.values()]
    others = (name for name in METHODS if name not in flagships)
    return flagships | {name: free[place % len(free)] for place, name in enumerate(others)}


def looks(lines: Sequence[str]) -> dict[str, Look]:
    """The look of each line, flagships first: that of its method, or one that is free where a line is no method."""
    known = _of_methods()
    taken = {known[name] for name in lines if name in known}
    free = [look for look in _ALL if look not in taken]
    strangers = [name for name in lines if name not in known]
    own = {name: free[place % len(free)] for place, name in enumerate(strangers)}
    ordered = sorted(lines, key=lambda name: name not in FLAGSHIPS)
    return {name: known.get(name) or own[name] for name in ordered}


def colour_of(method: str) -> str:
    """The colour of one method, where a single line needs no style."""
    return looks([method])[method].colour
