"""What results have in common in Python: they can be plotted and turned into tables, and notebooks draw them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


class Shown:
    """A result that the folder `report` shows, which has a figure, a drawing and a table for each type of result."""

    def plot(self) -> Figure:
        """The main figure of the result (matplotlib): the curve of a run, all curves of a comparison, or the scores.

        `.savefig("figure.png")` writes it to a file.
        """
        figure: Figure = _report("notebook").figure_of(self)
        return figure

    def to_pandas(self) -> DataFrame:
        """The numbers of the result: one row for each step of a run or of a comparison's walks, or for each unit."""
        return _report("frames").table_of(self)

    def _repr_html_(self) -> str:
        return str(_report("notebook").html_of(self))


def _report(module: str) -> Any:
    """Imported by name and when needed: results know nothing of the folders above them, and scripts draw nothing."""
    return import_module(f"greedy_gnorm.report.{module}")
