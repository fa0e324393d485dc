"""A run: performing its steps, and the result."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.checkpoint import weights_fingerprint
from greedy_gnorm.model.sites import Sites, find_sites
from greedy_gnorm.model.sizes import Counts, module_counts
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.pruning.loop import Plan, prune_steps
from greedy_gnorm.tasks.task import TASKS
from greedy_gnorm.units import Latency, Measure, SiteInfo, Step, Unit, by_site, removed_by

OnStep = Callable[[Step, int, int], None]
"""Called with each new step, the number of units removed so far and the most that can be removed."""


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
    remove(sites, removed_by(steps))
    for step in prune_steps(sites, plan, steps):
        steps.append(step)
        if record is not None:
            record(step)
        if on_step is not None:
            on_step(step, len(removed_by(steps)), limit)
    return steps


def at_step(model: Any, steps: Sequence[Step], step: int) -> Any:
    """A copy of the unpruned model without the units that the steps up to this one removed."""
    if not 0 <= step < len(steps):
        raise GnormError(f"There is no step {step}: the run has steps 0 to {len(steps) - 1}.")
    pruned = copy.deepcopy(model)
    remove(find_sites(pruned), removed_by(steps[: step + 1]))
    return pruned.eval()


@dataclass(frozen=True)
class Run:
    """A finished run: all steps, the chosen one, and the model pruned to it."""

    steps: list[Step]
    solution: Step
    model: Any
    tokenizer: Any
    header: dict[str, Any]
    unpruned: Any
    latencies: Sequence[Latency] = ()

    def at(self, step: int) -> Any:
        """A copy of the model as it was after a step."""
        if weights_fingerprint(self.unpruned) != self.header["model"]["weights"]:
            raise GnormError("The unpruned model has changed since this run, so its steps can't be rebuilt.")
        return at_step(self.unpruned, self.steps, step)

    @property
    def removed(self) -> list[Unit]:
        """The units that the solution removes, in the order of removal."""
        return removed_by(self.steps[: self.solution.step + 1])

    @property
    def measure(self) -> Measure:
        """The measure that the rules and the curve use."""
        return measure_of(self.header)

    @property
    def reason(self) -> str:
        """The reason why the run ended."""
        return self.steps[-1].stop or "unfinished"

    @property
    def counts(self) -> tuple[Counts, Counts]:
        """Parameters by module, before and after pruning."""
        return module_counts(self.unpruned), module_counts(self.model)

    def summary(self) -> dict[str, Any]:
        """The result as plain values, as printed by `gnorm prune --json`."""
        first, chosen = self.steps[0], self.solution
        return {
            "solution": chosen.step,
            "reason": self.reason,
            "heads": {"total": units_at_start(self.header), "removed": len(self.removed)},
            "removed": {str(site): units for site, units in by_site(self.removed).items()},
            "quality": {name: [first.quality[name], chosen.quality[name]] for name in first.quality},
            "parameters": [first.parameters, chosen.parameters],
            "bytes": [first.bytes, chosen.bytes],
            "latency": [latency.to_json() for latency in self.latencies],
            "steps": len(self.steps) - 1,
            "seconds": sum(sum(step.seconds.values()) for step in self.steps),
        }


def measure_of(header: Mapping[str, Any]) -> Measure:
    """The measure that a record follows; its largest value is the task's."""
    name = str(header["quality"])
    largest = next((TASKS[task].largest_quality for task in TASKS if TASKS[task].quality == name), None)
    return Measure(name, bool(header.get("higher_is_better", True)), largest)


def sites_of(header: Mapping[str, Any]) -> list[SiteInfo]:
    """The sites of the model that a record is about."""
    return [SiteInfo.from_json(site) for site in header["model"]["sites"]]


def units_at_start(header: Mapping[str, Any]) -> int:
    """The number of units of the model that a run started with."""
    model = header["model"]
    return int(sum(site["units"] for site in model["sites"]) - len(model["removed"]))
