"""The top of the page: what was removed, what that costs and what it gains, in sentences and in figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from greedy_gnorm.pruning.choices import change_of
from greedy_gnorm.report.page import Page, PageRun
from greedy_gnorm.report.tables import distilled_text, in_words, measure_title, megabytes
from greedy_gnorm.units import Measure, quality_text


@dataclass(frozen=True)
class Change:
    """The quality before and after, the rows that it was measured on, and 95 % intervals where they are known."""

    measure: Measure
    before: float
    after: float
    rows: str
    intervals: dict[str, Any] | None = None

    @property
    def value(self) -> float:
        """The difference."""
        return self.after - self.before

    @property
    def is_loss(self) -> bool:
        """Whether the quality is lower than before."""
        return self.measure.worth(self.value) < 0

    @property
    def is_measurable(self) -> bool | None:
        """Whether the interval of the change leaves out no change; None where there is no interval."""
        if self.intervals is None:
            return None
        low, high = self.intervals["change"]
        return bool(low > 0 or high < 0)

    @property
    def is_worrying(self) -> bool:
        """Whether this is a loss that is measurable, or may be."""
        return self.is_loss and self.is_measurable is not False


def quality_change(run: PageRun, measure: Measure) -> Change:
    """What the step that the top is about costs: on test rows where the run has them."""
    header, name = run.journal.header, measure.name
    if run.test is not None and run.solution is not None and name in run.test["quality"]:
        before, after = run.test["quality"][name]
        return Change(measure, before, after, f"{run.test['rows']:,} test rows", run.test["intervals"].get(name))
    rows, first, last = header["data"]["evaluation"]["rows"], run.steps[0], run.summarized
    change = change_of([first, last], 1, rows)
    intervals = None if change is None else {"before": first.interval, "after": last.interval, "change": change}
    return Change(measure, measure.of(first), measure.of(last), f"{rows:,} rows", intervals)


def verdict(page: Page) -> Markup:
    """One or two plain sentences about the step that was chosen, or about the last one while the run goes on."""
    run = page.best
    gone = removed_units(run)
    cost = quality_change(run, page.measure)
    if page.experiment is not None:
        return _of_comparison(page, gone, cost)
    if len(page.runs) > 1:
        return Markup("{} runs side by side. <b>{}</b> removed {}. {}").format(
            len(page.runs), run.label, gone, _costs(cost)
        )
    method = run.journal.header["config"]["method"]
    if not run.finished:
        return Markup("So far {} has removed {}. {}").format(method, gone, _costs(cost))
    if not run.summarized.step:
        return Markup("No step was better than keeping every {}: the saved model is the original one.").format(
            run.kept[0].word if len(run.kept) == 1 else "unit"
        )
    trained = "" if run.distilled is None else f"{distilled_text(run.distilled, page.measure)} "
    return Markup("{} were removed by {}. {}{}{}").format(gone, method, trained, _costs(cost), _gains(run))


def removed_units(run: PageRun) -> Markup:
    """`<b>4 of 12</b> attention heads and <b>20 of 60</b> neurons` for the step that the top is about."""
    parts = [
        Markup("<b>{:,} of {:,}</b> {}").format(kept.gone(run.summarized.step), kept.total, UNITS[kept.word])
        for kept in run.kept
    ]
    return Markup(" and ").join(parts)


UNITS = {"head": "attention heads", "neuron": "feed-forward neurons"}
"""The units in full, for sentences that people read first."""


def _of_comparison(page: Page, gone: Markup, cost: Change) -> Markup:
    """What was compared, and where the best method stands at its knee, or at half of the cost."""
    run, rows = page.best, cost.rows
    count = len(page.curves)
    if page.joint:
        left = page.work(run)
        to = f"taken down to {left[-1]:.0f} % of the {page.part}"
        where = f"With {left[run.summarized.step]:.0f} % of the {page.part} left"
    else:
        to, where = "pruned down to the last head", "At the knee of its curve"
    change = _went(page.quality, cost)
    return Markup("{} methods, each {} and evaluated on the same {}. {}, <b>{}</b> has removed {}; {}.").format(
        count, to, rows, where, run.line, gone, change
    )


CHANGE = '{} went from <span class="number">{}</span> to <span class="number">{}</span>'


def _went(quality: str, cost: Change) -> Markup:
    return Markup(CHANGE).format(in_words(quality), quality_text(cost.before), quality_text(cost.after))


def _costs(cost: Change) -> Markup:
    """The sentence about quality, with a word on whether the loss can be measured."""
    change = _went(cost.measure.name, cost)
    if cost.intervals is None:
        return Markup("On {}, {}.").format(cost.rows, change)
    low, high = cost.intervals["change"]
    if cost.is_loss:
        word = Markup('<b class="loss">a measurable loss</b>') if cost.is_measurable else "no measurable loss"
    else:
        word = "a measurable gain" if cost.is_measurable else "no measurable change"
    return Markup(
        'On {}, {}: a change of <span class="number">{}</span> (95 % interval <span class="number">{}</span> to '
        '<span class="number">{}</span>), {}.'
    ).format(cost.rows, change, *(quality_text(each, "+") for each in (cost.value, low, high)), word)


def _gains(run: PageRun) -> Markup:
    """The sentence about size and speed."""
    first, chosen = run.steps[0], run.summarized
    smaller = Markup(' The model is <b class="number">{:.1%}</b> smaller').format(1 - chosen.bytes / first.bytes)
    speed = run.speeds[chosen.step]
    if speed is None:
        return smaller + "."
    how = "measured" if speed.is_measured else "estimated"
    return smaller + Markup(' and <b class="number">{:.2f}</b> times as fast ({}).').format(speed.times, how)


@dataclass(frozen=True)
class Figure:
    """A figure at the top: its title, the value with its unit (None if not measured), and where it comes from."""

    title: str
    value: str | None
    unit: str
    how: str
    is_loss: bool = False


def figures(page: Page) -> Iterator[Figure]:
    """The figures at the top."""
    run = page.best
    first, chosen = run.steps[0], run.summarized
    for kept in run.kept:
        gone = kept.gone(chosen.step)
        share = f"{gone / kept.total:.0%} of all {kept.words}" if kept.total else ""
        yield Figure(f"{kept.words.capitalize()} removed", f"{gone:,}", f" of {kept.total:,}", share)
    cost = quality_change(run, page.measure)
    how = f"from {quality_text(cost.before)} ({quality_text(cost.value, '+')}) on {cost.rows}"
    if cost.intervals is not None:
        how = f"95 % interval {' to '.join(map(quality_text, cost.intervals['after']))}, {how}"
    yield Figure(measure_title(page.measure), quality_text(cost.after), "", how, cost.is_worrying)
    size = f"from {megabytes(first.bytes)} MB ({chosen.bytes / first.bytes - 1:+.1%})"
    yield Figure(f"Size ({run.precision.name})", megabytes(chosen.bytes), " MB", size)
    if first.cost.multiplications and chosen.cost.multiplications:
        left = chosen.cost.multiplications / first.cost.multiplications
        yield Figure("Multiplications left", f"{left:.0%}", "", f"{1 / left:.2f} times fewer")
    else:
        yield Figure("Parameters", f"{chosen.parameters:,}", "", f"from {first.parameters:,}")
    yield _speed(run)


def _speed(run: PageRun) -> Figure:
    speed, latency = run.speeds[run.summarized.step], run.shown_latency
    if speed is None:
        return Figure("Speed", None, "", "the run has no latency")
    if not speed.is_measured or latency is None:
        return Figure("Speed (estimated)", f"{speed.times:.2f}", " times", "not measured")
    times = f"{latency['before_ms']:.1f} to {latency['after_ms']:.1f} ms"
    return Figure("Speed", f"{speed.times:.2f}", " times", f"{times} ({measurement(latency)})")


def speeds(run: PageRun, measure: Measure) -> list[tuple[str, float, float, str]]:
    """(name, times faster, quality, how long a batch takes) of the choices of a run that were measured.

    The unpruned model comes first; the solution is added where it is none of the choices.
    """
    found = [
        (choice.name, choice.measured, choice.quality, f"{choice.milliseconds:.2f} ms")
        for choice in run.choices
        if choice.measured and choice.milliseconds
    ]
    last = run.shown_latency
    if last and run.solution and run.solution not in {choice.step for choice in run.choices}:
        quality = measure.of(run.steps[run.solution])
        found.append(("solution", last["before_ms"] / last["after_ms"], quality, f"{last['after_ms']:.2f} ms"))
    return [("unpruned", 1.0, measure.of(run.steps[0]), "the measure of speed"), *found]


def measurement(row: dict[str, Any]) -> str:
    """What a latency was measured with."""
    threads = f"{row['threads']} thread{'s' if row['threads'] != 1 else ''}"
    return f"{row['runtime']}, batch {row['batch']}, {row['tokens']} tokens, {threads}"
