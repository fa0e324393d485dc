"""Performing a run: from its inputs to the files of its folder. `api` has what users call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.data.sets import CALIBRATION, EVALUATION, TEST, warn_of_few_rows
from greedy_gnorm.deployment import hub
from greedy_gnorm.deployment.speed import torch_latencies
from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.checkpoint import check_format
from greedy_gnorm.model.modes import convert, gradient_mode_restored
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import judge, row_statistics, tested, with_predictions
from greedy_gnorm.passes.predictions import MOST_EXAMPLES, compared_predictions
from greedy_gnorm.passes.processes import broadcast, is_first, on_all_ranks, shard, world_size
from greedy_gnorm.passes.speed import SHAPES, possible
from greedy_gnorm.phases import counted, phase
from greedy_gnorm.pruning.choices import Choice, choose
from greedy_gnorm.pruning.costs import Times
from greedy_gnorm.pruning.methods import DISTILL, resolve_method
from greedy_gnorm.pruning.prepare import (
    device_for,
    dtype_for,
    load_sets,
    on_device,
    prepare_run,
    recovery_for,
    units_for,
)
from greedy_gnorm.pruning.run import OnStep, Run, at_step, sites_of, units_of, walk
from greedy_gnorm.records.header import check_processes_agree, run_header, sources_of
from greedy_gnorm.records.journal import RUN_FILE, Journal, open_journal, read_header
from greedy_gnorm.records.kept import KeptScoring
from greedy_gnorm.records.training import KeptTraining
from greedy_gnorm.recovery.least_squares import Recovery
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import measure_of, task_of, uses_own_labels
from greedy_gnorm.units import Latency, Measure, Step


@gradient_mode_restored()
def perform(
    command: str,
    given: Settings,
    model: Any,
    tokenizer: Any,
    data: Any,
    eval_data: Any,
    *,
    out: str | Path | None,
    resume: bool,
    on_step: OnStep | None,
    format: str,
    measure_speed: bool,
    push_to_hub: str | None,
) -> Run:
    """Prepare a run, perform its steps, measure the result and write it."""
    check_format(format)
    if push_to_hub is not None:
        if out is None:
            raise GnormError("push_to_hub requires a folder for the model: set out.")
        hub.check(push_to_hub)
    times = _recorded_times(out) if resume else None
    prepared = on_all_ranks(lambda: prepare_run(model, tokenizer, data, eval_data, given, times))
    header = {"command": command, **run_header(prepared.model, model, prepared.rows, given, prepared.plan.costs)}
    check_processes_agree(header)
    with ExitStack() as stack:
        journal: Journal | None = None

        def begin() -> list[dict[str, Any]]:
            nonlocal journal
            if out is not None:
                journal = stack.enter_context(open_journal(Path(out), header, resume=resume))
            return [] if journal is None else [step.to_json() for step in journal.steps]

        history = [Step.from_json(line, sites_of(header)) for line in broadcast(begin)]
        record = None if journal is None else journal.append
        if journal is not None and world_size() == 1:
            prepared.sites.kept = KeptScoring(journal.folder)
        evaluation, reported = (prepared.rows[use][1] if use in prepared.rows else None for use in (EVALUATION, TEST))
        assert evaluation is not None
        if reported is not None and is_first():
            warn_of_few_rows(reported.data_rows, "test")

        def observe(step: Step, gone: int, limit: int) -> None:
            if step.step == 0 and is_first():
                _warn_of_doubts(unpruned, evaluation, step)
            if on_step is not None:
                on_step(step, gone, limit)

        unpruned, tokenizer = prepared.model, prepared.tokenizer
        steps = walk(prepared.sites, prepared.plan, history, prepared.limit, record=record, on_step=observe)
        chosen, why = prepared.plan.rules.solution(steps), prepared.plan.rules.why(steps)
        recovery, test, units = prepared.plan.recovery, prepared.test, units_of(header)
        budgeted = prepared.plan.budget is not None
        # At most three copies of the model at a time: the one that was cut and those that are timed go first
        del prepared
        timed = measure_speed and journal is not None and given.device_map is None
        latencies = measured_latencies(unpruned, steps, chosen, given, header) if timed else []
        choices = choose(steps, measure_of(header), evaluation.data_rows, fastest=budgeted)
        if timed and is_first():
            choices = _timed_choices(choices, unpruned, steps, given, header, {chosen: latencies})
        kept = None if journal is None else KeptTraining(journal.folder)
        pruned = at_step(unpruned, steps, chosen, units, recovery, kept)
        solution = trained_step(steps[chosen], pruned, recovery, evaluation, given, measure_of(header).name)
        if recovery is not None:
            recovery.calibration.clear()  # gigabytes on disk, and computed again when another step is rebuilt
        tests, predictions = (None, None) if test is None else _tested(unpruned, pruned, test, given)
        if not task_of(pruned).own_labels:  # how much each of those measures falls is known to differ
            sides = [steps[0], solution]
            _warn_of_other_losses(tests, sides, 1, measure_of(header), classes=bool(task_of(pruned).classes))
        run = Run(
            steps, solution, pruned, tokenizer, header, unpruned, latencies, recovery, tests, choices, predictions,
            why,
        )  # fmt: skip
        if journal is None:
            return run
        from greedy_gnorm.report.outcome import write_outcome  # loads matplotlib, which only this needs

        write_outcome(run, journal, format)
        KeptTraining(journal.folder).clear()
        if push_to_hub is not None:
            hub.push(journal.folder / "model", push_to_hub)
        return run


def _warn_of_doubts(model: Any, evaluation: Batches, step: Step) -> None:
    """Warn about rows and models for which the quality before pruning says little."""
    warn_of_few_rows(evaluation.data_rows)
    if "labels" in evaluation.judged_by:
        labels = [label for batch in evaluation for label in ([] if batch.labels is None else batch.labels.tolist())]
        for sentence in task_of(model).doubts(labels, step.quality):
            warnings.warn(sentence, stacklevel=2)


MUCH, MORE = 2, 0.02
"""Another measure falls much more than the leading one if it loses so many times as much and so much in addition."""


def _warn_of_other_losses(
    tests: Mapping[str, Any] | None, steps: Sequence[Step], chosen: int, measure: Measure, *, classes: bool = True
) -> None:
    """Warn if a share of the same rows, such as macro F1, falls much more than the measure that the run goes by."""
    sides = {name: [steps[place].quality[name] for place in (0, chosen)] for name in steps[0].quality}
    losses = {
        name: before - after
        for name, (before, after) in (sides if tests is None else tests["quality"]).items()
        if measure_of({"quality": name}).largest == 1
    }
    if measure.name not in losses:
        return
    led = losses.pop(measure.name)
    for name, loss in losses.items():
        if loss > MUCH * max(led, 0.0) + MORE:
            why = ": some classes lose more than others. Look at the classes, or choose" if classes else ". Choose"
            warnings.warn(
                f"{name} fell by {100 * loss:.1f} points, {measure.name} by {100 * led:.1f}{why} with --metric {name}.",
                stacklevel=2,
            )


def _recorded_times(out: str | Path | None) -> Times | None:
    """The times that the run in this folder measured by width, if it did."""
    if out is None or not (Path(out) / RUN_FILE).exists():
        return None
    content = read_header(Path(out) / RUN_FILE).get("times")
    return None if content is None else Times.from_json(content)


def _tested(before: Any, after: Any, test: Batches, given: Settings) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The quality of both models on the test rows, in the precision of the run, and what they predict for them."""
    place, task = (device_for(given), dtype_for(before, given)), task_of(before)
    with phase("Testing"):
        sides = [find_sites(convert(copy.deepcopy(model), *place)) for model in (before, after)]
        tables = [row_statistics(sites, test).numpy() for sites in sides]
        examples = MOST_EXAMPLES if given.examples else 0
        return tested(task, test, tables), compared_predictions(task, test, tables, examples)


def measured_latencies(
    model: Any, steps: Sequence[Step], chosen: int, given: Settings, header: Mapping[str, Any]
) -> list[Latency]:
    """The speed of the unpruned model and of a step, on the device and in the precision of the run."""
    before = on_device(model, given)
    with phase("Measuring speed"):
        return torch_latencies(before, at_step(before, steps, chosen, units_of(header)), _shapes(given, header))


def _timed_choices(
    choices: Sequence[Choice],
    model: Any,
    steps: Sequence[Step],
    given: Settings,
    header: Mapping[str, Any],
    known: Mapping[int, Sequence[Latency]],
) -> list[Choice]:
    """The choices with their measured speed, each timed in turn with the unpruned model unless it is `known`."""
    before = on_device(model, given)
    shapes = possible(before, _shapes(given, header))[-1:]
    timed = []
    for choice in counted(choices, "Measuring speed", "choice"):
        found = known.get(choice.step)
        if found is None:
            pruned = at_step(before, steps, choice.step, units_of(header))
            found = torch_latencies(before, pruned, shapes, seconds=1.0)
        for latency in found[-1:]:
            choice = replace(choice, measured=latency.speed_up, milliseconds=latency.after_ms)
        timed.append(choice)
    return timed


def _shapes(given: Settings, header: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The shapes to time: the usual ones, and last that of the costs, if it is stated or a time is the target."""
    if "shape" not in header or (given.shape, given.speedup, given.latency) == (None, None, None):
        return list(SHAPES)
    own = header["shape"]["rows"], max(1, round(header["shape"]["tokens"]))
    return [*(shape for shape in SHAPES if shape != own), own]


def trained_step(
    step: Step, model: Any, recovery: Recovery | None, evaluation: Batches | None, given: Settings, measure: str
) -> Step:
    """A step with the quality of its model after training, in the precision of the run; itself if none took place."""
    if recovery is None or recovery.training is None or not find_sites(model).removed():
        return step
    assert evaluation is not None
    sites = find_sites(convert(copy.deepcopy(model), device_for(given), dtype_for(model, given)))
    found = judge(sites, shard(evaluation), measure)
    return replace(step, quality=found.quality, interval=found.interval, right=found.right)


def recovery_of(
    journal: Journal, model: Any, tokenizer: Any, settings: Settings
) -> tuple[Recovery | None, Batches | None]:
    """What a recorded run recovered its quality with, and the rows that a trained step is judged on.

    The rows are read again, and must be the same.
    """
    method, _, _ = resolve_method(settings)
    if method.recover == "none":
        return None, None
    described = journal.header["data"]
    if any(part.get("in_memory") for part in described.values()):
        raise GnormError(f"The run in {journal.folder} was given rows in Python: take its steps with run.at(step).")
    sets = load_sets(model, tokenizer, *sources_of(journal.header), settings)
    used = {CALIBRATION: "calibrated", **({EVALUATION: "evaluated"} if method.recover == DISTILL else {})}
    for use, done in used.items():
        if sets[use].fingerprint != described[use]["fingerprint"]:
            raise GnormError(
                f"{described[use]['source']} has changed since the run in {journal.folder} was {done} on it."
            )
    device = device_for(settings)
    rows = {use: sets[use].to(device) for use in used}
    worked = convert(copy.deepcopy(model), device, dtype_for(model, settings))
    if EVALUATION in rows and uses_own_labels(task_of(model), settings):
        rows[EVALUATION] = with_predictions(worked, rows[EVALUATION])
    sites = find_sites(worked, units_for(settings))
    return recovery_for(method, sites, rows, settings), rows.get(EVALUATION)
