"""Preparing a run: its method, model, rows, device and precision."""

from __future__ import annotations

import copy
import importlib.util
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.data.sets import (
    CALIBRATION,
    EVALUATION,
    SCORING,
    TEST,
    run_batches,
    warn_of_few_tokens,
)
from greedy_gnorm.errors import DataError, GnormError, UnsupportedModel
from greedy_gnorm.model.checkpoint import load, load_tokenizer
from greedy_gnorm.model.families import image_tokens, recorded_group_queries
from greedy_gnorm.model.groups import choose_group_queries, set_group_queries
from greedy_gnorm.model.modes import convert
from greedy_gnorm.model.padding import lacks_padding, set_padding
from greedy_gnorm.model.sites import UNIT_PLURALS, Sites, find_sites
from greedy_gnorm.passes.calibration import Calibration
from greedy_gnorm.passes.evaluation import LABELS, with_drawn_labels, with_predictions
from greedy_gnorm.passes.processes import shard
from greedy_gnorm.phases import phase
from greedy_gnorm.pruning.budget import Budget, check_targets, parse_budget
from greedy_gnorm.pruning.costs import Costs, Times, measured_times, shape_for
from greedy_gnorm.pruning.loop import Plan, Protection
from greedy_gnorm.pruning.methods import DISTILL, METHODS, Method, resolve_method
from greedy_gnorm.pruning.rules import Rules, Situation, compression_rules, parse_rules
from greedy_gnorm.pruning.swaps import check_exchanges
from greedy_gnorm.recovery.distillation import Distillation
from greedy_gnorm.recovery.least_squares import MEAN, SOLVERS, Recovery, check_recovery
from greedy_gnorm.settings import TARGETS, Savings, Settings
from greedy_gnorm.tasks.objectives import with_reference
from greedy_gnorm.tasks.task import AGREEMENT, Task, task_of, uses_own_labels
from greedy_gnorm.units import ATTENTION, FFN, Measure, Unit

MAX_DROP = 0.01
"""The quality that a compression without a target may lose."""


@dataclass(frozen=True)
class Prepared:
    """A run before its first step: the unpruned model, the copy to prune, the plan, the rows of all processes.

    `test` are the rows that the solution is reported on, if they are not those that steps are evaluated on.
    """

    model: Any
    tokenizer: Any
    sites: Sites
    plan: Plan
    rows: Mapping[str, tuple[Any, Batches]]  # by use: the data as given, and its batches
    limit: int
    test: Batches | None = None


def prepare_run(
    model: Any, tokenizer: Any, data: Any, eval_data: Any, settings: Settings, times: Times | None = None
) -> Prepared:
    """Load and check the inputs of a run, and plan it; `times` are those that a run to be resumed has measured."""
    method, score, objective = resolve_method(settings)
    check_targets(settings)
    given_model = model
    model, tokenizer = load_inputs(model, tokenizer, settings, units_for(settings))
    if method.swap:
        check_exchanges(task_of(model))
    with phase("Reading rows"):
        sets = load_sets(model, tokenizer, data, eval_data, settings)
    sites = find_sites(working_copy(model, given_model, settings), units_for(settings)).use(savings_for(settings))
    device = device_for(settings)
    sets = {use: batches.to(device) for use, batches in sets.items()}
    if uses_own_labels(task_of(model), settings):
        sets[SCORING] = with_drawn_labels(sites.model, sets[SCORING])
        sets |= {use: with_predictions(sites.model, sets[use]) for use in (EVALUATION, TEST) if use in sets}
    else:
        sets[SCORING] = sets[SCORING].sharing(sets[EVALUATION])
        if score.draws_labels:
            sets[SCORING] = with_drawn_labels(sites.model, sets[SCORING])
    own = shard(sets[SCORING])
    measure = quality_measure(sites.model, settings, sets[EVALUATION])
    check_judged(task_of(model), sets, measure)
    protection, costs = protection_for(settings, sites), costs_for(settings, sites, model, sets, times)
    situation = situation_of(sites, protection, costs, measure)
    budget = rules = None
    if method.in_rounds:
        budget = parse_budget(settings, costs, sites, removable_units(sites, protection))
        rules = rules_for(settings, budget, measure)
    plan = Plan(
        with_reference(sites.model, own) if objective.needs_reference or method.look_ahead > 1 else own,
        shard(sets[EVALUATION]),
        method,
        score,
        objective,
        rules or parse_rules(settings.stop, situation),
        protection,
        costs,
        budget,
        recovery_for(method, sites, sets, settings),
    )
    last = TEST if TEST in sets else EVALUATION  # the rows that eval_data gives
    rows = {use: (eval_data if use == last and eval_data is not None else data, sets[use]) for use in sets}
    test = shard(sets[TEST]) if TEST in sets else None
    limit = plan.rules.limit or situation.removable
    return Prepared(model, tokenizer, sites, plan, rows, limit if budget is None else len(budget.schedule), test)


def load_sets(model: Any, tokenizer: Any, data: Any, eval_data: Any, settings: Settings) -> dict[str, Batches]:
    """The rows of a run by use, with calibration rows where layers are fitted."""
    method, score, objective = resolve_method(settings)
    task = task_of(model)
    needs_labels = score.asks_for_labels(objective) and not uses_own_labels(task, settings)
    return run_batches(
        model, tokenizer, task, data, eval_data, settings,
        needs_labels=needs_labels, calibrated=method.recover != "none",
    )  # fmt: skip


def units_for(settings: Settings) -> str:
    """What a run removes: what the user asks for, else the method's own."""
    return settings.units or METHODS[settings.method].units


def rules_for(settings: Settings, budget: Budget, measure: Measure) -> Rules:
    """The end of a compression; without a target, one point of quality may be lost."""
    drop = settings.max_drop
    if drop is None and not any(getattr(settings, name) is not None for name in TARGETS):
        drop = MAX_DROP
    text = " and ".join(target.text for target in budget.targets)
    # Milliseconds of a model are put together from those of its widths; the solution is timed at the end
    word = "predicted" if any(target.part == "milliseconds" for target in budget.targets) else "reached"
    return compression_rules(lambda step: budget.reached(step.cost), drop, text, measure, word)


def quality_measure(model: Any, settings: Settings, rows: Batches) -> Measure:
    """The measure that rules follow on these rows: the one that the user names, else the task's own, or the agreement
    with the unpruned model where scores use its own labels."""
    task = task_of(model)
    if settings.labels == "own" and settings.metric in (None, AGREEMENT) and not task.own_labels:
        return replace(task.measure(task.agreement), name=AGREEMENT)
    return task.measure(settings.metric, rows)


def check_judged(task: Task, sets: Mapping[str, Batches], measure: Measure) -> None:
    """Refuse a measure that needs labels on rows without them."""
    if TEST in sets and task.own_labels and measure not in task.offered_metrics(sets[TEST]):
        raise DataError(
            f"Measuring {measure.name} requires scores, but the test rows have none: choose another --metric."
        )
    if measure.name != AGREEMENT and any(
        LABELS not in sets[use].judged_by for use in (EVALUATION, TEST) if use in sets
    ):
        raise DataError(
            f"Measuring {measure.name} requires labels, but the evaluation rows have none: leave out --metric for the "
            f"agreement with the unpruned model."
        )


def costs_for(
    settings: Settings, sites: Sites, model: Any, sets: Mapping[str, Batches], times: Times | None = None
) -> Costs:
    """What is counted: parameters, multiplications, and measured times where a target asks for them."""
    size = next(model.parameters()).element_size()
    shape, fixed = shape_for(settings.shape, sets[EVALUATION]), image_tokens(model.config)
    if fixed is not None and shape.tokens != fixed:
        raise GnormError(f"shape {shape}: an image has {fixed} tokens here. State the number of images alone.")
    if times is None and (settings.speedup is not None or settings.latency is not None):
        with phase("Measuring widths"):
            times = measured_times(sites, shape)
    return Costs(sites, size, shape, times)


def recovery_for(method: Method, sites: Sites, sets: Mapping[str, Batches], settings: Settings) -> Recovery | None:
    """What fits the layers of the pruned model again, if anything does, and trains it, if asked.

    The model is still unpruned.
    """
    if method.recover == "none":
        return None
    check_recovery(method.fit, sites)
    rows, original = sets[CALIBRATION], find_sites(copy_sharing_weights(sites.model))
    if method.fit != MEAN:
        warn_of_few_tokens(rows, max(len(site.survivors) * site.output_size for site in original), settings)
    training = Distillation(original, rows, settings.recover_steps) if method.recover == DISTILL else None
    return Recovery(method.fit, SOLVERS[method.fit], Calibration(original, shard(rows)), training=training)


def load_inputs(model: Any, tokenizer: Any, given: Settings, units: str = "heads") -> tuple[Any, Any]:
    """The model and the tokenizer, loaded if given as a folder or a name."""
    with phase("Loading the model"):
        if isinstance(model, str | Path):
            tokenizer = tokenizer or model
            model = load(model, trust_remote_code=given.trust_remote_code)
        if isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(tokenizer, config=model.config, trust_remote_code=given.trust_remote_code)
    if lacks_padding(model, tokenizer):
        model, tokenizer = copy_sharing_weights(model), copy.deepcopy(tokenizer)
        set_padding(model, tokenizer)
    mode = choose_group_queries(model.config, given.group_queries)
    if mode != recorded_group_queries(model.config):
        model = copy_sharing_weights(model)
        set_group_queries(model.config, mode)
    sites = find_sites(model, units)
    if units == "both" and not any(site.kind == FFN for site in sites):
        raise UnsupportedModel(
            f"It is not known where {model.config.model_type} models keep their neurons: use --units heads."
        )
    if not sites.survivors():
        raise GnormError(f"The model has no {UNIT_PLURALS[units]} left.")
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
        return convert(copy.deepcopy(model), device_for(given), dtype)
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
    spread.config.pad_token_id = model.config.pad_token_id
    set_group_queries(spread.config, recorded_group_queries(model.config))
    weakref.finalize(spread, shutil.rmtree, folder)
    return spread


def on_device(model: Any, given: Settings) -> Any:
    """The model on the device and in the precision of the settings: itself if it is there already, else a copy."""
    device, dtype = device_for(given), dtype_for(model, given)
    first = next(model.parameters())
    return model if (first.device, first.dtype) == (device, dtype) else convert(copy.deepcopy(model), device, dtype)


def savings_for(given: Settings) -> Savings:
    """The savings that are asked for; where a step changes all layers, nothing is kept for the next one."""
    method = METHODS[given.method].changed(given)
    one_layer = method.recover == "none" and not method.in_rounds
    return replace(Savings.named(given.savings, given.cache_memory), between_steps=one_layer)


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


def removable_units(sites: Sites, protection: Protection) -> list[Unit]:
    """The units that may be removed in all."""
    survivors = sites.survivors()
    removable = list(protection.removable(survivors, survivors))
    if not removable:
        raise GnormError("No head can be removed: all are protected, or required by min_heads.")
    return removable


def situation_of(sites: Sites, protection: Protection, costs: Costs, measure: Measure) -> Situation:
    """What is known about a run before it starts."""
    removable = removable_units(sites, protection)
    return Situation(len(sites.survivors()), len(removable), costs.of(sites), costs.without(sites, removable), measure)
