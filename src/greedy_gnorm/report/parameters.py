"""The parameter table of a model, a configuration or a run, without loading weights."""

from __future__ import annotations

import copy
from pathlib import Path

from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.checkpoint import load_config, skeleton
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.sizes import module_counts
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.records.journal import RUN_FILE, Journal
from greedy_gnorm.report.tables import ModuleSize, size_table
from greedy_gnorm.units import Unit, by_site

Quality = tuple[str, float, float]


def model_size_table(
    name: str, removed: int | None, *, trust_remote_code: bool = False
) -> tuple[list[ModuleSize], Quality | None]:
    """Rows before and after: after removing so many heads, or those that the folder says are gone."""
    folder = Path(name)
    quality, gone_before = None, dict[int, list[int]]()
    if (folder / RUN_FILE).exists():
        journal = Journal.read(folder)
        quality = _quality(journal)
        gone_before = by_site(Unit(*head) for head in journal.header["model"]["removed"])
        name = str(folder / "model")
    config = load_config(name, trust_remote_code=trust_remote_code)
    whole = copy.deepcopy(config)
    whole.pruned_heads = gone_before
    before = module_counts(skeleton(whole))
    model = skeleton(config)
    if removed is not None:
        sites = find_sites(model)
        survivors = sites.survivors()
        if not 0 <= removed <= len(survivors):
            raise GnormError(f"--removed {removed}: this model has {len(survivors)} heads.")
        remove(sites, survivors[:removed])  # which ones makes no difference: all heads are of one size
    return size_table(before, module_counts(model)), quality if removed is None else None


def _quality(journal: Journal) -> Quality:
    if "result" not in journal.header:
        raise GnormError(f"The run in {journal.folder} is not finished: go on with it by --resume.")
    measure = str(journal.header["quality"])
    before, after = journal.header["result"]["quality"][measure]
    return measure, before, after
