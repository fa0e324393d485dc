"""Before a run: the method's parts, the model, where and how it computes."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from greedy_gnorm.checkpoint import load, load_tokenizer
from greedy_gnorm.config import Settings
from greedy_gnorm.errors import GnormError
from greedy_gnorm.objectives import OBJECTIVES, Objective
from greedy_gnorm.rules import check_names
from greedy_gnorm.savings import Savings
from greedy_gnorm.scores import Score, score_with
from greedy_gnorm.sites import find_sites
from greedy_gnorm.strategies import NEVER, STRATEGIES, Strategy


def chosen(given: Settings) -> tuple[Strategy, Score, Objective]:
    """The method's parts, before anything is loaded: a wrong name fails at once."""
    strategy = STRATEGIES[given.method].changed(given.recompute, given.heads_per_step)
    score = score_with(strategy.score, given.score_options)
    check_names(given.stop)
    objective = objective_for(score, given)
    if objective.needs_reference and score.objective is not None and strategy.recompute == NEVER:
        raise GnormError(
            f"{objective.name} is zero as long as no head is gone, so a score computed once would rank rounding "
            f"errors: take a greedy method, not {given.method}, or another objective."
        )
    return strategy, score, objective


def objective_for(score: Score, given: Settings) -> Objective:
    """What the user says, else the score's own."""
    return OBJECTIVES[given.objective or score.objective or next(iter(OBJECTIVES))]


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


def with_own_modules(model: Any) -> Any:
    """The same weights in a model of its own: what is hooked, switched or set there is not so in the caller's."""
    same: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    same |= {id(each): nn.Parameter(each.detach(), each.requires_grad) for each in model.parameters()}
    return copy.deepcopy(model, same)


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
    try:
        spread = load(
            source, dtype=dtype, trust_remote_code=given.trust_remote_code, device_map=places, offload_folder=folder
        )
    except BaseException:
        shutil.rmtree(folder)
        raise
    weakref.finalize(spread, shutil.rmtree, folder)
    return spread


def _places(text: str) -> Any:
    """`auto` and the like as they are, JSON as a dict of modules and devices."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        places = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GnormError(f"device_map is no JSON: {error}.") from error
    if not places or "meta" in places.values():
        raise GnormError(f"device_map {text} must name a place for every module: a GPU's number, cpu or disk.")
    return places


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
