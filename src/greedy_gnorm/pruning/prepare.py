"""Preparing a run: its method, model, rows, device and precision."""

from __future__ import annotations

import copy
import importlib.util
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.data.loading import both_batches
from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.checkpoint import load, load_tokenizer
from greedy_gnorm.model.sites import Sites, find_sites
from greedy_gnorm.model.sizes import parameter_count
from greedy_gnorm.passes.processes import shard
from greedy_gnorm.pruning.loop import Plan, Protection
from greedy_gnorm.pruning.methods import METHODS, NEVER, Method
from greedy_gnorm.pruning.rules import Situation, check_names, parse_rules
from greedy_gnorm.scores import Score, score_with
from greedy_gnorm.settings import Savings, Settings
from greedy_gnorm.tasks.objectives import OBJECTIVES, Objective, with_reference
from greedy_gnorm.tasks.task import task_of
from greedy_gnorm.units import ATTENTION, Cost, Unit


@dataclass(frozen=True)
class Prepared:
    """A run before its first step: the unpruned model, the copy to prune, the plan, the rows of all processes."""

    model: Any
    tokenizer: Any
    sites: Sites
    plan: Plan
    rows: Mapping[str, tuple[Any, Batches]]  # for scoring and evaluation: the data as given, and its batches
    limit: int


def prepare_run(model: Any, tokenizer: Any, data: Any, eval_data: Any, settings: Settings) -> Prepared:
    """Load and check the inputs of a run, and plan it."""
    method, score, objective = resolve_method(settings)
    given_model = model
    model, tokenizer = load_inputs(model, tokenizer, settings)
    task = task_of(model)
    needs_labels = score.asks_for_labels(objective)
    scoring, evaluation = both_batches(model, tokenizer, task, data, eval_data, settings, needs_labels=needs_labels)
    device = device_for(settings)
    sites = find_sites(working_copy(model, given_model, settings)).use(savings_for(settings))
    protection = protection_for(settings, sites)
    situation = situation_of(sites, protection)
    evaluation = evaluation.to(device)
    scoring = scoring.to(device).sharing(evaluation)
    rows = {"scoring": (data, scoring), "evaluation": (data if eval_data is None else eval_data, evaluation)}
    own = shard(scoring)
    plan = Plan(
        with_reference(sites.model, own) if objective.needs_reference else own,
        shard(evaluation),
        method,
        score,
        objective,
        parse_rules(settings.stop, situation),
        protection,
        next(model.parameters()).element_size(),
    )
    return Prepared(model, tokenizer, sites, plan, rows, plan.rules.limit or situation.removable)


def resolve_method(given: Settings) -> tuple[Method, Score, Objective]:
    """Look up the method, score and objective before anything is loaded, so that a wrong name fails at once."""
    method = METHODS[given.method].changed(given.recompute, given.heads_per_step)
    score = score_with(method.score, given.score_options)
    check_names(given.stop)
    objective = objective_for(score, given)
    if objective.needs_reference and score.objective is not None and method.recompute == NEVER:
        raise GnormError(
            f"{objective.name} is zero until a head is removed, so a score that is computed once would rank rounding "
            f"errors: use a greedy method instead of {given.method}, or another objective."
        )
    return method, score, objective


def objective_for(score: Score, given: Settings) -> Objective:
    """The objective in the settings, else the default of the score."""
    return OBJECTIVES[given.objective or score.objective or next(iter(OBJECTIVES))]


def load_inputs(model: Any, tokenizer: Any, given: Settings) -> tuple[Any, Any]:
    """The model and the tokenizer, loaded if given as a folder or a name."""
    if isinstance(model, str | Path):
        tokenizer = tokenizer or model
        model = load(model, trust_remote_code=given.trust_remote_code)
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer, trust_remote_code=given.trust_remote_code)
    if not find_sites(model).survivors():
        raise GnormError("The model has no attention heads left.")
    return model, tokenizer


def copy_sharing_weights(model: Any) -> Any:
    """A copy of a model that shares its weights; hooks, modes and settings of the copy do not affect the original."""
    same: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    same |= {id(each): nn.Parameter(each.detach(), each.requires_grad) for each in model.parameters()}
    return copy.deepcopy(model, same)


def working_copy(model: Any, source: Any, given: Settings) -> Any:
    """The copy to score and prune: on one device, or loaded again across several devices and the disk."""
    dtype = dtype_for(model, given)
    if given.device_map is None:
        return copy.deepcopy(model).to(device_for(given), dtype)
    if not isinstance(source, str | Path):
        raise GnormError("device_map requires the model's folder or name, because weights are loaded piece by piece.")
    if importlib.util.find_spec("accelerate") is None:
        raise GnormError("device_map requires accelerate: pip install accelerate.")
    folder = tempfile.mkdtemp(prefix="gnorm-offload-")
    try:
        spread = load(
            source,
            dtype=dtype,
            trust_remote_code=given.trust_remote_code,
            device_map=given.device_map,
            offload_folder=folder,
        )
    except BaseException:
        shutil.rmtree(folder)
        raise
    weakref.finalize(spread, shutil.rmtree, folder)
    return spread


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
    """The precision to compute in: that of the settings, else the model's own, but at least float32."""
    if given.dtype != "auto":
        named: torch.dtype = getattr(torch, given.dtype)
        return named
    return torch.promote_types(next(model.parameters()).dtype, torch.float32)


def protection_for(settings: Settings, sites: Sites) -> Protection:
    """The heads that the user protects, and the minimum of every layer."""
    units = [unit for entry in settings.protect for unit in _protected_units(entry, sites)]
    return Protection(frozenset(units), settings.min_heads)


def _protected_units(entry: int | tuple[int, int], sites: Sites) -> list[Unit]:
    """All units of a layer, or one head of it, by the layer's number and not the site's."""
    layer, head = (entry, None) if isinstance(entry, int) else entry
    own = [site for site in sites if site.layer == layer]
    if not own:
        raise GnormError(f"protect: this model has no layer {layer}; its layers are 0 to {sites[-1].layer}.")
    if head is None:
        return [Unit(site.index, index) for site in own for index in range(site.total)]
    attention = [site for site in own if site.kind == ATTENTION]
    found = [Unit(site.index, head) for site in attention if head < site.total]
    if not found:
        most = max((site.total for site in attention), default=0)
        raise GnormError(f"protect: layer {layer} has no head {head}; its heads are 0 to {most - 1}.")
    return found


def situation_of(sites: Sites, protection: Protection) -> Situation:
    """What is known about a run before it starts."""
    survivors = sites.survivors()
    removable = list(protection.removable(survivors, survivors))
    if not removable:
        raise GnormError("No head can be removed: all are protected, or required by min_heads.")
    parameters = parameter_count(sites.model)
    saved = sum(sites[unit.site].unit_cost().parameters for unit in removable)
    return Situation(
        len(survivors), len(removable), Cost(parameters), Cost(parameters - saved), task_of(sites.model).measure
    )
