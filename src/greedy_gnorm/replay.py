"""Any point of a recorded run as a model, without scoring again."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from greedy_gnorm.checkpoint import load, load_tokenizer, weights_fingerprint
from greedy_gnorm.errors import GnormError
from greedy_gnorm.heads import removed_by
from greedy_gnorm.journal import HEADER, Journal, read_header
from greedy_gnorm.measure import module_counts
from greedy_gnorm.outcome import FORMATS, Run, check_format, write_outcome
from greedy_gnorm.run import opened_journal
from greedy_gnorm.sites import find_sites
from greedy_gnorm.speed import torch_latencies
from greedy_gnorm.surgery import remove


def take_step(
    folder: str | Path,
    step: int,
    *,
    out: str | Path,
    model: str | Path | None = None,
    format: str = FORMATS[0],
    latency: bool = True,
    trust_remote_code: bool = False,
) -> Run:
    """Write the model that the run in `folder` had after `step`, with its record up to there, to the folder `out`.

    `model` says where the run's model lies, if not where it lay; the rest is as for `prune`.
    """
    check_format(format)
    journal = Journal.read(Path(folder))
    last = len(journal.steps) - 1
    if not 0 <= step <= last:
        raise GnormError(f"There is no step {step} in {folder}: its steps go from 0 to {last}.")
    source = _source(journal, model)
    whole = load(source, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    was, now = journal.header["model"]["weights"], weights_fingerprint(whole)
    if was != now:
        raise GnormError(
            f"{source} is not the model of the run in {folder}: the fingerprint of its weights is {now}, not {was}."
        )
    steps = [replace(each, stop=None) for each in journal.steps[: step + 1]]
    steps[-1] = replace(steps[-1], stop=f"step {step} of {last}, taken from {folder}")
    pruned = copy.deepcopy(whole)
    remove(find_sites(pruned), removed_by(steps))
    header = {name: value for name, value in journal.header.items() if name != "result"}
    header["taken"] = {"run": str(folder), "step": step}
    with opened_journal(Path(out), header, resume=_half_taken(Path(out))) as taken:
        for each in steps[len(taken.steps) :]:
            taken.append(each)
        times = torch_latencies(whole, pruned) if latency else []
        run = Run(steps, steps[-1], pruned, tokenizer, taken.header, module_counts(whole), times)
        write_outcome(run, taken, format)
    return run


def _half_taken(out: Path) -> bool:
    """Whether a step was being taken into this folder when the process ended."""
    if not (out / HEADER).exists():
        return False
    header = read_header(out / HEADER)
    return "taken" in header and "result" not in header


def _source(journal: Journal, model: str | Path | None) -> Any:
    if model is None and journal.header["model"].get("in_memory"):
        raise GnormError(
            f"The run in {journal.folder} pruned a model given in Python: save that model and name its folder."
        )
    return model or journal.header["model"]["name"]
