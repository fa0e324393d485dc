"""Charts of the report page (plotly). The page sets the colours of paper and ink, for light and dark."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from greedy_gnorm.comparison.analysis import drifts
from greedy_gnorm.pruning.curves import Points, Walk, curve
from greedy_gnorm.pruning.methods import RANDOM, RANDOMS
from greedy_gnorm.report.compression import aligned, axis_title, cost_part, work_curve
from greedy_gnorm.report.looks import ACCENT, COLOURS, DARK, LIGHT, MUTED, looks
from greedy_gnorm.report.tables import measure_title
from greedy_gnorm.units import Measure, removed_by

Chart = dict[str, Any]
Curves = Mapping[str, Sequence[Walk]]

BOXES = 25
ENOUGH_FOR_BOXES = 5
KINDS = {"score": "Scoring", "evaluate": "Evaluating", "remove": "Removing", "recover": "Fitting"}
"""What time is spent on; every run does the first three."""


def safe(text: str) -> str:
    """Text for a chart, whose labels read mark-up."""
    return html.escape(text, quote=False)


def line_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A line for each method, the same in every chart; a flagship comes first and is drawn strongest."""
    return {name: look.for_plotly for name, look in looks(names).items()}


def explorer(measure: Measure) -> dict[str, Chart]:
    """The charts that follow the slider; the page's script fills them with the run that is shown.

    Its colours are those of light paper: the script sets those of the page.
    """
    cell = {"hovertemplate": "%{text}<extra></extra>", "x": [], "y": [], "z": [], "text": [], "xgap": 2, "ygap": 2}
    mark = {"mode": "markers", "x": [], "y": [], "hoverinfo": "skip"}
    cross = {"symbol": "x", "size": 11, "color": ACCENT, "line": {"color": "white", "width": 1.5}}
    cursor = {"symbol": "square-open", "size": 20, "color": COLOURS[5], "line": {"width": 3}}
    mask = [
        go.Heatmap(**cell, colorscale=[[0, LIGHT], [1, DARK]], zmin=0, zmax=1, showscale=False),
        go.Scatter(**mark, marker=cross),
        go.Scatter(**mark, marker=cursor),
    ]
    scores = [
        go.Heatmap(**cell, colorscale="Cividis", colorbar={"thickness": 10, "outlinewidth": 0, "len": 1}),
        go.Scatter(**mark, marker=cross),
    ]
    cells = {"xaxis": {"title": {"text": "Head"}}, "yaxis": {"autorange": "reversed"}, "height": 320}
    return {
        "mask": _chart(mask, **cells),
        "scores": _chart(scores, **cells),
        "curve": _followed(measure, "Heads removed"),
        "parameters": _followed(measure, "Parameters", autorange="reversed"),
    }


def kept_bars(words: str) -> Chart:
    """The units of one kind that each layer has left; the page's script fills it and sets the colours."""
    bar = {"orientation": "h", "x": [], "y": [], "hovertemplate": "%{hovertext}<extra></extra>"}
    inside = {
        "textposition": "inside",
        "insidetextanchor": "start",
        "textangle": 0,
        "textfont": {"color": "#ffffff", "size": 12},
    }
    traces = [go.Bar(**bar, **inside, meta=name, marker={"line": {"width": 0}}) for name in ("kept", "removed")]
    return _chart(
        traces, barmode="stack", bargap=0.25, uniformtext={"mode": "hide", "minsize": 9},
        margin={"l": 56, "r": 16, "t": 8, "b": 46},
        xaxis={"title": {"text": words.capitalize()}, "tickformat": ","},
        yaxis={"autorange": "reversed", "type": "category", "title": {"text": "Layer"}},
    )  # fmt: skip


def _followed(measure: Measure, title: str, **axis: Any) -> Chart:
    """A line, its level at the start, the knee, the solution, and the step of the slider."""
    hover = "%{y:.4f} at %{x:,}<extra></extra>"
    traces = [
        go.Scatter(mode="lines", line={"color": MUTED, "dash": "dash", "width": 1}, name="unpruned", hoverinfo="skip"),
        go.Scatter(mode="lines", line={"color": COLOURS[0], "width": 2.5}, hovertemplate=hover, showlegend=False),
        go.Scatter(mode="markers", marker={"symbol": "diamond", "size": 17, "color": COLOURS[5]}, name="knee"),
        go.Scatter(mode="markers", marker={"symbol": "star", "size": 12, "color": COLOURS[2]}, name="solution"),
        go.Scatter(
            mode="markers", name="this step",
            marker={"size": 21, "symbol": "circle-open", "color": ACCENT, "line": {"width": 3}},
        ),
    ]  # fmt: skip
    return _chart(
        traces, showlegend=True, hoverdistance=-1,  # a click anywhere takes the nearest point
        xaxis={"title": {"text": title}, **axis}, yaxis={"title": {"text": _title(measure)}},
    )  # fmt: skip


def against_heads(curves: Curves, measure: Measure) -> Chart:
    """Quality against heads removed: one line for each method, a band over its runs, boxes for random trajectories."""
    traces: list[Any] = []
    boxes = RANDOM in curves and len(curves) > 1 and len(curves[RANDOM]) >= ENOUGH_FOR_BOXES
    for name, look in line_styles(list(curves)).items():
        if name == RANDOM and boxes:
            traces += _boxes([curve(walk, measure) for walk in curves[name]], name, look)
        else:
            traces += _band([curve(walk, measure) for walk in curves[name]], name, look)
    level = measure.of(next(iter(curves.values()))[0][0])
    end = max(len(removed_by(walk)) for walks in curves.values() for walk in walks)
    unpruned = {"color": MUTED, "dash": "dash", "width": 1}
    traces.append(go.Scatter(x=[0, end], y=[level, level], mode="lines", line=unpruned, hoverinfo="skip"))
    return _chart(
        traces, height=440, xaxis={"title": {"text": "Heads removed"}}, yaxis={"title": {"text": _title(measure)}}
    )


def against_cost(curves: Curves, measure: Measure) -> Chart:
    """Quality against the cost that is left, in per cent: the same for runs towards a budget, from left to right."""
    part = cost_part(walk for walks in curves.values() for walk in walks)
    traces: list[Any] = []
    for name, look in line_styles(list(curves)).items():
        walks = _on_one_axis([work_curve(walk, measure, part) for walk in curves[name]])
        boxes = name in RANDOMS and len(curves) > 1 and len(walks) >= ENOUGH_FOR_BOXES
        traces += (_boxes if boxes else _band)(walks, name, look)
    level = measure.of(next(iter(curves.values()))[0][0])
    end = min(min(trace.x) for trace in traces)
    unpruned = {"color": MUTED, "dash": "dash", "width": 1}
    traces.append(go.Scatter(x=[100, end], y=[level, level], mode="lines", line=unpruned, hoverinfo="skip"))
    return _chart(
        traces,
        height=440,
        xaxis={"title": {"text": axis_title(part)}, "autorange": "reversed"},
        yaxis={"title": {"text": _title(measure)}},
    )


def _on_one_axis(walks: Sequence[Points]) -> list[Points]:
    """The same curves at the places of the first of them."""
    across, values = aligned(walks)
    return [list(zip(_rounded(across, 3), row, strict=True)) for row in values.tolist()]


def _boxes(walks: Sequence[Points], name: str, look: Mapping[str, Any]) -> list[Any]:
    """A box over the trajectories at some of the steps."""
    points = np.array(walks)  # (trajectories, steps, 2)
    stride = max(1, round(points.shape[1] / BOXES))
    across, values = points[0, ::stride, 0], points[:, ::stride, 1]
    width = 0.6 * float(np.abs(np.diff(across)).min()) if len(across) > 1 else 0.6
    return [
        go.Box(
            x=np.repeat(across, len(walks)).tolist(), y=_rounded(values.T.ravel()), width=width, name=safe(name),
            meta=name, marker={"color": look["color"], "size": 3}, line={"width": 1}, hoverinfo="x+y",
        )
    ]  # fmt: skip


def against_parameters(curves: Curves, measure: Measure, *, joint: bool = False) -> Chart:
    """Quality against the parameters that are left, one line for each method.

    The runs of `joint` methods have different numbers of parameters after the same round.
    """
    traces: list[Any] = []
    for name, look in line_styles(list(curves)).items():
        walks = [[(float(step.parameters), measure.of(step)) for step in walk] for walk in curves[name]]
        traces += _band(_on_one_axis(walks) if joint else walks, name, look)
    return _chart(
        traces,
        xaxis={"title": {"text": "Parameters"}, "autorange": "reversed"},
        yaxis={"title": {"text": _title(measure)}},
    )


def drift(curves: Curves) -> Chart | None:
    """Kendall's tau between the first scores and those after n removals; None where no method scores again."""
    traces: list[Any] = []
    for name, look in line_styles(list(curves)).items():
        traces += _band(drifts(curves[name]), name, look)
    if not traces:
        return None
    return _chart(
        traces,
        xaxis={"title": {"text": "Heads removed"}},
        yaxis={"title": {"text": "Kendall's tau"}, "range": [-1.05, 1.05]},
    )


def time_by_step(walk: Walk) -> Chart:
    """Seconds of each step, by what they were spent on."""
    steps = [step.step for step in walk]
    traces = [
        go.Bar(x=steps, y=_rounded([step.seconds.get(kind, 0.0) for step in walk], 3), **look)
        for kind, look in _kinds("%{y:.2f} s", [walk])
    ]
    axes = {"xaxis": {"title": {"text": "Step"}}, "yaxis": {"title": {"text": "Seconds"}}}
    return _chart(traces, showlegend=True, barmode="stack", bargap=0.1, **axes)


def time_by_method(curves: Curves) -> Chart:
    """Seconds of all runs of each method, by what they were spent on."""
    names = [safe(name) for name in curves]
    traces = []
    for kind, look in _kinds("%{x:.1f} s", [walk for walks in curves.values() for walk in walks]):
        seconds = [sum(step.seconds.get(kind, 0.0) for walk in walks for step in walk) for walks in curves.values()]
        traces.append(go.Bar(x=_rounded(seconds, 2), y=names, orientation="h", **look))
    down = {"title": {"text": "Method"}, "autorange": "reversed", "automargin": True}
    axes = {"xaxis": {"title": {"text": "Seconds"}}, "yaxis": down}
    return _chart(traces, showlegend=True, barmode="stack", height=130 + 34 * len(names), **axes)


def _kinds(hover: str, walks: Sequence[Walk]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What these runs spend time on, each with its style."""
    fitted = any("recover" in step.seconds for walk in walks for step in walk)
    for place, (kind, name) in enumerate(KINDS.items()):
        if kind == "recover" and not fitted:
            continue
        marker = {"color": COLOURS[place], "line": {"width": 0}}
        yield kind, {"name": name, "marker": marker, "hovertemplate": f"%{{fullData.name}}: {hover}<extra></extra>"}


def against_speed(points: Sequence[tuple[str, float, float, str]], measure: Measure, colour: str) -> Chart:
    """Quality against measured speed, (name, times faster, quality, what it is): the unpruned model comes first.

    Every model was timed in turn with the unpruned one, so that their ratio is what can be compared.
    """
    ordered = sorted(points, key=lambda point: point[1])
    names, speeds, values, texts = zip(*ordered, strict=True)
    symbols = [{"unpruned": "circle-open", "solution": "star"}.get(name, "circle") for name in names]
    places = [("top center", "bottom center")[place % 2] for place in range(len(names))]  # close labels stay apart
    marks = go.Scatter(
        x=_rounded(speeds, 3), y=_rounded(values), mode="markers+text", text=[safe(name) for name in names],
        textposition=places, customdata=[safe(text) for text in texts], cliponaxis=False,
        marker={"color": colour, "size": 11, "symbol": symbols},
        hovertemplate="%{text}: %{y:.4f}, %{x:.2f} times as fast (%{customdata})<extra></extra>",
    )  # fmt: skip
    return _chart(
        [marks],
        margin={"l": 64, "r": 40, "t": 36, "b": 52},
        xaxis={"title": {"text": "Measured speed (unpruned = 1)"}},
        yaxis={"title": {"text": _title(measure)}},
    )


def _band(walks: Sequence[Sequence[tuple[float, float]]], name: str, look: Mapping[str, Any]) -> list[Any]:
    """The mean of the runs as a line, and a band from the lowest to the highest where there are several.

    `meta` is the plain name, by which the page switches methods on and off.
    """
    if not walks:
        return []
    points = np.array([walk[: min(map(len, walks))] for walk in walks], dtype=float)  # (runs, points, 2)
    x, values = points[0, :, 0].tolist(), points[:, :, 1]
    low, high, mean = (_rounded(side) for side in (values.min(0), values.max(0), values.mean(0)))
    line = go.Scatter(
        x=x, y=mean, mode="lines", line=dict(look), name=safe(name), meta=name,
        hovertemplate="%{fullData.name}: %{y:.4f} at %{x:,}<extra></extra>",
    )  # fmt: skip
    if len(walks) == 1:
        return [line]
    band = go.Scatter(
        x=[*x, *reversed(x)], y=[*high, *reversed(low)], fill="toself", mode="none", fillcolor=_faint(look["color"]),
        hoverinfo="skip", meta=name,
    )  # fmt: skip
    return [band, line]


def _chart(traces: Sequence[Any], **layout: Any) -> Chart:
    """Plain values for the page; the page's script adds the colours of text and grid."""
    style = {
        "showlegend": False,
        "height": 360,
        "margin": {"l": 64, "r": 16, "t": 16, "b": 52},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "itemclick": "toggle"},
        "hoverlabel": {"align": "left"},
        "dragmode": False,
    }
    chart: Chart = go.Figure(list(traces), {**style, **layout}).to_plotly_json()
    del chart["layout"]["template"]
    return chart


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def _rounded(values: Any, digits: int = 6) -> list[float]:
    return [round(float(value), digits) for value in values]


def _title(measure: Measure) -> str:
    return safe(measure_title(measure))
