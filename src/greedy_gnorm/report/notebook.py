"""Results as notebooks show them: a small drawing (HTML with inline SVG, no script), and a figure to keep.

Text and axes take the colour of the notebook's text, and everything else is readable on light and dark alike. Styles
are attributes of the elements, because notebooks are often shown by pages that drop style sheets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from html import escape
from typing import Any

import numpy as np
from matplotlib import colormaps

from greedy_gnorm.comparison.analysis import Comparison
from greedy_gnorm.pruning.curves import curve
from greedy_gnorm.pruning.run import Run
from greedy_gnorm.report import comparison_figures, figures
from greedy_gnorm.report.compression import axis_title, cost_part, is_compression, kept_units, work_curve
from greedy_gnorm.report.picture import Figure
from greedy_gnorm.report.svg import BLUE, Line, bars, cells, line_chart
from greedy_gnorm.report.tables import choices_table, measure_title, take_name
from greedy_gnorm.units import ATTENTION, Scores, Vector, layer_names

MOST_COLUMNS = 64
"""Scores of layers with more units than this are summed up, not drawn one by one."""
MEANS = "Means over runs. The tables and the page of the comparison have intervals, and mark what is clearly the best."


@singledispatch
def figure_of(result: object) -> Figure:
    """The main figure of a result."""
    raise TypeError(f"There is no figure of {type(result).__name__}.")


@figure_of.register
def _(run: Run) -> Figure:
    draw = figures.work_figure if is_compression(run.header) else figures.curve
    return draw(run.steps, run.solution.step, run.measure)


@figure_of.register
def _(comparison: Comparison) -> Figure:
    return comparison_figures.curves(comparison)


@figure_of.register
def _(scores: Scores) -> Figure:
    if any(site.kind != ATTENTION for site in scores.sites):
        return figures.ranked(scores)
    return figures.heat_map(scores, "Scores", scores.sites)


@singledispatch
def html_of(result: object) -> str:
    """A small drawing of a result."""
    raise TypeError(f"There is no drawing of {type(result).__name__}.")


@html_of.register
def _(run: Run) -> str:
    table = ""
    if choices := run.choices():
        columns, (unpruned, *rows) = choices_table(choices, run.steps[0], run.measure)
        taken = [[*row[:-1], f"run.at({take_name(choice)!r})"] for row, choice in zip(rows, choices, strict=True)]
        table = _table(columns, [unpruned, *taken])
    return _block(_text(repr(run)), _row(_run_curve(run), _kept(run)), table)


@html_of.register
def _(comparison: Comparison) -> str:
    measure, lines = comparison.measure, []
    for method, look in comparison_figures.styles(list(comparison.curves)).items():
        across, values = comparison_figures.mean_curve(comparison, method)
        points = list(zip(across.tolist(), values.tolist(), strict=True))
        lines.append(Line(method, points, look["color"], look["linestyle"]))
    part = axis_title(cost_part(walk for walks in comparison.curves.values() for walk in walks))
    title = part if comparison.joint else "Heads removed"
    chart = line_chart(lines, title, measure_title(measure), falling=comparison.joint)
    return _block(_text(repr(comparison).splitlines()[0]), _row(chart), _table(*_means(comparison)), _text(MEANS))


@html_of.register
def _(scores: Scores) -> str:
    names = layer_names(scores.sites)
    if max(site.units for site in scores.sites) > MOST_COLUMNS:
        columns = ["layer", "units", "lowest", "median", "highest"]
        return _block(_text(repr(scores)), _table(columns, list(map(_summary, names, scores.vectors))))
    return _block(_text(repr(scores)), _row(cells(_colours(scores), names, "Scores: bright is high")))


def _means(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of the means by method, which are there at once; intervals take a bootstrap."""
    shown, curves = comparison.columns, comparison.curves
    means = [column.means(comparison) for column in shown]
    cells = [
        [method, str(len(walks)), *(column.written(each[method]) for column, each in zip(shown, means, strict=True))]
        for method, walks in curves.items()
    ]
    return ["method", "runs", *(column.name for column in shown)], cells


def _summary(name: str, vector: Vector) -> list[str]:
    """A row of the table of scores by layer."""
    left = vector[~np.isnan(vector)]
    numbers = (left.min(), np.median(left), left.max()) if left.size else ()
    return [name, f"{left.size:,}", *(f"{number:.3g}" for number in numbers)]


def _colours(scores: Scores) -> list[list[str | None]]:
    """A colour for each unit, on a logarithmic scale where the score is a product; None for removed units."""
    finite = np.concatenate([key[np.isfinite(key)] for key in scores.keys])
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)

    def colour(key: float) -> str | None:
        if np.isnan(key):
            return None
        share = (np.clip(key, low, high) - low) / ((high - low) or 1)
        red, green, blue, _ = colormaps["cividis"](float(share), bytes=True)
        return f"#{red:02x}{green:02x}{blue:02x}"

    return [[colour(key) for key in keys] for keys in scores.keys]


def _run_curve(run: Run) -> str:
    part, compressed = cost_part([run.steps]), is_compression(run.header)
    points = work_curve(run.steps, run.measure, part) if compressed else curve(run.steps, run.measure)
    title = axis_title(part) if compressed else "Heads removed"
    line = Line(run.method, points, BLUE)
    return line_chart([line], title, measure_title(run.measure), mark=run.solution.step, falling=compressed)


def _kept(run: Run) -> str:
    """The mask of heads; bars of the units left in each layer where neurons are removed too."""
    if is_compression(run.header):
        left = [(each, each.left[run.solution.step]) for each in kept_units(run.header, run.steps)]
        drawn = (bars(each.layers, counts, each.totals, each.words.capitalize()) for each, counts in left)
        return f"<div>{'<br>'.join(drawn)}</div>"
    model = run.header["model"]
    mask = figures.mask_cells(model, run.removed)
    colours = [[None if np.isnan(cell) else BLUE if cell else "" for cell in row] for row in mask]
    return cells(colours, figures.mask_rows(model), "Heads: blue is kept")


def _block(*parts: str) -> str:
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


def _row(*parts: str) -> str:
    return f'<div style="display:flex;flex-wrap:wrap;gap:1.5em;align-items:flex-start">{"".join(parts)}</div>'


def _text(text: str) -> str:
    return f'<pre style="background:none;margin:0 0 .8em;white-space:pre-wrap">{escape(text)}</pre>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is aligned to the left; what all cells share is said once, for there can be many."""

    def line(tag: str, style: str, texts: Sequence[Any]) -> str:
        first, *others = (escape(str(text)) for text in texts)
        made = "".join(f"<{tag}{style}>{text}</{tag}>" for text in others)
        return f'<tr><{tag} style="text-align:left">{first}</{tag}>{made}</tr>'

    head = line("th", ' style="text-align:right"', columns)
    body = "".join(line("td", "", row) for row in rows)
    shared = 'cellpadding="4" style="margin-top:.8em;text-align:right;white-space:nowrap"'
    return f"<table {shared}><thead>{head}</thead><tbody>{body}</tbody></table>"
