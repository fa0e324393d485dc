"""From a model and data to a pruned model and its record: what `gg.prune`, `gg.score` and the command line call."""

from __future__ import annotations

import copy
import importlib.util
import json
import platform
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from greedy_gnorm import hub
from greedy_gnorm.batches import Batches
from greedy_gnorm.checkpoint import load, load_tokenizer, weights_fingerprint
from greedy_gnorm.config import Settings
from greedy_gnorm.data import both_batches, scoring_batches
from greedy_gnorm.distributed import is_first, of_first, own_share
from greedy_gnorm.errors import GnormError, RunFolderError
from greedy_gnorm.files import locked
from greedy_gnorm.heads import Head, HeadScores, Step, removed_by
from greedy_gnorm.journal import HEADER as RUN_HEADER
from greedy_gnorm.journal import Journal
from greedy_gnorm.loop import Protection, Task, prune_steps
from greedy_gnorm.measure import module_counts, parameter_count
from greedy_gnorm.objectives import OBJECTIVES, Objective, with_reference
from greedy_gnorm.outcome import FORMATS, Run, check_format, write_outcome
from greedy_gnorm.problems import problem_of
from greedy_gnorm.rules import Situation, check_names, parse_rules
from greedy_gnorm.savings import Savings
from greedy_gnorm.scores import Score, score_with
from greedy_gnorm.sites import Sites, find_sites
from greedy_gnorm.speed import Latency, torch_latencies
from greedy_gnorm.strategies import STRATEGIES, Strategy
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
    source = model
    model, tokenizer = opened(model, tokenizer, given)
    batches = scoring_batches(model, tokenizer, data, given, needs_labels=function.asks_for_labels(objective))
    device, dtype = device_for(given), dtype_for(model, given)
    fits = next(model.parameters()).dtype == dtype and next(model.parameters()).device == device
    worked = model if fits and given.device_map is None else working_copy(model, source, given)
    sites = find_sites(worked).use(savings_for(given))
    batches = own_share(batches.to(device))
    if objective.needs_reference:
        batches = with_reference(sites.model, batches)
    return function(sites, batches, objective)


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
    with ExitStack() as stack:
        journal = None
        if out is not None and is_first():
            journal = stack.enter_context(opened_journal(Path(out), header, resume=resume))
        history = of_first(lambda: [] if journal is None else journal.steps)
        steps = walk(sites, task, journal, history, on_step, task.rules.limit or situation.removable)
        run = _solved(model, tokenizer, steps, task, header)
        if journal is None:
            return run
        if latency and given.device_map is None:
            run = replace(run, latencies=_latencies(model, run.model, given))
        write_outcome(run, journal, format)
        if push_to_hub is not None:
            hub.push(journal.folder / "model", push_to_hub)
        return run


@contextmanager
def opened_journal(folder: Path, header: dict[str, Any], *, resume: bool) -> Iterator[Journal]:
    """The journal of a run in this folder, begun or gone on with, while no other process works there."""
    if not (resume and (folder / RUN_HEADER).exists()):
        Journal.check_free(folder)
    try:
        with locked(folder):
            yield (Journal.resume if resume else Journal.begin)(folder, header)
    except (OSError, SafetensorError) as error:
        raise RunFolderError(
            f"Can't write to {folder}: {getattr(error, 'strerror', None) or error}. Steps that were made are safe: "
            f"--resume goes on."
        ) from error


def _latencies(before: Any, after: Any, given: Settings) -> list[Latency]:
    """The speed of the model as it came and of the solution, where and how the run computes."""
    device, dtype = device_for(given), dtype_for(before, given)
    return torch_latencies(*(copy.deepcopy(model).to(device, dtype) for model in (before, after)))


def chosen(given: Settings) -> tuple[Strategy, Score, Objective]:
    """The method's parts, before anything is loaded: a wrong name fails at once."""
    strategy = STRATEGIES[given.method].changed(given.recompute, given.heads_per_step)
    score = score_with(strategy.score, given.score_options)
    check_names(given.stop)
    return strategy, score, objective_for(score, given)


def objective_for(score: Score, given: Settings) -> Objective:
    """What the user says, else the score's own."""
    return OBJECTIVES[given.objective or score.objective or next(iter(OBJECTIVES))]


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


def _solved(model: Any, tokenizer: Any, steps: list[Step], task: Task, header: dict[str, Any]) -> Run:
    place = task.rules.solution(steps)
    solution = copy.deepcopy(model)
    before = module_counts(solution)
    remove(find_sites(solution), removed_by(steps[: place + 1]))
    return Run(steps, steps[place], solution.eval(), tokenizer, header, before)


def opened(model: Any, tokenizer: Any, given: Settings) -> tuple[Any, Any]:
    """The model and tokenizer themselves, where a folder or a name was given."""
    if isinstance(model, str | Path):
        tokenizer = tokenizer or model
        model = load(model, trust_remote_code=given.trust_remote_code)
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer, trust_remote_code=given.trust_remote_code)
    if not find_sites(model).survivors():
        raise GnormError("The model has no attention head left.")
    return model, tokenizer


def working_copy(model: Any, source: Any, given: Settings) -> Any:
    """The copy that is scored and cut: on one device, or loaded from its source over several and the disk."""
    dtype = dtype_for(model, given)
    if given.device_map is None:
        return copy.deepcopy(model).to(device_for(given), dtype)
    if not isinstance(source, str | Path):
        raise GnormError("device_map needs the model's folder or name: its weights are loaded piece by piece.")
    if importlib.util.find_spec("accelerate") is None:
        raise GnormError("device_map needs accelerate: pip install accelerate.")
    places = _places(given.device_map)
    folder = tempfile.mkdtemp(prefix="gnorm-offload-")
    spread = load(
        source, dtype=dtype, trust_remote_code=given.trust_remote_code, device_map=places, offload_folder=folder
    )
    weakref.finalize(spread, shutil.rmtree, folder)
    return spread


def _places(text: str) -> Any:
    """`auto` and the like as they are, JSON as a dict of modules and devices."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise GnormError(f"device_map is no JSON: {error}.") from error


def savings_for(given: Settings) -> Savings:
    return Savings.named(given.savings, given.cache_memory)


def device_for(given: Settings) -> torch.device:
    if given.device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(given.device)
        float(torch.zeros((), device=device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise GnormError(f"Can't compute on {given.device!r}: {str(error).splitlines()[0]}") from error
    return device


def dtype_for(model: nn.Module, given: Settings) -> torch.dtype:
    """The precision to work in: what the user says, else the model's own but never half."""
    if given.dtype != "auto":
        named: torch.dtype = getattr(torch, given.dtype)
        return named
    return torch.promote_types(next(model.parameters()).dtype, torch.float32)


def parse_heads(text: str | None, sites: Sites) -> frozenset[Head]:
    """`0.3,0.7,11` as heads: SITE.HEAD, or all heads of SITE."""
    heads: set[Head] = set()
    for part in (text or "").replace(" ", "").split(","):
        site, dot, index = part.partition(".")
        if not part:
            continue
        known = site.isdecimal() and int(site) < len(sites)
        if not known or (dot and not (index.isdecimal() and int(index) < sites[int(site)].total)):
            raise GnormError(
                f"protect: {part!r} names no head. Write SITE.HEAD or SITE; this model has {sites.shape[0]} sites "
                f"of {sites.shape[1]} heads, counted from 0."
            )
        numbers = [int(index)] if dot else range(sites[int(site)].total)
        heads |= {Head(int(site), number) for number in numbers}
    return frozenset(heads)


def situation_of(sites: Sites, protection: Protection) -> Situation:
    survivors = sites.survivors()
    removable = list(protection.removable(survivors, survivors))
    if not removable:
        raise GnormError("No head can be removed: all are protected, or needed for min_heads.")
    parameters = parameter_count(sites.model)
    saved = sum(sites[head.site].parameters_per_head() for head in removable)
    return Situation(len(survivors), len(removable), parameters, parameters - saved, problem_of(sites.model).quality)


def run_header(model: nn.Module, source: dict[str, Any], data: dict[str, Any], given: Settings) -> dict[str, Any]:
    """What run.json says before the first step; `source` is what `told_source` says of the model."""
    config: Any = model.config
    sites = find_sites(model)
    return {
        "model": {
            **source,
            "type": config.model_type,
            "weights": weights_fingerprint(model),
            "parameters": parameter_count(model),
            "shape": list(sites.shape),
            "sites": [site.name for site in sites],
            "applications": [site.applications for site in sites],
            "removed": [list(head) for head in sites.removed()],
        },
        **asked_for(data, given),
        "quality": problem_of(model).quality,
        "versions": versions(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def asked_for(data: dict[str, Any], given: Settings) -> dict[str, Any]:
    """The part of the header that differs between runs on one model."""
    score = score_with(STRATEGIES[given.method].score, given.score_options)
    config = {**given.to_json(), "objective": objective_for(score, given).name}
    return {"data": data, "config": config, "seed": given.seed}


def told_source(given: Any, word: str = "name") -> dict[str, Any]:
    """Where a model or data came from: a path or name, or the kind of an object, which no command can name."""
    if isinstance(given, str | Path):
        return {word: str(given)}
    return {word: type(given).__name__, "in_memory": True}


def described(source: Any, batches: Batches) -> dict[str, Any]:
    """Rows as the header tells them."""
    return {
        **told_source(source, "source"),
        "rows": batches.rows,
        "batches": len(batches),
        "truncated": batches.truncated,
        "fingerprint": batches.fingerprint,
    }


def versions() -> dict[str, str]:
    """What the numbers of a run depend on."""
    packages: Sequence[str] = (
        "greedy-gnorm",
        "torch",
        "transformers",
        "tokenizers",
        "datasets",
        "numpy",
        "scikit-learn",
    )
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}
