"""Many methods x runs on one model: the same rows for all, everything shared that can be, each part a journal."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from greedy_gnorm import paper_figures
from greedy_gnorm.comparison import EXPERIMENT, Comparison, read_experiment, solutions, table
from greedy_gnorm.config import Settings
from greedy_gnorm.data import both_rows, is_ready, sampled, warn_of_overlap
from greedy_gnorm.distributed import alone, count, is_first, number, of_all, of_first, together
from greedy_gnorm.encoding import Row, encode
from greedy_gnorm.errors import DataError, GnormError, RunFolderError
from greedy_gnorm.evaluate import evaluate
from greedy_gnorm.figures import save
from greedy_gnorm.files import RESUME, is_trace, locked, whole_folder, write_json, write_text, writing_to
from greedy_gnorm.header import asked_for, described, run_header, told_source
from greedy_gnorm.heads import Head, Step, removed_by
from greedy_gnorm.journal import Journal, check_same
from greedy_gnorm.loop import Memory, Protection, Task
from greedy_gnorm.measure import as_csv, as_markdown
from greedy_gnorm.objectives import OBJECTIVES, with_reference
from greedy_gnorm.opening import chosen, device_for, dtype_for, opened, savings_for
from greedy_gnorm.report import write_report
from greedy_gnorm.rules import parse_rules
from greedy_gnorm.run import OnStep, check_the_same, situation_of, walk
from greedy_gnorm.scores import SCORES
from greedy_gnorm.sites import Sites, find_sites
from greedy_gnorm.strategies import GREEDY, RANDOM, STRATEGIES, methods_named
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
    _check_options(given, names)
    for name in names:
        chosen(_settings(given, Part(name, 0)))
    counts = {name: trajectories if name == RANDOM else runs for name in names}
    parts = [Part(name, run) for run in range(max(counts.values())) for name in names if run < counts[name]]
    folder = Path(of_first(lambda: str(_folder(Path(out), resume))))
    with writing_to(folder, RESUME), locked(folder) if is_first() else nullcontext():
        draws = of_first(lambda: _draws(folder, runs))
        bench = together(lambda: _bench(model, tokenizer, data, eval_data, given, names, draws))
        _warn_of_one_sample(bench, runs)
        check_the_same(bench.header)
        asked = {"methods": names, "runs": runs, "trajectories": trajectories, "draws": draws}
        about = {**bench.header, **asked}
        of_first(lambda: _begin(folder, about))
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
                walks.append([part.method, part.run, journal.header, [step.to_json() for step in steps]])
        found = {}
        for method, run, header, lines in (each for share in of_all(walks) for each in share):
            part = Part(method, run)
            found[part] = [Step.from_json(line) for line in lines]
            if is_first() and part not in journals:
                _keep(folder, part, header, found[part])
        curves = {name: [found[part] for part in parts if part.method == name] for name in names}
        comparison = Comparison(bench.header, curves)
        if is_first():
            _write(comparison, bench, next(iter(tasks.values())), folder)
    return comparison


def _settings(given: Settings, part: Part) -> Settings:
    """What a part is told: its method, its seed, and those of the score's options that its score has."""
    known = SCORES[STRATEGIES[part.method].score].defaults()
    options = [option for option in _options(given) if option.partition("=")[0] in known]
    return replace(given, method=part.method, seed=given.seed + part.run, score_options=",".join(options) or None)


def _options(given: Settings) -> list[str]:
    return [option for option in (given.score_options or "").replace(" ", "").split(",") if option]


def _check_options(given: Settings, names: Sequence[str]) -> None:
    for option in _options(given):
        if not any(option in _options(_settings(given, Part(name, 0))) for name in names):
            raise GnormError(f"No score of {', '.join(names)} has the option {option!r}.")


def _draws(folder: Path, runs: int) -> int:
    """For how many samples rows without splits are divided: as many as the comparison had runs when it began."""
    return int(read_experiment(folder).get("draws", runs)) if (folder / EXPERIMENT).exists() else runs


def _warn_of_one_sample(bench: Bench, runs: int) -> None:
    samples, there = bench.given.samples, len(bench.pool)
    if runs > 1 and (samples is None or samples >= there):
        warnings.warn(
            f"All runs score on the same {there} rows: their spread tells nothing. Give more rows, or fewer --samples.",
            stacklevel=3,
        )


def _begin(folder: Path, about: dict[str, Any]) -> None:
    """Say what is compared, if the folder holds nothing else: more methods and runs may come, not other rows."""
    if (folder / EXPERIMENT).exists():
        check_same("comparison", folder, read_experiment(folder), about)
    write_json(folder / EXPERIMENT, about)


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
    model: Any, tokenizer: Any, data: Any, eval_data: Any, given: Settings, names: Sequence[str], draws: int
) -> Bench:
    if is_ready(data) or is_ready(eval_data):
        raise DataError("A comparison draws its own samples: give rows, not ready batches.")
    source = told_source(model)
    model, tokenizer = opened(model, tokenizer, given)
    scores = [chosen(_settings(given, Part(name, 0)))[1:] for name in names]
    labels = any(score.asks_for_labels(objective) for score, objective in scores)
    pool, rows = both_rows(model, data, eval_data, given, needs_labels=labels, draws=draws)
    warn_of_overlap([row.words for row in pool], [row.words for row in rows])
    device = device_for(given)
    sites = find_sites(copy.deepcopy(model).to(device, dtype_for(model, given)))
    evaluation = encode(rows, model, tokenizer, given, "evaluation").to(device)
    told = {"evaluation": described(data if eval_data is None else eval_data, evaluation)}
    header = run_header(model, source, told, replace(given, score_options=None))
    header["config"]["score_options"] = given.score_options  # each score is given those that it has
    return Bench(model, tokenizer, sites, pool, evaluation, header, data, given, Memory())


def _task(bench: Bench, part: Part) -> Task:
    """The walk of one part: its own sample, the common rows to evaluate, what the others found out already."""
    given = _settings(bench.given, part)
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
    given = _settings(bench.given, part)
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
