"""The parameter table of a model, a configuration or a run, without loading weights."""

from __future__ import annotations

import copy
from pathlib import Path

from greedy_gnorm.checkpoint import load_config, skeleton
from greedy_gnorm.errors import GnormError
from greedy_gnorm.journal import HEADER as RUN_HEADER
from greedy_gnorm.journal import Journal
from greedy_gnorm.measure import SizeRow, module_counts, size_table
from greedy_gnorm.sites import find_sites
from greedy_gnorm.surgery import remove

Quality = tuple[str, float, float]


def model_size_table(
    name: str, removed: int | None, *, trust_remote_code: bool = False
) -> tuple[list[SizeRow], Quality | None]:
    """Rows before and after: after removing so many heads, or those that the folder says are gone."""
    folder = Path(name)
    quality = None
    if (folder / RUN_HEADER).exists():
        quality = _quality(folder)
        name = str(folder / "model")
    config = load_config(name, trust_remote_code=trust_remote_code)
    whole = copy.deepcopy(config)
    whole.pruned_heads = {}
    before = module_counts(skeleton(whole))
    model = skeleton(config)
    if removed is not None:
        sites = find_sites(model)
        survivors = sites.survivors()
        if not 0 <= removed <= len(survivors):
            raise GnormError(f"--removed {removed}: this model has {len(survivors)} heads.")
        remove(sites, survivors[:removed])  # which ones makes no difference: all heads are of one size
    return size_table(before, module_counts(model)), quality if removed is None else None


def _quality(folder: Path) -> Quality:
    journal = Journal.read(folder)
    if "result" not in journal.header:
        raise GnormError(f"The run in {folder} is not finished: go on with it by --resume.")
    measure = str(journal.header["quality"])
    before, after = journal.header["result"]["quality"][measure]
    return measure, before, after
