"""The speed of two models in several settings, as a table and as a figure."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from greedy_gnorm.report.figures import ACCENT, COLOURS, LIGHT, MUTED
from greedy_gnorm.report.tables import LATENCY_COLUMNS, as_csv, as_markdown, latency_cells
from greedy_gnorm.units import Latency

NUMBERS = (
    "runtime", "batch", "tokens", "threads", "repeats", "before_ms", "before_low", "before_high", "after_ms",
    "after_low", "after_high", "speed_up", "promised",
)  # fmt: skip
ABOUT = "Milliseconds for a batch of rows x tokens: the median, and the quartiles in brackets. The models ran in turn."


def bench_csv(latencies: Sequence[Latency]) -> str:
    """Plain numbers, one line for each measurement."""
    cells = [
        [
            each.runtime,
            *map(str, (each.batch, each.tokens, each.threads, each.repeats)),
            *map(repr, (each.before_ms, *each.before_spread, each.after_ms, *each.after_spread, each.speed_up)),
            "" if each.promised is None else repr(each.promised),
        ]
        for each in latencies
    ]
    return as_csv(NUMBERS, cells)


def bench_markdown(latencies: Sequence[Latency], left_out: Sequence[str]) -> str:
    """The table that people read, and what is left out."""
    notes = "".join(f"\nLeft out: {note}\n" for note in left_out)
    return f"{as_markdown(LATENCY_COLUMNS, [latency_cells(each) for each in latencies])}\n{ABOUT}\n{notes}"


def bench_figure(latencies: Sequence[Latency]) -> Figure:
    """How many times as fast the pruned model is: a bar for each measurement, a mark for what is promised."""
    figure = Figure(figsize=(8, 1.6 + 0.3 * len(latencies)))
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    places = range(len(latencies))
    speeds = [each.speed_up for each in latencies]
    runtimes = list(dict.fromkeys(each.runtime for each in latencies))
    for runtime, colour in zip(runtimes, COLOURS, strict=False):
        own = [place for place in places if latencies[place].runtime == runtime]
        axes.barh(own, [speeds[place] for place in own], color=colour, height=0.7, label=runtime)
    promised = [(each.promised, place) for place, each in enumerate(latencies) if each.promised is not None]
    if promised:
        axes.plot(*zip(*promised, strict=True), "D", color=ACCENT, markersize=5, label="by multiplications")
    for place, each in enumerate(latencies):
        text = f"{each.speed_up:.2f}  ({each.before_ms:.1f} to {each.after_ms:.1f} ms)"
        axes.text(1.02, place, text, va="center", fontsize=8, transform=axes.get_yaxis_transform())
    axes.axvline(1, color=MUTED, linestyle="--", linewidth=1)
    axes.set_yticks(list(places), [_setting(each) for each in latencies], fontsize=8)
    axes.set(xlabel="Times as fast as the unpruned model", xlim=(0, 1.08 * max(*speeds, *(p for p, _ in promised), 1)))
    axes.invert_yaxis()
    axes.grid(axis="x", color=LIGHT)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper center", ncols=len(runtimes) + 1)
    return figure


def _setting(latency: Latency) -> str:
    threads = f"{latency.threads} thread{'s' if latency.threads > 1 else ''}"
    return f"{latency.runtime}, {latency.batch} x {latency.tokens}, {threads}"
