"""Many methods x runs on one model: the same rows for all, everything shared that can be, each part a journal."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from greedy_gnorm.comparison.analysis import EXPERIMENT_FILE, Comparison, read_experiment
from greedy_gnorm.data.batches import Batches
from greedy_gnorm.data.encoding import encode
from greedy_gnorm.data.loading import both_rows, is_ready
from greedy_gnorm.data.rows import Row
from greedy_gnorm.data.splits import sampled, warn_of_overlap
from greedy_gnorm.errors import DataError, GnormError, RunFolderError
from greedy_gnorm.model.sites import Sites, find_sites
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.passes.evaluation import evaluate
from greedy_gnorm.passes.processes import alone, count, from_first, gather, is_first, number, together
from greedy_gnorm.pruning.loop import Memory, Plan
from greedy_gnorm.pruning.methods import METHODS, RANDOM, methods_named
from greedy_gnorm.pruning.prepare import (
    device_for,
    dtype_for,
    load_inputs,
    protection_for,
    resolve_method,
    savings_for,
    situation_of,
)
from greedy_gnorm.pruning.rules import parse_rules
from greedy_gnorm.pruning.run import OnStep, walk
from greedy_gnorm.records.files import RESUME, is_leftover, locked, write_json, writing_to
from greedy_gnorm.records.header import asked_for, check_processes_agree, run_header
from greedy_gnorm.records.journal import Journal, check_same
from greedy_gnorm.scores import SCORES
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.objectives import with_reference
from greedy_gnorm.tasks.task import task_of
from greedy_gnorm.units import Step, Unit, removed_by

OnPartStep = Callable[["Part", Step, int, int], None]
"""Called with the part, its new step, the heads gone so far and the number that go in all."""


@dataclass(frozen=True)
class Part:
    """One walk of the comparison: a method, and which of its runs; runs differ in the scoring sample and the seed."""

    method: str
    run: int

    def __str__(self) -> str:
        return f"{self.method}-{self.run}"


@dataclass(frozen=True)
class Bench:
    """What all parts work on."""

    model: Any
    tokenizer: Any
    sites: Sites
    pool: list[Row]
    evaluation: Batches
    header: dict[str, Any]
    source: Any
    given: Settings
    memory: Memory


@dataclass(frozen=True)
class Experiment:
    """A comparison that was walked: its curves, and what its figures need besides."""

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
    """Walk every method down to the last head, several times; the folder is this process's until the block ends."""
    if runs < 1 or trajectories < 1:
        raise GnormError("A comparison needs at least 1 run and 1 random trajectory.")
    names = methods_named(methods)
    _check_options(given, names)
    for name in names:
        resolve_method(_settings(given, Part(name, 0)))
    counts = {name: trajectories if name == RANDOM else runs for name in names}
    parts = [Part(name, run) for run in range(max(counts.values())) for name in names if run < counts[name]]
    folder = Path(from_first(lambda: str(_folder(out, resume))))
    with writing_to(folder, RESUME), locked(folder) if is_first() else nullcontext():
        draws = from_first(lambda: _draws(folder, runs))
        bench = together(lambda: _bench(model, tokenizer, data, eval_data, given, names, draws))
        _warn_of_one_sample(bench, runs)
        check_processes_agree(bench.header)
        asked = {"methods": names, "runs": runs, "trajectories": trajectories, "draws": draws}
        from_first(lambda: _begin(folder, {**bench.header, **asked}))
        if count() > 1:
            _measure_the_ends(bench)
        found, plans = _walk_parts(bench, parts, folder, on_step)
        curves = {name: [found[part] for part in parts if part.method == name] for name in names}
        yield Experiment(Comparison(bench.header, curves), bench.sites, next(iter(plans.values())).scoring)


def _walk_parts(
    bench: Bench, parts: Sequence[Part], folder: Path, on_step: OnPartStep | None
) -> tuple[dict[Part, list[Step]], dict[Part, Plan]]:
    """The steps of every part, walked by this process or another, and the plans of this process's own."""
    # Runs of one number share their scoring sample, so they share a process too
    own = [part for part in parts if part.run % count() == number()]
    plans = {part: _plan(bench, part) for part in own}
    journals = {part: _journal(bench, part, plans[part], folder) for part in own}
    for part in own:
        _remember(bench, plans[part], journals[part].steps)
    walks: list[Any] = []
    with alone():
        for part in own:
            sites = find_sites(copy.deepcopy(bench.sites.model)).use(savings_for(bench.given))
            told = None if on_step is None else _for_part(on_step, part)
            journal = journals[part]
            limit = situation_of(sites, plans[part].protection).removable
            steps = walk(sites, plans[part], journal.steps, limit, record=journal.append, on_step=told)
            walks.append([part.method, part.run, journal.header, [step.to_json() for step in steps]])
    found = {}
    for method, run, header, lines in (each for share in gather(walks) for each in share):
        part = Part(method, run)
        found[part] = [Step.from_json(line) for line in lines]
        if is_first() and part not in journals:
            _keep(folder, part, header, found[part])
    return found, plans


def _settings(given: Settings, part: Part) -> Settings:
    """The settings of a part: its method, its seed, and those of the options that its score has."""
    known = SCORES[METHODS[part.method].score].defaults()
    options = {name: value for name, value in (given.score_options or {}).items() if name in known}
    return given.model_copy(update={"method": part.method, "seed": given.seed + part.run, "score_options": options})


def _check_options(given: Settings, names: Sequence[str]) -> None:
    known = {option for name in names for option in SCORES[METHODS[name].score].defaults()}
    for option in given.score_options or {}:
        if option not in known:
            raise GnormError(f"No score of {', '.join(names)} has the option {option!r}.")


def _draws(folder: Path, runs: int) -> int:
    """For how many samples rows without splits are divided: as many as the comparison had runs when it began."""
    return int(read_experiment(folder).get("draws", runs)) if (folder / EXPERIMENT_FILE).exists() else runs


def _warn_of_one_sample(bench: Bench, runs: int) -> None:
    samples, there = bench.given.samples, len(bench.pool)
    if runs > 1 and (samples is None or samples >= there):
        warnings.warn(
            f"All runs score on the same {there} rows: their spread tells nothing. Give more rows, or fewer --samples.",
            stacklevel=3,
        )


def _begin(folder: Path, about: dict[str, Any]) -> None:
    """Say what is compared, if the folder holds nothing else: more methods and runs may come, not other rows."""
    if (folder / EXPERIMENT_FILE).exists():
        check_same("comparison", folder, read_experiment(folder), about)
    write_json(folder / EXPERIMENT_FILE, about)


def _keep(folder: Path, part: Part, header: dict[str, Any], steps: Sequence[Step]) -> None:
    """A walk's journal in the first process's folder, if another process wrote it to a disk of its own."""
    journal = Journal.resume(folder / "parts" / str(part), header)
    for step in steps[len(journal.steps) :]:
        journal.append(step)


def _measure_the_ends(bench: Bench) -> None:
    """The quality with all heads and with none, where every walk begins and ends: measured once, for all processes."""
    none = find_sites(copy.deepcopy(bench.sites.model))
    remove(none, none.survivors())
    for sites in (bench.sites, none):
        gone = frozenset(sites.removed())

        def measured(sites: Sites = sites) -> Mapping[str, float]:
            with alone():
                return evaluate(sites, bench.evaluation)

        bench.memory.quality[gone] = from_first(measured)


def _folder(folder: Path, resume: bool) -> Path:
    """A new or empty folder, or that of a comparison to go on with."""
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        held = any(not is_leftover(path) for path in folder.iterdir())
    if held and not (folder / EXPERIMENT_FILE).exists():
        raise RunFolderError(f"{folder} is not empty and holds no comparison: name another folder.")
    if held and not resume:
        raise RunFolderError(f"{folder} holds a comparison already: go on with it by --resume, or name another folder.")
    return folder


def _bench(
    model: Any, tokenizer: Any, data: Any, eval_data: Any, given: Settings, names: Sequence[str], draws: int
) -> Bench:
    if is_ready(data) or is_ready(eval_data):
        raise DataError("A comparison draws its own samples: give rows, not ready batches.")
    source = model
    model, tokenizer = load_inputs(model, tokenizer, given)
    task = task_of(model)
    scores = [resolve_method(_settings(given, Part(name, 0)))[1:] for name in names]
    labels = any(score.asks_for_labels(objective) for score, objective in scores)
    pool, rows = both_rows(task, data, eval_data, given, needs_labels=labels, draws=draws)
    warn_of_overlap([row.words for row in pool], [row.words for row in rows])
    device = device_for(given)
    sites = find_sites(copy.deepcopy(model).to(device, dtype_for(model, given)))
    evaluation = encode(rows, model, tokenizer, given, "evaluation").to(device)
    described = {"evaluation": (data if eval_data is None else eval_data, evaluation)}
    header = run_header(model, source, described, given.model_copy(update={"score_options": None}))
    header["config"]["score_options"] = given.score_options  # each score is given those that it has
    return Bench(model, tokenizer, sites, pool, evaluation, header, data, given, Memory())


def _plan(bench: Bench, part: Part) -> Plan:
    """The walk of one part: its own sample, the common rows to evaluate, what the others found out already."""
    given = _settings(bench.given, part)
    method, score, objective = resolve_method(given)
    rows = sampled(bench.pool, given.samples, given.seed)
    device = bench.evaluation.items[0].inputs["input_ids"].device
    scoring = encode(rows, bench.model, bench.tokenizer, given).to(device).sharing(bench.evaluation)
    if objective.needs_reference:
        scoring = with_reference(bench.sites.model, scoring)
    protection = protection_for(given, bench.sites)
    rules = parse_rules(given.stop, situation_of(bench.sites, protection))
    size = next(bench.model.parameters()).element_size()
    return Plan(scoring, bench.evaluation, method, score, objective, rules, protection, size, bench.memory)


def _journal(bench: Bench, part: Part, plan: Plan, folder: Path) -> Journal:
    given = _settings(bench.given, part)
    own = asked_for({"scoring": (bench.source, plan.scoring)}, given)
    own["data"] |= bench.header["data"]
    return Journal.resume(folder / "parts" / str(part), {**bench.header, **own})


def _remember(bench: Bench, plan: Plan, steps: Sequence[Step]) -> None:
    """Take what an earlier session of the comparison found out from its journal."""
    start = frozenset(bench.sites.removed())
    for place, step in enumerate(steps):
        before: frozenset[Unit] = start | frozenset(removed_by(steps[:place]))
        bench.memory.quality[before | frozenset(step.removed)] = step.quality
        if step.scores is not None and plan.method.scores_at(step.step):
            bench.memory.scores[plan.scoring_key, before] = step.scores


def _for_part(on_step: OnPartStep, part: Part) -> OnStep:
    def told(step: Step, gone: int, limit: int) -> None:
        on_step(part, step, gone, limit)

    return told
