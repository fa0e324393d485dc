"""One self-contained HTML page of a run, a comparison or several runs, from the journals alone."""

from __future__ import annotations

import base64
import json
import os
import shlex
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from greedy_gnorm.comparison.analysis import LEGEND
from greedy_gnorm.errors import RunFolderError
from greedy_gnorm.phases import phase
from greedy_gnorm.pruning.curves import knee_of
from greedy_gnorm.pruning.methods import RANDOMS
from greedy_gnorm.records.files import write_text, writing_to
from greedy_gnorm.report import charts, page_tables, record, verdict
from greedy_gnorm.report.choices import choice_columns, choice_rows
from greedy_gnorm.report.compression import axis_title, counted, head_places, scores_of_heads
from greedy_gnorm.report.looks import FEWEST_POINTS, colour_of, looks
from greedy_gnorm.report.page import Page, PageRun, read_page
from greedy_gnorm.report.tables import in_words, measure_title
from greedy_gnorm.units import Unit, layer_names, unit_names

NAME = "report.html"
SCORE_BYTES = 2_000_000  # of score matrices in a page: 8 MB less plotly's 5 and room for the rest
SECONDS_BETWEEN = 2.0


def write_report(folders: Sequence[str | Path], out: str | Path | None = None, *, live: bool = False) -> Path:
    """Write the page of a run, a comparison, or several runs; a live page reloads itself.

    Without `out` it is report.html in the folder, or in the common parent of several folders.
    """
    paths = [Path(folder) for folder in folders]
    page = read_page(paths)
    home = paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.resolve() for path in paths]))
    path = Path(out) if out is not None else home / NAME
    with phase("Writing the report"):
        content = render(page, live=live)
        with writing_to(path):
            write_text(path, content)
    return path


class LiveReport:
    """Writes a run's page again after new steps, but not so often that it slows the run down."""

    def __init__(self, folder: Path, *, on: bool = True) -> None:
        self.folder = folder
        self.on = on
        self.next = 0.0

    def __enter__(self) -> LiveReport:
        return self

    def __exit__(self, *error: Any) -> None:
        if self.next and error[0] is not None:  # a run that ends normally writes its page itself
            self._write(live=False)

    def __call__(self, *_: Any) -> None:
        start = time.monotonic()
        if self.on and start >= self.next:
            self._write(live=True)
            took = time.monotonic() - start
            self.next = start + max(SECONDS_BETWEEN, 10 * took)

    def _write(self, *, live: bool) -> None:
        try:
            write_report([self.folder], live=live)
        except RunFolderError as error:  # no reason to stop the run
            warnings.warn(str(error), stacklevel=2)


def render(page: Page, *, live: bool = False) -> str:
    """The page as text."""
    several, run = len(page.runs) > 1, page.best
    shown, rows = _charts(page), [] if several or not run.choices else choice_rows(run, page.measure)
    content = {
        "charts": shown,
        "walks": list(_walks(page)),
        "first": page.runs.index(run),
        "measures": [
            {
                "name": each.name,
                "plain": measure_title(each),
                "title": charts.safe(measure_title(each)),
                "higher": each.higher_is_better,
            }
            for each in page.measures
        ],
    }
    template = _environment().get_template("report.html.j2")
    return template.render(
        page=page,
        run=run,
        several=several,
        live=live,
        shown=shown,
        measure=measure_title(page.measure),
        verdict=verdict.verdict(page),
        figures=list(verdict.figures(page)),
        choices=rows,
        choice_columns=choice_columns(run, page.measure),
        commands={row.step: row.command(run.journal.folder) for row in rows},
        tests=page_tables.tests(page),
        tables=page_tables.comparison(page),
        legend=LEGEND if page.experiment is not None else None,
        latency=page_tables.latency(page),
        sizes=None if several else page_tables.sizes(run),
        predictions=run.predictions and page_tables.Predictions.of(run.predictions),
        boxes=[name for name in RANDOMS if len(page.curves.get(name, [])) >= charts.ENOUGH_FOR_BOXES],
        steps=None if several else page_tables.step_table(run),
        lines={name: look.for_svg for name, look in looks(list(page.curves)).items()},
        seconds=sum(sum(step.seconds.values()) for each in page.runs for step in each.steps),
        details=record.details(page),
        command=record.command(page),
        content=embedded(content),
        style=_file("report.css"),
        script=_file("explorer.js") + _file("page.js"),
        plotly=_plotly(),
    )


def _charts(page: Page) -> dict[str, charts.Chart]:
    """The charts of a page by the names that its template gives them."""
    shown = charts.explorer(page.measure)
    if "heads" not in page.kinds:
        del shown["mask"], shown["scores"]
    if page.joint:
        shown |= {f"kept-{words}": charts.kept_bars(words) for words in page.kinds}
        shown["curve"]["layout"]["xaxis"] = {"title": {"text": axis_title(page.part)}, "autorange": "reversed"}
    if len(page.runs) > 1:
        against = charts.against_cost if page.joint else charts.against_heads
        shown["comparison"] = against(page.curves, page.measure)
        shown["comparison-parameters"] = charts.against_parameters(page.curves, page.measure, joint=page.joint)
        shown["time"] = charts.time_by_method(page.curves)
    else:
        shown["time"] = charts.time_by_step(page.runs[0].steps)
        if len(points := verdict.speeds(page.runs[0], page.measure)) >= FEWEST_POINTS:
            shown["speed"] = charts.against_speed(points, page.measure, colour_of(page.runs[0].line))
    if not page.joint and (stale := charts.drift(page.curves)):
        shown["drift"] = stale
    return shown


def embedded(content: Any) -> Markup:
    """JSON for a script element: no text in it can end the element or open a comment."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("greedy_gnorm.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["words"] = lambda name: in_words(str(name))
    environment.tests["worse"] = lambda cell: isinstance(cell, page_tables.Worse)
    return environment


@cache
def _file(name: str) -> Markup:
    return Markup((resources.files("greedy_gnorm.report") / "templates" / name).read_text(encoding="utf-8"))


@cache
def _plotly() -> Markup:
    return Markup(get_plotlyjs())


def _walks(page: Page) -> Iterator[dict[str, Any]]:
    """Every run as the script reads it; with scores as long as they fit, the first run of each line first."""
    firsts = {run.line: run for run in reversed(page.runs)}
    packed, room = {}, SCORE_BYTES
    for run in sorted(page.runs, key=lambda run: run is not firsts[run.line]):
        scores = _scores(run)
        if scores and len(scores["values"]) <= room:
            packed[id(run)] = scores
            room -= len(scores["values"])
    looked = looks(list(page.curves))
    for run in page.runs:
        own = head_places(run.sites)
        sites = [run.sites[place] for place in own]
        starts = dict(zip(own, np.cumsum([0, *(site.units for site in sites)]).tolist(), strict=False))
        yield {
            "label": run.label,
            "rows": [
                {"name": name, "units": site.units, "applications": site.applications}
                for name, site in zip(layer_names(sites), sites, strict=True)
            ],
            "names": unit_names(sites),
            "gone": _numbers(starts, [Unit(*unit) for unit in run.journal.header["model"]["removed"]]),
            "removed": [_numbers(starts, step.removed) for step in run.steps],
            "qualities": {each.name: [round(each.of(step), 6) for step in run.steps] for each in page.measures},
            "parameters": [step.parameters for step in run.steps],
            "bytes": [step.bytes for step in run.steps],
            "multiplications": _multiplications(run),
            "speeds": [speed and [round(speed.times, 4), speed.is_measured] for speed in run.speeds],
            "precision": run.precision.name,
            "colour": looked[run.line].colour,
            "knee": None if run.is_compression else knee_of(run.steps, page.measure),
            "kept": _kept(run, page) if page.joint else None,
            "solution": run.solution,
            "scores": packed.get(id(run)),
            "scored": any(step.scores is not None for step in run.steps),
            "folder": shlex.quote(str(run.journal.folder)),
            "out": shlex.quote(f"{run.journal.folder}-step-"),
        }


def _multiplications(run: PageRun) -> list[int | None] | None:
    """The multiplications after each step, if the run counted them."""
    counts = [step.cost.multiplications for step in run.steps]
    return counts if any(counts) else None


def _numbers(starts: Mapping[int, int], units: Sequence[Unit]) -> list[int]:
    """The numbers of heads, counted through the sites that have a start; neurons are left out."""
    return [starts[unit.site] + unit.index for unit in units if unit.site in starts]


def _kept(run: PageRun, page: Page) -> dict[str, Any]:
    """The units and the cost that are left after each step; neurons are only counted."""
    kinds = run.kept
    return {
        "kinds": [
            {"words": kept.words, "layers": kept.layers, "totals": kept.totals, "left": kept.left} for kept in kinds
        ],
        "counted": [counted(kinds, step.step) for step in run.steps],
        "work": [round(left, 3) for left in page.work(run)],
    }


def _scores(run: PageRun) -> dict[str, Any] | None:
    """The distinct scores of heads as float32, and which of them each step used; as powers of ten if they are logs.

    The scores of all layers follow one another, whatever their number in each.
    """
    matrices: list[Any] = []
    places: list[int] = []
    logs = False
    sites = run.sites
    if not head_places(sites):
        return None
    for step in run.steps:
        if step.scores is not None:
            logs = step.scores.logs is not None
            keys = np.concatenate(list(scores_of_heads(step.scores, sites).keys)) / (np.log(10) if logs else 1.0)
            there = ~np.isnan(keys)
            if not matrices or not np.array_equal(matrices[-1][there], keys[there]):
                matrices.append(keys)
        places.append(len(matrices) - 1)
    if not matrices:
        return None
    values = np.array(matrices, dtype="<f4")
    finite = values[np.isfinite(values)]
    low, high = np.percentile(finite, [1, 99]).tolist() if finite.size else (0.0, 1.0)
    return {
        "values": base64.b64encode(values.tobytes()).decode(),
        "places": [max(place, 0) for place in places],
        "logs": logs,
        "range": [low, high if high > low else low + 1],
    }
