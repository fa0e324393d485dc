"""What a report page says in words and tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from greedy_gnorm.comparison.analysis import Comparison, knee_heads, solutions_table, summary_table
from greedy_gnorm.pruning.run import units_at_start
from greedy_gnorm.records import compact
from greedy_gnorm.report.page import Page, PageRun
from greedy_gnorm.report.tables import measure_title, megabytes
from greedy_gnorm.settings import Settings
from greedy_gnorm.units import Measure, SiteInfo, removed_by, unit_name

Table = tuple[str, list[str], list[list[str]]]
"""Title, columns and cells."""


def latencies(page: Page) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Each measurement with (milliseconds, quality) before and at the solution."""
    for run in page.runs:
        for row in run.latency:
            before, after = (run.steps[place].quality[page.quality] for place in (0, run.solution or 0))
            prefix = f"{run.label}: " if len(page.runs) > 1 else ""
            yield f"{prefix}{_measurement(row)}", [(row["before_ms"], before), (row["after_ms"], after)]


def _measurement(row: dict[str, Any]) -> str:
    threads = f"{row['threads']} thread{'s' if row['threads'] != 1 else ''}"
    return f"{row['runtime']}, batch {row['batch']}, {row['tokens']} tokens, {threads}"


def top(page: Page) -> dict[str, Any]:
    """The sentence at the top and the four figures: of the chosen step, or of the last one while unfinished."""
    run = page.best
    steps = run.steps
    chosen = steps[-1 if run.solution is None else run.solution]
    total = units_at_start(run.journal.header)
    gone = len(removed_by(steps[: chosen.step + 1]))
    before, after = (step.quality[page.quality] for step in (steps[0], chosen))
    speed = run.latency[0] if run.latency else None
    return {
        "run": run,
        "removed": gone,
        "total": total,
        "share": f"{gone / total:.0%}",
        "before": f"{before:.4f}",
        "after": f"{after:.4f}",
        "change": f"{after - before:+.4f}",
        "sizes": [megabytes(step.bytes) for step in (steps[0], chosen)],
        "precision": run.precision.name,
        "smaller": f"{chosen.bytes / steps[0].bytes - 1:+.1%}",
        "parameters": [f"{step.parameters:,}" for step in (steps[0], chosen)],
        "speed": speed and {
            "before": f"{speed['before_ms']:.1f}",
            "after": f"{speed['after_ms']:.1f}",
            "times": f"{speed['before_ms'] / speed['after_ms']:.2f}",
            "how": _measurement(speed),
        },
        "reason": steps[-1].stop,
        "steps": len(steps) - 1,
        "seconds": sum(sum(step.seconds.values()) for each in page.runs for step in each.steps),
        "method": run.journal.header["config"]["method"],
    }  # fmt: skip


def tables(page: Page) -> list[Table]:
    """The tables of a comparison or of several runs, or the measured speed of one run."""
    if page.experiment is not None:
        comparison = Comparison(page.header, page.curves)
        return [
            (
                f"{measure_title(page.measure)} by share of heads removed (mean ± standard deviation over runs; "
                "* marks the best)",
                *summary_table(comparison),
            ),
            (
                "At the knee of the curve (sizes as float32; mean ± standard deviation over runs; * marks the best)",
                *solutions_table(comparison),
            ),
        ]
    if len(page.runs) > 1:
        return [("The runs", _run_columns(page.quality), [_run_row(run, page.measure) for run in page.runs])]
    rows = [
        [
            _measurement(row),
            *(f"{row[side]:.2f}" for side in ("before_ms", "after_ms")),
            f"{row['before_ms'] / row['after_ms']:.2f}",
        ]
        for row in page.runs[0].latency
    ]
    columns = ["measured with", "before", "after", "times faster"]
    return [("Measured speed in milliseconds per batch", columns, rows)] if rows else []


def _run_columns(quality: str) -> list[str]:
    """The columns of the table of several runs, which may be stored in different precisions."""
    sides = [f"{name} {side}" for name in (quality, "MB") for side in ("before", "after")]
    return ["run", "heads", "removed", *sides, "stored as", "heads gone at the knee", "ended"]


def _run_row(run: PageRun, measure: Measure) -> list[str]:
    chosen = run.steps[-1 if run.solution is None else run.solution]
    sides = (run.steps[0], chosen)
    return [
        run.label,
        str(units_at_start(run.journal.header)),
        str(len(removed_by(run.steps[: chosen.step + 1]))),
        *(f"{measure.of(step):.4f}" for step in sides),
        *(megabytes(step.bytes) for step in sides),
        run.precision.name,
        str(knee_heads(run.steps, measure)),
        run.steps[-1].stop or "unfinished",
    ]


def step_table(run: PageRun) -> Table:
    """Every step, with everything that was measured."""
    cells, gone, sites = [], 0, run.sites
    for step in run.steps:
        gone += len(step.removed)
        cells.append(
            [
                str(step.step),
                str(gone),
                ", ".join(unit_name(sites, unit) for unit in step.removed) or "-",
                *(f"{value:.4f}" for value in step.quality.values()),
                f"{step.parameters:,}",
                megabytes(step.bytes),
                f"{sum(step.seconds.values()):.2f}",
            ]
        )
    size = f"MB ({run.precision.name})"
    columns = ["step", "heads gone", "removed", *run.steps[0].quality, "parameters", size, "seconds"]
    return f"{len(run.steps) - 1} steps as a table", columns, cells


def details(page: Page) -> list[tuple[str, list[tuple[str, str]]]]:
    """Model, rows, settings and versions, in groups of names and values."""
    header = page.header
    model, config = header["model"], header["config"]
    groups = [
        (
            "Model",
            [
                ("name", model["name"]),
                ("type", model["type"]),
                ("attention", _attention([SiteInfo.from_json(site) for site in model["sites"]])),
                ("parameters", f"{model['parameters']:,}"),
                ("stored as", page.runs[0].precision.name),
                ("fingerprint of the weights", model["weights"]),
            ],
        )
    ]
    for part, rows in page.runs[0].journal.header["data"].items():
        facts = [("source", rows["source"]), ("rows", f"{rows['rows']:,} in {rows['batches']} batches")]
        facts += [("truncated", f"{rows['truncated']} rows")] if rows["truncated"] else []
        groups.append((f"Rows for {part}", [*facts, ("fingerprint", rows["fingerprint"])]))
    settings = {name: value for name, value in config.items() if value is not None and value != []}
    if page.experiment is not None:
        settings = {**{name: header[name] for name in ("methods", "runs", "trajectories")}, **settings}
        settings = {name: value for name, value in settings.items() if name not in ("method", "objective")}
    groups.append(("Settings", [(name.replace("_", " "), _plain(name, value)) for name, value in settings.items()]))
    how = [(name, header[name]) for name in ("processes", "threads", "started") if name in header]
    groups.append(("Versions", [*header["versions"].items(), *how]))
    return groups


def _attention(sites: list[SiteInfo]) -> str:
    """`12 layers of 12 heads`; the smallest and the largest number where layers differ."""
    layers = [sum(site.units for site in sites if site.layer == layer) for layer in sorted({s.layer for s in sites})]
    counts, shared = sorted(set(layers)), max(site.applications for site in sites)
    heads = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    text = f"{len(layers)} layer{'s' if len(layers) > 1 else ''} of {heads} heads"
    return text + (f", each applied {shared} times" if shared > 1 else "")


def _plain(name: str, value: Any) -> str:
    if name in compact.FORMS:
        return compact.write(name, value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def command(page: Page) -> str | None:
    """The command that repeats the run or comparison; None for objects in memory and for several runs."""
    header = page.header
    data = page.runs[0].journal.header["data"]
    if header["model"].get("in_memory") or any(part.get("in_memory") for part in data.values()):
        return None
    if page.experiment is None and len(page.runs) > 1:
        return None
    scoring, evaluation = (data[part]["source"] for part in ("scoring", "evaluation"))
    words = ["gnorm", "prune" if page.experiment is None else "compare", header["model"]["name"], "--data", scoring]
    if evaluation != scoring:
        words += ["--eval-data", evaluation]
    if page.experiment is not None:
        words += ["--methods", ",".join(header["methods"])]
        words += ["--runs", str(header["runs"]), "--trajectories", str(header["trajectories"])]
        objectives = {run.journal.header["config"]["objective"] for run in page.runs}
        words += _options(header["config"], {"method", "stop"} | ({"objective"} if len(objectives) > 1 else set()))
    else:
        words += _options(header["config"], set())
    return shlex.join([*words, "--out", "AGAIN"])


def _options(config: dict[str, Any], without: set[str]) -> Iterator[str]:
    """The settings that are not the defaults, as on the command line."""
    for name, default in Settings().to_json().items():
        value = config.get(name, default)
        if name in without or value == default:
            continue
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            yield option
        elif name in compact.FORMS:
            yield from (option, compact.write(name, value))
        else:
            for each in value if isinstance(value, list) else [0 if value is None else value]:
                yield from (option, str(each))
