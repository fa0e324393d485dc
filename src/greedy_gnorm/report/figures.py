"""Figures of a run (matplotlib), without any global state."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.ticker import MaxNLocator

from greedy_gnorm.pruning.curves import curve as curve_points
from greedy_gnorm.records.files import write_bytes
from greedy_gnorm.report.compression import Kept, axis_title, cost_part, work_curve
from greedy_gnorm.report.looks import ACCENT, DARK, LIGHT, MUTED
from greedy_gnorm.report.picture import Figure
from greedy_gnorm.report.tables import measure_title
from greedy_gnorm.units import UNIT_WORDS, Matrix, Measure, Scores, SiteInfo, Step, Unit, as_matrix, layer_names

DPI = 150
"""The resolution of PNG files, in dots per inch."""


def pictures(figure: Figure, dpi: int = DPI) -> dict[str, bytes]:
    """The figure as PNG, SVG and PDF, by file name suffix."""
    files = {suffix: io.BytesIO() for suffix in (".png", ".svg", ".pdf")}
    for suffix, file in files.items():
        figure.savefig(file, format=suffix[1:], dpi=dpi if suffix == ".png" else "figure")
    return {suffix: file.getvalue() for suffix, file in files.items()}


def save(figure: Figure, path: Path, about: str, dpi: int = DPI) -> None:
    """Write PNG, SVG and PDF of the same name; a line at the foot says what the figure is `about`."""
    figure.supxlabel(about, fontsize=8, color=MUTED)
    for suffix, content in pictures(figure, dpi).items():
        write_bytes(path.with_name(path.name + suffix), content)


def curve(steps: Sequence[Step], solution: int, measure: Measure, colour: str = DARK) -> Figure:
    """Quality against heads removed in the colour of the method, the unpruned level and the solution marked."""
    figure, axes = _axes(7, 4.2)
    heads, values = zip(*curve_points(steps, measure), strict=True)
    axes.axhline(values[0], color=MUTED, linestyle="--", linewidth=1, label=f"unpruned ({values[0]:.3f})")
    axes.plot(heads, values, color=colour, linewidth=1.8)
    axes.plot(
        heads[solution], values[solution], "o", color=ACCENT, markersize=8,
        label=f"solution: {heads[solution]:.0f} heads removed ({values[solution]:.3f})",
    )  # fmt: skip
    axes.set(xlabel="Heads removed", ylabel=measure_title(measure), xlim=(0, max(heads[-1], 1)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=LIGHT)
    axes.legend(frameon=False)
    return figure


def work_figure(steps: Sequence[Step], solution: int, measure: Measure, colour: str = DARK) -> Figure:
    """Quality against the cost that is left, in per cent from left to right, as `curve` shows it against heads."""
    figure, axes = _axes(7, 4.2)
    part = cost_part([steps])
    left, values = zip(*work_curve(steps, measure, part), strict=True)
    axes.axhline(values[0], color=MUTED, linestyle="--", linewidth=1, label=f"unpruned ({values[0]:.3f})")
    axes.plot(left, values, color=colour, linewidth=1.8, marker=".")
    axes.plot(
        left[solution], values[solution], "o", color=ACCENT, markersize=8,
        label=f"solution: {left[solution]:.1f} % of the {part} left ({values[solution]:.3f})",
    )  # fmt: skip
    axes.set(xlabel=axis_title(part), ylabel=measure_title(measure), xlim=(101, min(left) - 1))
    axes.grid(color=LIGHT)
    axes.legend(frameon=False)
    return figure


def kept(kinds: Sequence[Kept], step: int) -> Figure:
    """How many units each layer has left after a step: a panel for each kind, dark is kept, light is removed."""
    figure = Figure(figsize=(1 + 4.2 * len(kinds), 1.6 + 0.3 * max(len(each.layers) for each in kinds)))
    figure.set_layout_engine("constrained")
    for place, each in enumerate(kinds):
        axes = figure.add_subplot(1, len(kinds), place + 1)
        axes.barh(each.layers, each.totals, color=LIGHT)
        bars = axes.barh(each.layers, each.left[step], color=DARK)
        axes.bar_label(bars, [f"{count:,}" for count in each.left[step]], label_type="edge", padding=3, fontsize=8)
        axes.set(xlabel=each.words.capitalize(), ylabel="Layer", xlim=(0, 1.12 * max(each.totals)))
        axes.set_title(f"{sum(each.left[step]):,} of {each.total:,} {each.words} kept")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def mask(removed: Sequence[Unit], model: Mapping[str, Any]) -> Figure:
    """Which heads are left: light is removed, dark is kept; a module that several layers share has a row for each."""
    kept = mask_cells(model, removed)
    figure, axes = _matrix_axes(kept.shape)
    draw_mask(axes, kept, mask_rows(model), linewidth=1)
    axes.set_title(f"{int(np.nansum(kept))} of {int((~np.isnan(kept)).sum())} heads kept (dark)")
    return figure


def draw_mask(axes: Axes, kept: Matrix, rows: Sequence[str], linewidth: float) -> None:
    """The cells of a mask, with numbered heads and named layers."""
    cells = np.ma.masked_invalid(kept)
    axes.pcolormesh(cells, cmap=two_colours(), vmin=0, vmax=1, edgecolors="white", linewidth=linewidth)
    label_matrix(axes, kept.shape[1], rows)


def mask_cells(model: Mapping[str, Any], removed: Sequence[Unit]) -> Matrix:
    """1 for a head that is kept, 0 for one that is gone, NaN where a layer has fewer; `model` is the header's part."""
    kept = [np.ones(site["units"]) for site in model["sites"]]
    for unit in [*(Unit(*unit) for unit in model["removed"]), *removed]:
        kept[unit.site][unit.index] = 0
    return np.repeat(as_matrix(kept), [site["applications"] for site in model["sites"]], axis=0)


def mask_rows(model: Mapping[str, Any]) -> list[str]:
    """The names of the rows of `mask_cells`: the layers, counted through where several share a module."""
    sites = [SiteInfo.from_json(site) for site in model["sites"]]
    applications = sum(site.applications for site in sites)
    return layer_names(sites) if applications == len(sites) else [str(layer) for layer in range(applications)]


def heat_map(scores: Scores, title: str, sites: Sequence[SiteInfo]) -> Figure:
    """Scores by layer and head, on a logarithmic scale where the score is a product; removed heads are left white."""
    values = as_matrix(scores.keys) if scores.logs is None else as_matrix(scores.keys) / np.log(10)
    figure, axes = _matrix_axes(values.shape, legend=True)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    picture = axes.pcolormesh(
        np.ma.masked_invalid(values), cmap="cividis", vmin=low, vmax=high, edgecolors="white", linewidth=1
    )
    figure.colorbar(picture, ax=axes, label="score" if scores.logs is None else "log10 of the score")
    label_matrix(axes, values.shape[1], layer_names(sites))
    axes.set_title(title)
    return figure


def ranked(scores: Scores) -> Figure:
    """Scores in the order of their size, a line for each layer: a panel for heads and one for neurons."""
    kinds = list(dict.fromkeys(site.kind for site in scores.sites))
    figure = Figure(figsize=(1 + 5 * len(kinds), 4.2), layout="constrained")
    colours = colormaps["cividis"](np.linspace(0, 0.9, 1 + max(site.layer for site in scores.sites)))
    for place, kind in enumerate(kinds):
        axes = figure.add_subplot(1, len(kinds), place + 1)
        for site, vector in zip(scores.sites, scores.vectors, strict=True):
            if site.kind == kind:
                left = np.sort(vector[~np.isnan(vector)])[::-1]
                axes.plot(np.arange(1, len(left) + 1), left, color=colours[site.layer], label=str(site.layer))
        axes.set(xlabel=f"{UNIT_WORDS[kind].capitalize()}s, the highest score first", ylabel="Score")
        if all(np.nanmin(vector, initial=np.inf) > 0 for vector in scores.vectors):
            axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=LIGHT)
        axes.legend(frameon=False, title="Layer", fontsize=8, ncols=1 + len(scores.sites) // 12)
    return figure


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _matrix_axes(shape: tuple[int, ...], *, legend: bool = False) -> tuple[Figure, Axes]:
    rows, columns = shape
    return _axes(1.6 + 0.36 * max(columns, 6) + (1.2 if legend else 0), 1.8 + 0.36 * max(rows, 2))


def label_matrix(axes: Axes, heads: int, rows: Sequence[str]) -> None:
    """Heads across, numbered as in the model; named layers down."""
    axes.set(xlabel="Head", ylabel="Layer")
    for axis, names in ((axes.xaxis, [str(head) for head in range(heads)]), (axes.yaxis, rows)):
        stride = max(1, len(names) // 12)
        axis.set_ticks(np.arange(0, len(names), stride) + 0.5, labels=names[::stride])
        axis.set_tick_params(length=0)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.spines[:].set_visible(False)


def two_colours() -> Any:
    """Light for gone, dark for kept."""
    return ListedColormap([LIGHT, DARK])
