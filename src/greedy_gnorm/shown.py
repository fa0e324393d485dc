"""What results have in common in a notebook: they show themselves with a small drawing, and can be plotted."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Shown:
    """A result that is drawn by `report.notebook`, which has a drawing and a figure for each type of result."""

    def plot(self) -> Figure:
        """The main figure of the result (matplotlib); `.savefig("figure.png")` writes it to a file."""
        figure: Figure = _drawings().figure_of(self)
        return figure

    def _repr_html_(self) -> str:
        return str(_drawings().html_of(self))


def _drawings() -> Any:
    """Imported by name and when needed: results know nothing of the folders above them, and scripts draw nothing."""
    return import_module("greedy_gnorm.report.notebook")
