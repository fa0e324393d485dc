"""Many methods x runs on one model: the same rows for all, everything shared that can be, each part a journal."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from greedy_gnorm.comparison.analysis import Comparison, points_for, read_experiment
from greedy_gnorm.comparison.parts import (
    Part,
    assign,
    check_settings,
    forwards,
    parts_for,
    settings_for,
)
from greedy_gnorm.data.batches import Batches
from greedy_gnorm.data.encoding import encode
from greedy_gnorm.data.loading import both_rows, is_ready
from greedy_gnorm.data.rows import Row
from greedy_gnorm.data.sets import calibration_batches, compared_rows, warn_of_few_rows
from greedy_gnorm.data.splits import sampled, warn_of_overlap
from greedy_gnorm.errors import DataError
from greedy_gnorm.model.modes import convert
from greedy_gnorm.model.sites import Sites, find_sites
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.passes.calibration import Calibration
from greedy_gnorm.passes.evaluation import Evaluation, judge, with_drawn_labels, with_predictions
from greedy_gnorm.passes.processes import (
    broadcast,
    gather,
    is_first,
    on_all_ranks,
    rank,
    single_process,
    world_size,
)
from greedy_gnorm.phases import phase
from greedy_gnorm.pruning.budget import comparison_budget
from greedy_gnorm.pruning.costs import Costs, shape_for
from greedy_gnorm.pruning.loop import Memory, Plan, Protection
from greedy_gnorm.pruning.methods import METHODS, methods_named, resolve_method
from greedy_gnorm.pruning.prepare import (
    copy_sharing_weights,
    device_for,
    dtype_for,
    load_inputs,
    protection_for,
    quality_measure,
    removable_units,
    savings_for,
    situation_of,
    units_for,
)
from greedy_gnorm.pruning.rules import compression_rules, parse_rules
from greedy_gnorm.pruning.run import OnStep, walk
from greedy_gnorm.pruning.swaps import check_exchanges
from greedy_gnorm.records.files import RESUME, locked, write_json, writing_to
from greedy_gnorm.records.header import asked_for, check_processes_agree, run_header
from greedy_gnorm.records.journal import EXPERIMENT_FILE, Journal, check_folder, check_same
from greedy_gnorm.records.kept import KeptScoring
from greedy_gnorm.recovery.least_squares import SOLVERS, Recovery, check_recovery
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.objectives import with_reference
from greedy_gnorm.tasks.task import task_of, uses_own_labels
from greedy_gnorm.units import Step, Unit, removed_by

OnPartStep = Callable[[Part, Step, int, int], None]
"""Called with the part, its new step, the number of heads removed so far and the number removed at the end."""


@dataclass(frozen=True)
class Bench:
    """What all parts work on."""

    model: Any
    tokenizer: Any
    sites: Sites
    protection: Protection
    pool: list[Row]
    evaluation: Batches
    header: dict[str, Any]
    source: Any
    given: Settings
    costs: Costs
    memory: Memory
    calibrations: dict[int, Calibration]  # by seed

    @property
    def removable(self) -> int:
        """The number of units that every walk may remove."""
        return len(removable_units(self.sites, self.protection))

    @property
    def joint(self) -> bool:
        """Whether heads and neurons are removed together."""
        return units_for(self.given) != "heads"


@dataclass(frozen=True)
class Experiment:
    """A finished comparison: its curves, and what its figures need besides."""

    comparison: Comparison
    sites: Sites
    scoring: Batches


@contextmanager
def run_experiment(
    model: Any,
    tokenizer: Any,
    data: Any,
    *,
    out: Path,
    methods: str | Sequence[str],
    runs: int,
    trajectories: int,
    eval_data: Any,
    resume: bool,
    on_step: OnPartStep | None,
    given: Settings,
) -> Iterator[Experiment]:
    """Remove all heads by every method, several times; the folder stays locked until the block ends."""
    names = methods_named(methods)
    parts = parts_for(names, runs, trajectories)
    check_settings(names, given)
    folder = Path(broadcast(lambda: str(_prepare_folder(out, resume))))
    with writing_to(folder, RESUME), locked(folder) if is_first() else nullcontext():
        draws = broadcast(lambda: _draws(folder, runs))
        bench = on_all_ranks(lambda: _bench(model, tokenizer, data, eval_data, given, names, draws))
        _warn_of_one_sample(bench, runs)
        check_processes_agree(bench.header)
        asked = {"methods": names, "runs": runs, "trajectories": trajectories, "draws": draws}
        broadcast(lambda: _write_experiment(folder, {**bench.header, **asked}))
        if world_size() > 1:
            _measure_ends(bench)
        found = _walk_parts(bench, parts, folder, on_step)
        curves = {name: [found[part] for part in parts if part.method == name] for name in names}
        yield Experiment(Comparison(bench.header, curves), bench.sites, _plan(bench, parts[0]).scoring)


def _walk_parts(
    bench: Bench, parts: Sequence[Part], folder: Path, on_step: OnPartStep | None
) -> dict[Part, list[Step]]:
    """The steps of every part; each process walks its share, and the first one has the journals of all."""
    share = assign(_costs(bench, parts), world_size())[rank()]
    own = [part for part in parts if part in share]
    plans = {part: _plan(bench, part) for part in own}
    journals = {part: _journal(bench, part, plans[part], folder) for part in own}
    for part in own:
        _load_results(bench, plans[part], journals[part].steps)
    walks: list[Any] = []
    costs = _costs(bench, own)
    left = {part: _share_left(bench, plans[part], journals[part].steps) for part in own}
    whole = sum(costs[part] * left[part] for part in own)
    with single_process(), phase("Comparing", len(own), "part") as comparing:

        def stepped(part: Part, step: Step, gone: int, limit: int) -> None:
            left[part] = 1 - gone / limit
            comparing.reached(1 - sum(costs[each] * left[each] for each in own) / whole)
            if on_step is not None:
                on_step(part, step, gone, limit)

        for part in own:
            for seed, calibration in bench.calibrations.items():
                if seed != bench.given.seed + part.run:
                    calibration.clear()
            savings = savings_for(settings_for(part, bench.given))
            sites = find_sites(copy.deepcopy(bench.sites.model), units_for(bench.given)).use(savings)
            sites.kept = KeptScoring(folder / "parts" / str(part))
            journal, limit = journals[part], _limit(bench, plans[part])
            report = _for_part(stepped, part)
            steps = walk(sites, plans[part], journal.steps, limit, record=journal.append, on_step=report)
            left[part] = 0.0
            comparing.advance()
            walks.append([part.method, part.run, journal.header, [step.to_json() for step in steps]])
    found = {}
    for method, run, header, lines in (each for walked in gather(walks) for each in walked):
        part = Part(method, run)
        found[part] = [Step.from_json(line, bench.sites.infos) for line in lines]
        if is_first() and part not in journals:
            _write_journal(folder, part, header, found[part])
    return found


def _limit(bench: Bench, plan: Plan) -> int:
    """Where the progress of a walk ends: at the number of heads removed, or of rounds."""
    return bench.removable if plan.budget is None else len(plan.budget.schedule)


def _share_left(bench: Bench, plan: Plan, steps: Sequence[Step]) -> float:
    """How much of a walk is still to do, from 1 to 0."""
    if not steps or steps[-1].stop is not None:
        return 0.0 if steps else 1.0
    done = len(removed_by(steps)) if plan.budget is None else steps[-1].step
    return 1 - done / _limit(bench, plan)


def _costs(bench: Bench, parts: Sequence[Part]) -> dict[Part, int]:
    sample = min(bench.given.samples or len(bench.pool), len(bench.pool))
    return {
        part: forwards(
            part,
            bench.given,
            heads=bench.removable,
            scoring_rows=sample,
            evaluation_rows=bench.evaluation.data_rows,
            points=_points(bench),
        )
        for part in parts
    }


def _points(bench: Bench) -> list[int]:
    """Where walks are measured, if not after each of their steps."""
    return [] if bench.given.points is None else points_for(bench.removable, bench.given.points)


def _draws(folder: Path, runs: int) -> int:
    """The number of samples that rows without splits are divided for: that of the runs when the comparison began."""
    return int(read_experiment(folder).get("draws", runs)) if (folder / EXPERIMENT_FILE).exists() else runs


def _warn_of_one_sample(bench: Bench, runs: int) -> None:
    samples, available = bench.given.samples, len(bench.pool)
    if runs > 1 and (samples is None or samples >= available):
        warnings.warn(
            f"All runs score on the same {available} rows, so they do not show how results vary between samples. "
            "Use more rows or fewer --samples.",
            stacklevel=3,
        )


def _write_experiment(folder: Path, about: dict[str, Any]) -> None:
    """Record what is compared; a folder may gain methods and runs, but its model, rows and settings stay."""
    if (folder / EXPERIMENT_FILE).exists():
        check_same("comparison", folder, read_experiment(folder), about)
    write_json(folder / EXPERIMENT_FILE, about)


def _write_journal(folder: Path, part: Part, header: dict[str, Any], steps: Sequence[Step]) -> None:
    """Write a walk of another process, unless that process has written it to the same disk."""
    journal = Journal.resume(folder / "parts" / str(part), header)
    for step in steps[len(journal.steps) :]:
        journal.append(step)


def _measure_ends(bench: Bench) -> None:
    """Measure the quality where all walks begin, and where all end if that is one state, once for all processes."""
    ends = [bench.sites]
    survivors = bench.sites.survivors()
    removable = set(bench.protection.removable(survivors, survivors))
    if not bench.joint and removable == set(survivors) - bench.protection.units:  # or which stay differs between walks
        pruned = find_sites(copy.deepcopy(bench.sites.model), "heads")
        remove(pruned, [unit for unit in survivors if unit in removable])
        ends.append(pruned)
    for sites in ends:

        def measure(sites: Sites = sites) -> dict[str, Any]:
            with single_process():
                return asdict(judge(sites, bench.evaluation, bench.header["quality"]))

        found = broadcast(measure)
        evaluation = Evaluation(found["quality"], tuple(found["interval"]), found["right"])
        bench.memory.quality[(), frozenset(sites.removed())] = evaluation


def _prepare_folder(folder: Path, resume: bool) -> Path:
    """Create the folder, or check that it is empty or holds a comparison to resume."""
    check_folder(folder, EXPERIMENT_FILE, "comparison", resume=resume)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _bench(
    model: Any, tokenizer: Any, data: Any, eval_data: Any, given: Settings, names: Sequence[str], draws: int
) -> Bench:
    if is_ready(data) or is_ready(eval_data):
        raise DataError("A comparison draws its own samples: give rows, not ready batches.")
    source = model
    if METHODS[names[0]].in_rounds:
        given = given.model_copy(update={"units": METHODS[names[0]].units})
    units = units_for(given)
    model, tokenizer = load_inputs(model, tokenizer, given, units)
    task = task_of(model)
    if any(METHODS[name].swap for name in names):
        check_exchanges(task)
    scores = [resolve_method(settings_for(Part(name, 0), given))[1:] for name in names]
    labels = any(score.asks_for_labels(objective) for score, objective in scores)
    labels = labels and not uses_own_labels(task, given)
    with phase("Reading rows"):
        if units == "heads":
            pool, rows = both_rows(task, tokenizer, data, eval_data, given, needs_labels=labels, draws=draws)
        else:
            pool, rows = compared_rows(task, tokenizer, data, eval_data, given, needs_labels=labels)
    warn_of_overlap([row.source for row in pool], [row.source for row in rows])
    device = device_for(given)
    sites = find_sites(convert(copy.deepcopy(model), device, dtype_for(model, given)), units)
    for name in names:
        check_recovery(METHODS[name].changed(given).recover, sites)
    evaluation = encode(rows, model, tokenizer, task, given, "evaluation").to(device)
    if is_first():
        warn_of_few_rows(evaluation.data_rows)
    if uses_own_labels(task, given):
        evaluation = with_predictions(sites.model, evaluation)
    described = {"evaluation": (data if eval_data is None else eval_data, evaluation)}
    header = run_header(model, source, described, given.model_copy(update={"score_options": None}))
    header["config"]["score_options"] = given.score_options  # each score gets those that it has
    protection = protection_for(given, sites)
    size = next(model.parameters()).element_size()
    costs = Costs(sites, size, shape_for(None, evaluation))
    return Bench(model, tokenizer, sites, protection, pool, evaluation, header, data, given, costs, Memory(), {})


def _plan(bench: Bench, part: Part) -> Plan:
    """The plan of one part: its own sample, and the evaluation rows and results that it shares with the others."""
    given = settings_for(part, bench.given)
    method, score, objective = resolve_method(given)
    rows = sampled(bench.pool, given.samples, given.seed)
    device = device_for(given)
    scoring = (
        encode(rows, bench.model, bench.tokenizer, task_of(bench.model), given).to(device).sharing(bench.evaluation)
    )
    if score.draws_labels or uses_own_labels(task_of(bench.model), given):
        scoring = with_drawn_labels(bench.sites.model, scoring)
    if objective.needs_reference or method.look_ahead > 1:
        scoring = with_reference(bench.sites.model, scoring)
    measure = quality_measure(bench.model, given, bench.evaluation)
    rules = parse_rules(given.stop, situation_of(bench.sites, bench.protection, bench.costs, measure))
    budget = recovery = None
    if bench.joint:
        budget = comparison_budget(bench.costs.of(bench.sites), given.rounds)
        rules = compression_rules(lambda step: budget.reached(step.cost), None, budget.targets[0].text, measure)
    if method.recover != "none":
        recovery = Recovery(method.recover, SOLVERS[method.recover], _calibration(bench, given))
    return Plan(
        scoring, bench.evaluation, method, score, objective, rules, bench.protection, bench.costs, budget, recovery,
        bench.memory, _points(bench),
    )  # fmt: skip


def _calibration(bench: Bench, given: Settings) -> Calibration:
    """The calibration of a run, which the methods share that fit layers."""
    if given.seed not in bench.calibrations:
        rows = calibration_batches(bench.pool, bench.model, bench.tokenizer, task_of(bench.model), given)
        device = device_for(given)
        original = find_sites(copy_sharing_weights(bench.sites.model))
        bench.calibrations[given.seed] = Calibration(original, rows.to(device))
    return bench.calibrations[given.seed]


def _journal(bench: Bench, part: Part, plan: Plan, folder: Path) -> Journal:
    given = settings_for(part, bench.given)
    own = asked_for({"scoring": (bench.source, plan.scoring)}, given)
    own["data"] |= bench.header["data"]
    return Journal.resume(folder / "parts" / str(part), {**bench.header, **own})


def _load_results(bench: Bench, plan: Plan, steps: Sequence[Step]) -> None:
    """Share the scores and qualities that an earlier session recorded."""
    start = frozenset(bench.sites.removed())
    for place, step in enumerate(steps):
        before: frozenset[Unit] = start | frozenset(removed_by(steps[:place]))
        key = plan.recovery_key if step.removed else ()
        if step.interval is not None:  # or it is measured again, for intervals that older versions did not record
            found = Evaluation(step.quality, step.interval, step.right)
            bench.memory.quality[key, before | frozenset(step.removed)] = found
        if step.scores is not None and plan.method.scores_at(step.step):
            bench.memory.scores[plan.scoring_key, before] = step.scores


def _for_part(on_step: OnPartStep, part: Part) -> OnStep:
    def report(step: Step, gone: int, limit: int) -> None:
        on_step(part, step, gone, limit)

    return report
