"""What a report page says in words and tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from greedy_gnorm.comparison.analysis import LEGEND, Comparison, knee_heads
from greedy_gnorm.pruning.methods import JOINT, METHODS
from greedy_gnorm.pruning.run import units_at_start
from greedy_gnorm.records import compact
from greedy_gnorm.records.header import sources_of
from greedy_gnorm.report.compression import COMPRESS, axis_title, counted, take_command
from greedy_gnorm.report.page import Page, PageRun
from greedy_gnorm.report.tables import choices_table, comparison_tables, measure_title, megabytes, test_table
from greedy_gnorm.scores import SCORES
from greedy_gnorm.settings import COMPARING, COMPRESSING, PRUNING, SETTINGS, Settings
from greedy_gnorm.units import ATTENTION, FFN, UNIT_WORDS, Measure, SiteInfo, removed_by, unit_name

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
    chosen = run.summarized
    total = units_at_start(run.journal.header)
    gone = len(removed_by(steps[: chosen.step + 1]))
    before, after = (step.quality[page.quality] for step in (steps[0], chosen))
    speed = run.latency[-1 if run.is_compression else 0] if run.latency else None  # choices are timed like the last
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


def compressed(page: Page) -> dict[str, Any]:
    """What the top says of a run towards a budget: units by kind, the cost left, the quality on test rows."""
    run, name = page.best, page.quality
    chosen = run.summarized
    before, after = run.steps[0].quality[name], chosen.quality[name]
    rows = f"{run.journal.header['data']['evaluation']['rows']:,} rows"
    interval = None
    if run.test is not None and name in run.test["quality"] and run.solution is not None:
        before, after = run.test["quality"][name]
        rows, known = f"{run.test['rows']:,} test rows", run.test["intervals"].get(name)
        interval = known and "{:+.4f} to {:+.4f}".format(*known["change"])
    left = page.work(run)
    work = f"{left[chosen.step]:.0f} %"
    kinds = [(kept.words, kept.gone(chosen.step), kept.total) for kept in run.kept]
    parameters = ("Parameters", f"{chosen.parameters:,}", "", f"from {run.steps[0].parameters:,}")
    return {
        "kinds": [(words, f"{gone:,}", f"{total:,}") for words, gone, total in kinds],
        "work": work,
        "end": f"{left[-1]:.0f} %",
        "part": page.part,
        "before": f"{before:.4f}",
        "after": f"{after:.4f}",
        "rows": rows,
        "interval": interval,
        "figures": [
            *((f"{words.capitalize()} removed", f"{gone:,}", f" of {total:,}", f"{gone / total:.0%} of all {words}")
              for words, gone, total in kinds),
            (measure_title(page.measure), f"{after:.4f}", "", f"from {before:.4f} ({after - before:+.4f}) on {rows}"),
            (f"{page.part.capitalize()} left", work, "", f"{left[0] / left[chosen.step]:.2f} times fewer"),
            (f"Size ({run.precision.name})", megabytes(chosen.bytes), " MB",
             f"from {megabytes(run.steps[0].bytes)} MB ({chosen.bytes / run.steps[0].bytes - 1:+.1%})"),
            *([parameters] if len(kinds) == 1 else []),
        ],
    }  # fmt: skip


def speeds(page: Page) -> list[tuple[str, float, float, str]]:
    """(name, times faster, quality, how long a batch takes) of the choices of a run that were measured.

    The unpruned model comes first; the solution is added where it is none of the choices.
    """
    if len(page.runs) > 1:
        return []
    (run,) = page.runs
    found = [
        (choice.name, choice.measured, choice.quality, f"{choice.milliseconds:.2f} ms")
        for choice in run.choices
        if choice.measured and choice.milliseconds
    ]
    if not found:
        return []
    if run.latency and run.solution and run.solution not in {choice.step for choice in run.choices}:
        last = run.latency[-1]  # of the shape that choices are timed with
        quality = run.steps[run.solution].quality[page.quality]
        found.append(("solution", last["before_ms"] / last["after_ms"], quality, f"{last['after_ms']:.2f} ms"))
    return [("unpruned", 1.0, run.steps[0].quality[page.quality], "the measure of speed"), *found]


def tests(page: Page) -> Table | None:
    """The quality of a run on rows that no decision was made on."""
    (run, *others) = page.runs
    if others or run.test is None:
        return None
    columns, cells = test_table(run.test, page.measure)
    return f"{run.test['rows']:,} test rows, with 95 % intervals", ["measure", *columns[1:]], cells


def choices(page: Page) -> Table | None:
    """The steps of a run that a user may prefer."""
    (run, *others) = page.runs
    if others or not run.choices:
        return None
    columns, cells = choices_table(run.choices, run.steps[0], page.measure)
    rows = f"{run.journal.header['data']['evaluation']['rows']:,}"
    return (
        f"Choices, by {page.quality.replace('_', ' ')} on the {rows} rows that a step is chosen on",
        columns,
        cells,
    )


def take_commands(page: Page) -> list[tuple[str, str]]:
    """The name of each choice of a run, and the command that writes it as a model."""
    (run, *others) = page.runs
    return [] if others else [(choice.name, take_command(run.journal.folder, choice.step)) for choice in run.choices]


def tables(page: Page) -> list[Table]:
    """The tables of a comparison or of several runs, or the measured speed of one run."""
    if page.experiment is not None:
        comparison = Comparison(page.header, page.curves)
        by = "the multiplications left" if comparison.joint else "heads removed"
        titles = {
            "comparison": f"{measure_title(page.measure)} by share of {by}. {LEGEND}",
            "solutions": f"At the knee of the curve, sizes as float32. {LEGEND}",
        }
        return [(titles[name], *table) for name, table in comparison_tables(comparison).items()]
    if len(page.runs) > 1 and page.joint:
        return [("The runs", _joint_columns(page), [_joint_row(run, page) for run in page.runs])]
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


def _joint_columns(page: Page) -> list[str]:
    """The columns of the table of several runs, some of which work towards a budget."""
    sides = [f"{name} {side}" for name in (page.quality, "MB") for side in ("before", "after")]
    gone = [f"{words} removed" for words in page.kinds]
    return ["run", *gone, f"{page.part} left", *sides, "stored as", "ended"]


def _joint_row(run: PageRun, page: Page) -> list[str]:
    chosen, sides = run.summarized, (run.steps[0], run.summarized)
    kinds = {kept.words: f"{kept.gone(chosen.step):,} of {kept.total:,}" for kept in run.kept}
    return [
        run.label,
        *(kinds.get(words, "-") for words in page.kinds),
        f"{page.work(run)[chosen.step]:.1f} %",
        *(f"{page.measure.of(step):.4f}" for step in sides),
        *(megabytes(step.bytes) for step in sides),
        run.precision.name,
        run.steps[-1].stop or "unfinished",
    ]


def step_table(run: PageRun) -> Table:
    """Every step, with everything that was measured."""
    if run.is_compression:
        return _round_table(run)
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


def _round_table(run: PageRun) -> Table:
    """The steps of a run towards a budget: units by number, since a round removes hundreds of them."""
    alone = Page([run])
    kinds, work = run.kept, alone.work(run)
    cells = [
        [
            str(step.step),
            *(f"{kept.gone(step.step):,}" for kept in kinds),
            counted(kinds, step.step) or "-",
            *(f"{value:.4f}" for value in step.quality.values()),
            f"{work[step.step]:.1f}",
            f"{step.parameters:,}",
            megabytes(step.bytes),
            f"{sum(step.seconds.values()):.2f}",
        ]
        for step in run.steps
    ]
    gone = [f"{kept.words} gone" for kept in kinds]
    left = axis_title(alone.part).lower()
    size = f"MB ({run.precision.name})"
    columns = ["step", *gone, "removed", *run.steps[0].quality, left, "parameters", size, "seconds"]
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
                *_architecture([SiteInfo.from_json(site) for site in model["sites"]]),
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
    if costs := _costs(page.runs[0].journal.header):
        groups.append(("Costs", costs))
    settings = {name: value for name, value in config.items() if value is not None and value != []}
    if page.joint and page.experiment is None:
        settings = {name: value for name, value in settings.items() if name in COMPRESSING or name not in SETTINGS}
    if page.experiment is not None:
        settings = {**{name: header[name] for name in ("methods", "runs", "trajectories")}, **settings}
        settings = {name: value for name, value in settings.items() if name not in ("method", "objective")}
    groups.append(("Settings", [(name.replace("_", " "), _plain(name, value)) for name, value in settings.items()]))
    how = [(name, header[name]) for name in ("processes", "threads", "started") if name in header]
    groups.append(("Versions", [*header["versions"].items(), *how]))
    return groups


def _costs(header: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows that costs are stated for, and the measured time of a batch of them."""
    shape, times = header.get("shape"), header.get("times")
    found = []
    if shape is not None:
        found.append(("multiplications of a row", f"{shape['tokens']:.4g} tokens, on average"))
        found.append(("rows timed together", str(shape["rows"])))
    if times is not None:
        found.append(("measured time of the unpruned model", f"{times['whole']:.2f} ms"))
    return found


ARCHITECTURE = {ATTENTION: "attention", FFN: "feed-forward"}
"""What the parts of a model are called, by the kind of their sites."""


def _architecture(sites: list[SiteInfo]) -> Iterator[tuple[str, str]]:
    """The layers of each kind in words."""
    for kind, name in ARCHITECTURE.items():
        if own := [site for site in sites if site.kind == kind]:
            yield name, _layers(own)


def _layers(sites: list[SiteInfo]) -> str:
    """`12 layers of 12 heads`; the smallest and the largest number where layers differ."""
    layers = [sum(site.units for site in sites if site.layer == layer) for layer in sorted({s.layer for s in sites})]
    counts, shared = sorted(set(layers)), max(site.applications for site in sites)
    units = f"{counts[0]:,} to {counts[-1]:,}" if len(counts) > 1 else f"{counts[0]:,}"
    text = f"{len(layers)} layer{'s' if len(layers) > 1 else ''} of {units} {UNIT_WORDS[sites[0].kind]}s"
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
    scoring, evaluation = sources_of(page.runs[0].journal.header)
    run = COMPRESS if page.joint else "prune"
    words = ["gnorm", run if page.experiment is None else "compare", header["model"]["name"], "--data", scoring]
    if evaluation is not None:
        words += ["--eval-data", evaluation]
    if page.experiment is not None:
        words += ["--methods", ",".join(header["methods"])]
        words += ["--runs", str(header["runs"]), "--trajectories", str(header["trajectories"])]
        objectives = {run.journal.header["config"]["objective"] for run in page.runs}
        words += _options(header["config"], set(COMPARING) - ({"objective"} if len(objectives) > 1 else set()))
    else:
        words += _compress_options(header["config"]) if page.joint else _options(header["config"], set(PRUNING))
    return shlex.join([*words, "--out", "AGAIN"])


def _compress_options(config: dict[str, Any]) -> Iterator[str]:
    """The settings that are not the defaults of `gnorm compress`."""
    method = str(config["method"])
    objective = SCORES[METHODS[method].score].objective if method in METHODS else None
    return _options(config, set(COMPRESSING), {"method": JOINT, "objective": objective})


def _options(config: dict[str, Any], names: set[str], own: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Those of the named settings that are not defaults, as on the command line; `own` are defaults of a command."""
    for name, default in {**Settings().to_json(), **(own or {})}.items():
        value = config.get(name, default)
        if name not in names or value == default:
            continue
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            yield option if value else f"--no-{option[2:]}"
        elif name in compact.FORMS:
            yield from (option, compact.write(name, value))
        else:
            for each in value if isinstance(value, list) else [0 if value is None else value]:
                yield from (option, str(each))
