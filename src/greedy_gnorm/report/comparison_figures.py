"""The paper's figures for a comparison, from its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from greedy_gnorm.comparison.analysis import Comparison, drifts, solution
from greedy_gnorm.pruning.curves import curve
from greedy_gnorm.pruning.methods import RANDOM, RANDOMS
from greedy_gnorm.pruning.run import sites_of
from greedy_gnorm.report.compression import aligned, axis_title, cost_part, work_curve
from greedy_gnorm.report.figures import DPI, draw_mask, heat_map, mask_cells, mask_rows, save
from greedy_gnorm.report.looks import ACCENT, DARK, FLAGSHIPS, LIGHT, MUTED, colour_of, looks
from greedy_gnorm.report.names import about
from greedy_gnorm.report.picture import Figure
from greedy_gnorm.report.tables import measure_title
from greedy_gnorm.units import Matrix, SiteInfo, Unit, layer_names, removed_by, unit_name


def write_all(comparison: Comparison, folder: Path, dpi: int = DPI) -> None:
    """Every figure that the steps give, as PNG, SVG and PDF."""
    for name, figure in _figures(comparison):
        save(figure, folder / name, about(comparison.header), dpi)


def _figures(comparison: Comparison) -> Iterator[tuple[str, Figure]]:
    yield "curves", curves(comparison)
    if _random_of(comparison) is not None and len(comparison.curves) > 1:
        yield "against-random", against_random(comparison)
    if comparison.joint:  # its walks have no knees, and thousands of units
        return
    yield "masks", masks(comparison)
    if any(site["applications"] > 1 for site in comparison.header["model"]["sites"]):
        yield "tied-heads", tied_heads(comparison.header["model"])
    if (stale := drift(comparison)) is not None:
        yield "staleness", stale
    sites = sites_of(comparison.header)
    for method, walks in comparison.curves.items():
        if method != RANDOM and (scores := walks[0][1].scores) is not None:
            yield f"scores-{method}", heat_map(scores, f"Scores before pruning: {method}", sites)


def styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour and a line for each method; a flagship is drawn strongest."""
    return {method: look.for_matplotlib for method, look in looks(methods).items()}


def curves(comparison: Comparison) -> Figure:
    """Quality along the walks: one line for each method, a band from the lowest to the highest of its runs."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = _plot_axes(figure.add_subplot(), comparison)
    for method, look in styles(list(comparison.curves)).items():
        across, values = _values(comparison, method)
        axes.fill_between(across, values.min(0), values.max(0), color=look["color"], alpha=0.13, linewidth=0)
        axes.plot(across, values.mean(0), label=f"{method} ({len(values)})", **look)
    _legend(figure, axes, "method (runs)")
    return figure


def against_random(comparison: Comparison) -> Figure:
    """A flagship (or the first method) against boxes of random trajectories, with the unpruned level."""
    random = _random_of(comparison) or RANDOM
    others = [name for name in comparison.curves if name != random]
    method = next((name for name in FLAGSHIPS if name in others), others[0])
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = _plot_axes(figure.add_subplot(), comparison)
    across, values = _values(comparison, random)
    places = np.arange(0, len(across), max(1, round(len(across) / 25)))
    width, colour = 0.6 * np.abs(np.diff(across[places])).min(), colour_of(random)
    axes.boxplot(
        [values[:, place] for place in places], positions=across[places], widths=width, manage_ticks=False,
        patch_artist=True, boxprops={"facecolor": LIGHT, "edgecolor": colour}, medianprops={"color": DARK},
        whiskerprops={"color": colour}, capprops={"color": colour},
        flierprops={"markersize": 2, "markeredgecolor": colour},
    )  # fmt: skip
    across, ours = _values(comparison, method)
    axes.plot(across, ours.mean(0), color=colour_of(method), linewidth=2.2)
    axes.axhline(values[0, 0], color=MUTED, linestyle="--", linewidth=1.4)
    lines = [Line2D([], [], color=colour_of(method)), Line2D([], [], color=colour, linewidth=6, alpha=0.4)]
    lines.append(Line2D([], [], color=MUTED, linestyle="--"))
    axes.legend(lines, [method, f"{random} ({len(values)} trajectories)", "unpruned"], frameon=False)
    return figure


def masks(comparison: Comparison) -> Figure:
    """The mask at each method's knee, first run: light is removed, dark is kept; shared layers as bands."""
    model, methods = comparison.header["model"], list(comparison.curves)
    names = mask_rows(model)
    columns = min(len(methods), 4)
    rows = -(-len(methods) // columns)
    example = mask_cells(model, [])
    height, width = 0.8 + 0.16 * example.shape[0], 0.6 + 0.16 * example.shape[1]
    figure = Figure(figsize=(columns * max(width, 2.2), 0.3 + rows * max(height, 1.4)), layout="constrained")
    for place, method in enumerate(methods):
        walk = comparison.curves[method][0]
        axes = figure.add_subplot(rows, columns, place + 1)
        removed = removed_by(walk[: solution(walk, comparison.measure).step + 1])
        cells = mask_cells(model, removed)
        draw_mask(axes, cells, names, linewidth=0.5)
        axes.set_title(f"{method}: {len(removed)} removed", fontsize=8)
        axes.tick_params(labelsize=5)
        axes.xaxis.label.set_fontsize(7)
        axes.yaxis.label.set_fontsize(7)
    return figure


def tied_heads(model: Mapping[str, Any]) -> Figure:
    """How one entry of the mask stands for a head in every layer that shares its weights."""
    sites = [SiteInfo.from_json(site) for site in model["sites"]]
    shared = next(place for place, site in enumerate(sites) if site.applications > 1)
    layers, head = sites[shared].applications, sites[shared].units // 3
    cells = mask_cells({**model, "removed": []}, [Unit(shared, head)])
    figure = Figure(figsize=(2.2 + 0.42 * cells.shape[1], 1.4 + 0.3 * cells.shape[0]), layout="constrained")
    axes = figure.add_subplot()
    draw_mask(axes, cells, mask_rows(model), linewidth=1)
    top = sum(site.applications for site in sites[:shared])
    axes.add_patch(Rectangle((head, top), 1, layers, fill=False, edgecolor=ACCENT, linewidth=2))
    axes.set_title(f"One mask entry is head {head} in {layers} layers at once")
    return figure


def drift(comparison: Comparison) -> Figure | None:
    """Kendall's tau between the first scores and those after n removals; None where no method scores again."""
    walks = {method: drifts(runs) for method, runs in comparison.curves.items()}
    if not any(walks.values()):
        return None
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for method, look in styles(list(comparison.curves)).items():
        if walks[method]:
            shortest = min(len(walk) for walk in walks[method])
            heads = [gone for gone, _ in walks[method][0][:shortest]]
            taus = np.array([[tau for _, tau in walk[:shortest]] for walk in walks[method]])
            axes.fill_between(heads, taus.min(0), taus.max(0), color=look["color"], alpha=0.13, linewidth=0)
            axes.plot(heads, taus.mean(0), label=method, **look)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.set(xlabel="Heads removed", ylabel="Kendall's tau with the first scores", ylim=(-1.05, 1.05))
    axes.grid(color=LIGHT)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(figure, axes, "method")
    return figure


def gradient_change_figure(changes: Sequence[Matrix], head: Unit, sites: Sequence[SiteInfo]) -> Figure:
    """The pooled differences, one panel for each layer: any colour but white is a gradient that changed.

    A layer without heads has no gradient, (0, columns), and an empty panel.
    """
    names = layer_names(sites)
    columns = min(len(changes), 4)
    rows = -(-len(changes) // columns)
    figure = Figure(figsize=(2.3 * columns + 0.8, 2.3 * rows + 0.5), layout="constrained")
    limit = max(float(np.abs(change).max(initial=0)) for change in changes) or 1.0
    panels = []
    for place, change in enumerate(changes):
        axes = figure.add_subplot(rows, columns, place + 1)
        panels.append(axes)
        axes.set(xticks=[], yticks=[], aspect="equal")
        axes.set_xlabel("columns of Q", fontsize=7)
        axes.set_ylabel("rows of Q", fontsize=7)
        if not change.size:
            axes.set_title(f"layer {names[place]} (no head)", fontsize=8)
            continue
        axes.set_title(f"layer {names[place]}" + (" (head removed here)" if place == head.site else ""), fontsize=8)
        picture = axes.pcolormesh(change, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axes.invert_yaxis()
    figure.colorbar(picture, ax=panels, shrink=0.7, label="G' - G")
    title = f"Change of the Q gradients when {unit_name(sites, head)} is removed (means over blocks of the head size)"
    figure.suptitle(title, fontsize=9)
    return figure


def _values(comparison: Comparison, method: str) -> tuple[Any, Any]:
    """Heads removed, or the per cent of the cost left, (points,), and the quality of each run there, (runs, points)."""
    walks, measure = comparison.curves[method], comparison.measure
    if comparison.joint:
        left, values = aligned([work_curve(walk, measure, _part(comparison)) for walk in walks])
        return np.array(left), values
    heads = np.array([gone for gone, _ in curve(walks[0], measure)])
    return heads, np.array([[quality for _, quality in curve(walk, measure)] for walk in walks])


def mean_curve(comparison: Comparison, method: str) -> tuple[Any, Any]:
    """The line of a method: where its points are, and the mean of its runs there."""
    across, values = _values(comparison, method)
    return across, values.mean(0)


def _part(comparison: Comparison) -> str:
    return cost_part(walk for walks in comparison.curves.values() for walk in walks)


def _random_of(comparison: Comparison) -> str | None:
    """The method whose many trajectories are shown as boxes, if it was compared."""
    return next((name for name in RANDOMS if name in comparison.curves), None)


def _least_left(comparison: Comparison) -> float:
    """The per cent of the cost where the curves end."""
    return float(min(_values(comparison, method)[0].min() for method in comparison.curves))


def _legend(figure: Figure, axes: Axes, title: str) -> None:
    """The legend: inside the axes, or beside them where it would hide the lines."""
    lines, names = axes.get_legend_handles_labels()
    if len(lines) < 8:
        axes.legend(frameon=False, fontsize=8, title=title)
    else:
        figure.set_size_inches(10, max(4.8, 0.25 * len(lines)))
        figure.legend(lines, names, loc="outside right center", frameon=False, fontsize=8, title=title)


def _plot_axes(axes: Axes, comparison: Comparison) -> Axes:
    axes.set_ylabel(measure_title(comparison.measure))
    if comparison.joint:
        axes.set(xlabel=axis_title(_part(comparison)), xlim=(102, _least_left(comparison) - 2))
    else:
        axes.set(xlabel="Heads removed", xlim=(0, comparison.heads))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=LIGHT)
    return axes
