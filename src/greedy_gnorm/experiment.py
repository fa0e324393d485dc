"""Many methods x runs on one model: the same rows for all, everything shared that can be, each part a journal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from greedy_gnorm import paper_figures
from greedy_gnorm.comparison import EXPERIMENT, Comparison, solutions, table
from greedy_gnorm.config import Settings
from greedy_gnorm.data import both_rows, is_ready, sampled, warn_of_overlap
from greedy_gnorm.distributed import alone, count, is_first, number, of_all, of_first
from greedy_gnorm.encoding import Row, encode
from greedy_gnorm.errors import DataError, GnormError, RunFolderError
from greedy_gnorm.evaluate import evaluate
from greedy_gnorm.figures import GREEDY, RANDOM, save
from greedy_gnorm.files import RESUME, is_trace, locked, whole_folder, write_json, write_text, writing_to
from greedy_gnorm.header import asked_for, described, run_header, told_source
from greedy_gnorm.heads import Head, Step, removed_by
from greedy_gnorm.journal import Journal
from greedy_gnorm.loop import Memory, Protection, Task
from greedy_gnorm.measure import as_csv, as_markdown
from greedy_gnorm.objectives import OBJECTIVES, with_reference
from greedy_gnorm.opening import chosen, device_for, dtype_for, opened, savings_for
from greedy_gnorm.report import write_report
from greedy_gnorm.rules import parse_rules
from greedy_gnorm.run import OnStep, situation_of, walk
from greedy_gnorm.sites import Sites, find_sites
from greedy_gnorm.strategies import methods_named
from greedy_gnorm.surgery import remove

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
    evaluation: Any
    header: dict[str, Any]
    source: Any
    given: Settings
    memory: Memory


def compare(
    model: Any,
    tokenizer: Any,
    data: Any,
    *,
    out: str | Path,
    methods: str | Sequence[str] = "paper",
    runs: int = 3,
    trajectories: int = 25,
    eval_data: Any = None,
    resume: bool = False,
    on_step: OnPartStep | None = None,
    **settings: Any,
) -> Comparison:
    """Walk every method down to the last head, several times, and put the curves side by side in a folder."""
    given = Settings.of({**settings, "stop": ("all",)})
    if given.device_map is not None:
        raise GnormError("A comparison works on copies of a model that fits one device: leave device_map away.")
    if runs < 1 or trajectories < 1:
        raise GnormError("A comparison needs at least 1 run and 1 random trajectory.")
    names = methods_named(methods)
    for name in names:
        chosen(replace(given, method=name))
    counts = {name: trajectories if name == RANDOM else runs for name in names}
    parts = [Part(name, run) for run in range(max(counts.values())) for name in names if run < counts[name]]
    folder = Path(of_first(lambda: str(_folder(Path(out), resume))))
    with writing_to(folder, RESUME), locked(folder) if is_first() else nullcontext():
        bench = _bench(model, tokenizer, data, eval_data, given, names, runs)
        about = {**bench.header, "methods": names, "runs": runs, "trajectories": trajectories}
        of_first(lambda: write_json(folder / EXPERIMENT, about))
        if count() > 1:
            _measure_the_ends(bench)
        # Runs of one number share their scoring sample, so they share a process too
        own = [part for part in parts if part.run % count() == number()]
        tasks = {part: _task(bench, part) for part in own}
        journals = {part: _journal(bench, part, tasks[part], folder) for part in own}
        for part in own:
            _remember(bench, tasks[part], journals[part].steps)
        walks: list[Any] = []
        with alone():
            for part in own:
                sites = find_sites(copy.deepcopy(bench.sites.model)).use(savings_for(given))
                told = None if on_step is None else _for_part(on_step, part)
                journal = journals[part]
                steps = walk(sites, tasks[part], journal, journal.steps, told, len(sites.survivors()))
                walks.append([part.method, part.run, [step.to_json() for step in steps]])
        found = {
            Part(method, run): [Step.from_json(line) for line in lines]
            for share in of_all(walks)
            for method, run, lines in share
        }
        curves = {name: [found[part] for part in parts if part.method == name] for name in names}
        comparison = Comparison(bench.header, curves)
        if is_first():
            _write(comparison, bench, next(iter(tasks.values())), folder)
    return comparison


def _measure_the_ends(bench: Bench) -> None:
    """The quality with all heads and with none, where every walk begins and ends: measured once, for all processes."""
    none = find_sites(copy.deepcopy(bench.sites.model))
    remove(none, none.survivors())
    for sites in (bench.sites, none):
        gone = frozenset(sites.removed())

        def measured(sites: Sites = sites) -> Mapping[str, float]:
            with alone():
                return evaluate(sites, bench.evaluation)

        bench.memory.quality[gone] = of_first(measured)


def _write(comparison: Comparison, bench: Bench, task: Task, folder: Path) -> None:
    """Tables, figures and the page; the change of gradients is shown for the head that Greedy-Gnorm removes first."""
    with whole_folder(folder / "tables") as tables:
        for name, (header, cells) in (("comparison", table(comparison)), ("solutions", solutions(comparison))):
            write_text(tables / f"{name}.csv", as_csv(header, cells))
            write_text(tables / f"{name}.md", as_markdown(header, cells))
    with whole_folder(folder / "figures") as figures:
        paper_figures.write_all(comparison, figures)
        if GREEDY in comparison.curves:
            (head, *_) = removed_by(comparison.curves[GREEDY][0])
            changes = paper_figures.gradient_change(bench.sites, task.scoring, OBJECTIVES["logit-norm"], head)
            save(paper_figures.gradient_change_figure(changes, head), figures / "gradient-change")
    write_report([folder])


def _folder(folder: Path, resume: bool) -> Path:
    """A new or empty folder, or that of a comparison to go on with."""
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        held = any(not is_trace(path) for path in folder.iterdir())
    if held and not (folder / EXPERIMENT).exists():
        raise RunFolderError(f"{folder} is not empty and holds no comparison: name another folder.")
    if held and not resume:
        raise RunFolderError(f"{folder} holds a comparison already: go on with it by --resume, or name another folder.")
    return folder


def _bench(
    model: Any, tokenizer: Any, data: Any, eval_data: Any, given: Settings, names: Sequence[str], runs: int
) -> Bench:
    if is_ready(data) or is_ready(eval_data):
        raise DataError("A comparison draws its own samples: give rows, not ready batches.")
    source = told_source(model)
    model, tokenizer = opened(model, tokenizer, given)
    scores = [chosen(replace(given, method=name))[1:] for name in names]
    labels = any(score.asks_for_labels(objective) for score, objective in scores)
    pool, rows = both_rows(model, data, eval_data, given, needs_labels=labels, draws=runs)
    warn_of_overlap([row.words for row in pool], [row.words for row in rows])
    device = device_for(given)
    sites = find_sites(copy.deepcopy(model).to(device, dtype_for(model, given)))
    evaluation = encode(rows, model, tokenizer, given, "evaluation").to(device)
    told = {"evaluation": described(data if eval_data is None else eval_data, evaluation)}
    header = run_header(model, source, told, given)
    return Bench(model, tokenizer, sites, pool, evaluation, header, data, given, Memory())


def _task(bench: Bench, part: Part) -> Task:
    """The walk of one part: its own sample, the common rows to evaluate, what the others found out already."""
    given = replace(bench.given, method=part.method, seed=bench.given.seed + part.run)
    strategy, score, objective = chosen(given)
    rows = sampled(bench.pool, given.samples, given.seed)
    scoring = encode(rows, bench.model, bench.tokenizer, given).to(bench.evaluation.items[0].inputs["input_ids"].device)
    scoring = scoring.sharing(bench.evaluation)
    if objective.needs_reference:
        scoring = with_reference(bench.sites.model, scoring)
    rules = parse_rules(given.stop, situation_of(bench.sites, Protection()))
    size = next(bench.model.parameters()).element_size()
    return Task(scoring, bench.evaluation, strategy, score, objective, rules, Protection(), size, bench.memory)


def _journal(bench: Bench, part: Part, task: Task, folder: Path) -> Journal:
    given = replace(bench.given, method=part.method, seed=bench.given.seed + part.run)
    data = {"scoring": described(bench.source, task.scoring), **bench.header["data"]}
    return Journal.resume(folder / "parts" / str(part), {**bench.header, **asked_for(data, given)})


def _remember(bench: Bench, task: Task, steps: Sequence[Step]) -> None:
    """Take what an earlier session of the comparison found out from its journal."""
    start = frozenset(bench.sites.removed())
    for place, step in enumerate(steps):
        before: frozenset[Head] = start | frozenset(removed_by(steps[:place]))
        bench.memory.quality[before | frozenset(step.removed)] = step.quality
        if step.scores is not None and task.strategy.scores_at(step.step):
            bench.memory.scores[task.way_of_scoring, before] = step.scores


def _for_part(on_step: OnPartStep, part: Part) -> OnStep:
    def told(step: Step, gone: int, limit: int) -> None:
        on_step(part, step, gone, limit)

    return told
