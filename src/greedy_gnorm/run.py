"""From a model and data to a pruned model and its record: what `gg.prune`, `gg.score` and the command line call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from greedy_gnorm import hub
from greedy_gnorm.config import Settings
from greedy_gnorm.data import both_batches, scoring_batches
from greedy_gnorm.distributed import of_all, of_first, own_share, together
from greedy_gnorm.errors import GnormError
from greedy_gnorm.files import RESUME, locked, writing_to
from greedy_gnorm.header import described, run_header, told_source
from greedy_gnorm.heads import Head, HeadScores, Step, removed_by
from greedy_gnorm.journal import HEADER as RUN_HEADER
from greedy_gnorm.journal import Journal, differences, identity
from greedy_gnorm.loop import Protection, Task, prune_steps
from greedy_gnorm.measure import module_counts, parameter_count
from greedy_gnorm.objectives import with_reference
from greedy_gnorm.opening import (
    chosen,
    device_for,
    dtype_for,
    objective_for,
    opened,
    savings_for,
    with_own_modules,
    working_copy,
)
from greedy_gnorm.outcome import FORMATS, Run, check_format, write_outcome
from greedy_gnorm.problems import problem_of
from greedy_gnorm.rules import Situation, parse_rules
from greedy_gnorm.scores import score_with
from greedy_gnorm.sites import Sites, find_sites
from greedy_gnorm.speed import Latency, torch_latencies
from greedy_gnorm.surgery import remove

OnStep = Callable[[Step, int, int], None]
"""Called with each new step, the heads gone so far and the number that may go in all."""


def score(
    model: Any,
    data: Any,
    *,
    tokenizer: Any = None,
    score: str = "gnorm",
    **settings: Any,
) -> HeadScores:
    """Score every head of a model (object, folder or name) on data; the model is left as it was."""
    given = Settings.of(settings)
    function = score_with(score, given.score_options)
    objective = objective_for(function, given)
    if objective.needs_reference and function.objective is not None:
        raise GnormError(f"{objective.name} compares with the unpruned model, which is the one to score: it is zero.")
    source = model
    model, tokenizer = opened(model, tokenizer, given)
    batches = scoring_batches(model, tokenizer, data, given, needs_labels=function.asks_for_labels(objective))
    device, dtype = device_for(given), dtype_for(model, given)
    fits = next(model.parameters()).dtype == dtype and next(model.parameters()).device == device
    as_it_is = fits and given.device_map is None
    worked = with_own_modules(model) if as_it_is else working_copy(model, source, given)
    sites = find_sites(worked).use(savings_for(given))
    return function(sites, own_share(batches.to(device)), objective)


def prune(
    model: Any,
    tokenizer: Any,
    data: Any,
    *,
    eval_data: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_step: OnStep | None = None,
    format: str = FORMATS[0],
    latency: bool = True,
    push_to_hub: str | None = None,
    **settings: Any,
) -> Run:
    """Prune a copy of a model (object, folder or name); the result has the steps, the solution and the pruned model.

    `format="dense"` keeps the old shapes with zeros; with `out`, the speed before and after is measured.
    """
    given = Settings.of(settings)
    check_format(format)
    if push_to_hub is not None:
        if out is None:
            raise GnormError("To push a model to the hub, name a folder for it by out.")
        hub.check(push_to_hub)
    work = together(lambda: _prepared(model, tokenizer, data, eval_data, given))
    check_the_same(work.header)
    with ExitStack() as stack:
        journal: Journal | None = None

        def opened_lines() -> list[dict[str, Any]]:
            nonlocal journal
            if out is not None:
                journal = stack.enter_context(opened_journal(Path(out), work.header, resume=resume))
            return [] if journal is None else [step.to_json() for step in journal.steps]

        lines = of_first(opened_lines)
        history = [Step.from_json(line) for line in lines]
        steps = walk(work.sites, work.task, journal, history, on_step, work.limit)
        run = _solved(work, steps)
        if journal is None:
            return run
        if latency and given.device_map is None:
            run = replace(run, latencies=_latencies(work.model, run.model, given))
        write_outcome(run, journal, format)
        if push_to_hub is not None:
            hub.push(journal.folder / "model", push_to_hub)
        return run


@dataclass(frozen=True)
class Work:
    """A run before its first step: the model as it came, the copy that is cut, the task, what run.json says of it."""

    model: Any
    tokenizer: Any
    sites: Sites
    task: Task
    header: dict[str, Any]
    limit: int


def _prepared(model: Any, tokenizer: Any, data: Any, eval_data: Any, given: Settings) -> Work:
    strategy, score, objective = chosen(given)
    given_model, source = model, told_source(model)
    model, tokenizer = opened(model, tokenizer, given)
    labels = score.asks_for_labels(objective)
    scoring, evaluation = both_batches(model, tokenizer, data, eval_data, given, needs_labels=labels)
    device = device_for(given)
    sites = find_sites(working_copy(model, given_model, given)).use(savings_for(given))
    protection = Protection(parse_heads(given.protect, sites), given.min_heads)
    situation = situation_of(sites, protection)
    evaluation = evaluation.to(device)
    scoring = scoring.to(device).sharing(evaluation)
    rows = {
        "scoring": described(data, scoring),
        "evaluation": described(data if eval_data is None else eval_data, evaluation),
    }
    scoring, evaluation = own_share(scoring), own_share(evaluation)
    task = Task(
        with_reference(sites.model, scoring) if objective.needs_reference else scoring,
        evaluation,
        strategy,
        score,
        objective,
        parse_rules(given.stop, situation),
        protection,
        next(model.parameters()).element_size(),
    )
    header = run_header(model, source, rows, given)
    return Work(model, tokenizer, sites, task, header, task.rules.limit or situation.removable)


def check_the_same(header: dict[str, Any]) -> None:
    """Several processes must work on the same thing: each machine may have files of its own."""
    first, *others = of_all(identity(header))
    for place, other in enumerate(others, start=1):
        for name, was, now in differences(first, other):
            raise GnormError(f"Processes 0 and {place} work on different things: {name} is {was!r} and {now!r}.")


@contextmanager
def opened_journal(folder: Path, header: dict[str, Any], *, resume: bool) -> Iterator[Journal]:
    """The journal of a run in this folder, begun or gone on with, while no other process works there."""
    if not (resume and (folder / RUN_HEADER).exists()):
        Journal.check_free(folder)
    with writing_to(folder, RESUME), locked(folder):
        yield (Journal.resume if resume else Journal.begin)(folder, header)


def _latencies(before: Any, after: Any, given: Settings) -> list[Latency]:
    """The speed of the model as it came and of the solution, where and how the run computes."""
    device, dtype = device_for(given), dtype_for(before, given)
    return torch_latencies(*(copy.deepcopy(model).to(device, dtype) for model in (before, after)))


def walk(
    sites: Sites, task: Task, journal: Journal | None, history: Sequence[Step], on_step: OnStep | None, limit: int
) -> list[Step]:
    """All steps: those of an earlier run first (their heads removed), then new ones, journalled as they come."""
    steps = list(history)
    remove(sites, removed_by(steps))
    for step in prune_steps(sites, task, steps):
        steps.append(step)
        if journal is not None:
            journal.append(step)
        if on_step is not None:
            on_step(step, len(removed_by(steps)), limit)
    return steps


def _solved(work: Work, steps: list[Step]) -> Run:
    place = work.task.rules.solution(steps)
    solution = copy.deepcopy(work.model)
    before = module_counts(solution)
    remove(find_sites(solution), removed_by(steps[: place + 1]))
    return Run(steps, steps[place], solution.eval(), work.tokenizer, work.header, before)


def parse_heads(text: str | None, sites: Sites) -> frozenset[Head]:
    """`0.3,0.7,11` as heads: SITE.HEAD, or all heads of SITE."""
    heads: set[Head] = set()
    for part in (text or "").replace(" ", "").split(","):
        site, dot, index = part.partition(".")
        if not part:
            continue
        known = _small(site) and int(site) < len(sites)
        if not known or (dot and not (_small(index) and int(index) < sites[int(site)].total)):
            raise GnormError(
                f"protect: {part!r} names no head. Write SITE.HEAD or SITE; this model has {sites.shape[0]} sites "
                f"of {sites.shape[1]} heads, counted from 0."
            )
        numbers = [int(index)] if dot else range(sites[int(site)].total)
        heads |= {Head(int(site), number) for number in numbers}
    return frozenset(heads)


def _small(number: str) -> bool:
    return number.isdecimal() and len(number) < 10


def situation_of(sites: Sites, protection: Protection) -> Situation:
    survivors = sites.survivors()
    removable = list(protection.removable(survivors, survivors))
    if not removable:
        raise GnormError("No head can be removed: all are protected, or needed for min_heads.")
    parameters = parameter_count(sites.model)
    saved = sum(sites[head.site].parameters_per_head() for head in removable)
    return Situation(len(survivors), len(removable), parameters, parameters - saved, problem_of(sites.model).quality)
