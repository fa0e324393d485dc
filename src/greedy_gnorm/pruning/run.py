"""A run: performing its steps, and the result."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.checkpoint import weights_fingerprint
from greedy_gnorm.model.modes import convert
from greedy_gnorm.model.sites import Sites, find_sites
from greedy_gnorm.model.sizes import Counts, module_counts
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.pruning.choices import Choice, step_named
from greedy_gnorm.pruning.loop import Plan, prune_steps
from greedy_gnorm.recovery.distillation import Checkpoint
from greedy_gnorm.recovery.least_squares import Recovery
from greedy_gnorm.shown import Shown
from greedy_gnorm.tasks.task import measure_of
from greedy_gnorm.units import (
    KINDS,
    UNIT_WORDS,
    Latency,
    Measure,
    SiteInfo,
    Step,
    Unit,
    by_site,
    quality_text,
    removed_by,
)

OnStep = Callable[[Step, int, int], None]
"""Called with each new step, the progress so far and its end: units removed, or rounds where a budget is reached."""


def walk(
    sites: Sites,
    plan: Plan,
    history: Sequence[Step],
    limit: int,
    *,
    record: Callable[[Step], None] | None = None,
    on_step: OnStep | None = None,
) -> list[Step]:
    """Repeat the removals of an earlier run, then perform and record new steps; returns all steps."""
    steps = list(history)
    gone = removed_by(steps)
    remove(sites, gone)
    if gone and plan.recovery is not None:
        plan.recovery(sites)
    for step in prune_steps(sites, plan, steps):
        steps.append(step)
        if record is not None:
            record(step)
        if sites.kept is not None:
            sites.kept.clear()
        if on_step is not None:
            on_step(step, len(removed_by(steps)) if plan.budget is None else step.step, limit)
    return steps


def at_step(
    model: Any,
    steps: Sequence[Step],
    step: int,
    units: str = "heads",
    recovery: Recovery | None = None,
    kept: Checkpoint | None = None,
) -> Any:
    """A copy of the unpruned model without the units that the steps up to this one removed, fitted if they were.

    Layers are fitted in the precision of the run, and stored in that of the model. If the run trains its
    result, this one is trained too; an interrupted training is `kept`.
    """
    if not 0 <= step < len(steps):
        raise GnormError(f"There is no step {step}: the run has steps 0 to {len(steps) - 1}.")
    pruned, gone = copy.deepcopy(model), removed_by(steps[: step + 1])
    remove(find_sites(pruned, units), gone)
    if recovery is not None and gone:
        stored, worked = next(model.parameters()), next(recovery.calibration.original.model.parameters())
        convert(pruned, worked.device, worked.dtype)
        recovery(find_sites(pruned))
        if recovery.training is not None:
            recovery.calibration.clear()  # gigabytes on disk
            recovery.training(find_sites(pruned), kept)
        convert(pruned, stored.device, stored.dtype)
    return pruned.eval()


@dataclass(frozen=True, repr=False)
class Run(Shown):
    """A finished run: all steps, the chosen one, and the model pruned to it.

    `test` is the quality on rows that no decision was made on, `offered` the steps that a user may prefer,
    `predictions` what both models predict on the test rows, where they predict classes, `why` what distinguishes the
    chosen step. If the run trains its result, the quality of `solution` is that after training.
    """

    steps: list[Step]
    solution: Step
    model: Any
    tokenizer: Any
    header: dict[str, Any]
    unpruned: Any
    latencies: Sequence[Latency] = ()
    recovery: Recovery | None = None
    test: Mapping[str, Any] | None = None
    offered: Sequence[Choice] = ()
    predictions: Mapping[str, Any] | None = None
    why: str = "the last one"

    def __repr__(self) -> str:
        title = f"Run of {self.method} on {self.header['model']['name']}"
        return "\n".join([title, *(f"  {name:<8}  {text}" for name, text in self._facts())])

    def _facts(self) -> Iterator[tuple[str, str]]:
        """What the run came to: a name and a line of text for each fact that is known."""
        first, chosen, name = self.steps[0], self.solution, self.measure.name
        yield "solution", f"step {chosen.step} of {len(self.steps) - 1} ({self.reason})"
        counts = unit_counts(self.header, self.removed).items()
        yield "removed", ", ".join(f"{count['removed']:,} of {count['total']:,} {words}" for words, count in counts)
        size = f"{first.parameters:,} -> {chosen.parameters:,} parameters"
        if first.cost.multiplications and chosen.cost.multiplications:
            size += f", {chosen.cost.multiplications / first.cost.multiplications:.1%} of the multiplications"
        yield "size", size
        if self.distilled is not None:
            fitted, trained = self.distilled["quality"][name]
            yield "trained", f"{self.distilled['steps']:,} steps of distillation, {_change(name, fitted, trained)}"
        rows = self.header["data"]["evaluation"]["rows"]
        yield "quality", f"{_change(name, self.measure.of(first), self.measure.of(chosen))} on {rows:,} choosing rows"
        if self.test is not None:
            interval = self.test["intervals"].get(name)
            ends = [quality_text(end, "+") for end in interval["change"]] if interval else []
            within = f", 95 % interval {' to '.join(ends)}" if ends else ""
            yield "test", f"{_change(name, *self.test['quality'][name])} on {self.test['rows']:,} test rows{within}"
        if self.latencies:
            largest = max(self.latencies, key=lambda latency: latency.batch * latency.tokens)
            yield "speed", f"{largest.speed_up:.2f} times as fast (measured, {largest.batch} x {largest.tokens} tokens)"
        if self.offered:
            yield "choices", ", ".join(choice.name for choice in self.offered)

    def choices(self) -> list[Choice]:
        """The steps that a user may prefer: free of loss, at some losses, the knee or the fastest."""
        return list(self.offered)

    def at(self, step: int | str) -> Any:
        """A copy of the model after a step, given by its number or as "drop=0.01", "free", "knee" or "fastest"."""
        number = step_named(self.header, self.steps, step)
        if weights_fingerprint(self.unpruned) != self.header["model"]["weights"]:
            raise GnormError("The unpruned model has changed since this run, so its steps can't be rebuilt.")
        return at_step(self.unpruned, self.steps, number, units_of(self.header), self.recovery)

    @property
    def removed(self) -> list[Unit]:
        """The units that the solution removes, in the order of removal."""
        return removed_by(self.steps[: self.solution.step + 1])

    @property
    def measure(self) -> Measure:
        """The measure that the rules and the curve use."""
        return measure_of(self.header)

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.header["config"]["method"])

    @property
    def reason(self) -> str:
        """The reason why the run ended."""
        return self.steps[-1].stop or "unfinished"

    @property
    def distilled(self) -> dict[str, Any] | None:
        """The steps of training, and the quality on the choosing rows before and after it, if there was any."""
        fitted = self.steps[self.solution.step]
        if self.recovery is None or self.recovery.training is None or not self.removed:
            return None
        quality = {name: [fitted.quality[name], self.solution.quality[name]] for name in fitted.quality}
        return {"steps": self.recovery.training.steps, "quality": quality}

    @property
    def counts(self) -> tuple[Counts, Counts]:
        """Parameters by module, before and after pruning."""
        return module_counts(self.unpruned), module_counts(self.model)

    def summary(self) -> dict[str, Any]:
        """The result as plain values, as printed by `gnorm prune --json`."""
        first, chosen = self.steps[0], self.solution
        return {
            "solution": chosen.step,
            "why": self.why,
            "reason": self.reason,
            **unit_counts(self.header, self.removed),
            "removed": {str(site): units for site, units in by_site(self.removed).items()},
            "quality": {name: [first.quality[name], chosen.quality[name]] for name in first.quality},
            "parameters": [first.parameters, chosen.parameters],
            "bytes": [first.bytes, chosen.bytes],
            **self._further(),
            "latency": [latency.to_json() for latency in self.latencies],
            "steps": len(self.steps) - 1,
            "seconds": sum(sum(step.seconds.values()) for step in self.steps),
        }

    def _further(self) -> dict[str, Any]:
        """What only some runs have: multiplications, expected times, training, the final test, choices."""
        costs = self.steps[0].cost, self.solution.cost
        found: dict[str, Any] = {}
        for name in ("multiplications", "milliseconds"):
            if getattr(costs[0], name) is not None:
                found[name] = [getattr(cost, name) for cost in costs]
        if self.distilled is not None:
            found["distilled"] = self.distilled
        if self.test is not None:
            found["test"] = dict(self.test)
        if self.offered:
            found["choices"] = [choice.to_json() for choice in self.offered]
        return found


def _change(name: str, before: float, after: float) -> str:
    return f"{name} {quality_text(before)} -> {quality_text(after)} ({quality_text(after - before, '+')})"


def sites_of(header: Mapping[str, Any]) -> list[SiteInfo]:
    """The sites of the model that a record is about."""
    return [SiteInfo.from_json(site) for site in header["model"]["sites"]]


def units_of(header: Mapping[str, Any]) -> str:
    """What a run removes units from: `heads`, `ffn` or `both`."""
    kinds = tuple(kind for kind in UNIT_WORDS if any(site.kind == kind for site in sites_of(header)))
    return next(units for units, each in KINDS.items() if each == kinds)


def unit_counts(header: Mapping[str, Any], removed: Sequence[Unit]) -> dict[str, dict[str, Any]]:
    """`heads` and `neurons`: how many there were and how many were removed, in all and left by layer."""
    sites, before = sites_of(header), Counter(Unit(*unit).site for unit in header["model"]["removed"])
    gone = Counter(unit.site for unit in removed)
    counts = {}
    for kind in dict.fromkeys(site.kind for site in sites):
        own = [(index, site.units - before[index]) for index, site in enumerate(sites) if site.kind == kind]
        counts[f"{UNIT_WORDS[kind]}s"] = {
            "total": sum(total for _, total in own),
            "removed": sum(gone[index] for index, _ in own),
            **({"left": [total - gone[index] for index, total in own]} if units_of(header) != "heads" else {}),
        }
    return counts


def units_at_start(header: Mapping[str, Any]) -> int:
    """The number of units of the model that a run started with."""
    model = header["model"]
    return int(sum(site["units"] for site in model["sites"]) - len(model["removed"]))
