"""The parameter table of a model, a configuration or a run, without loading weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.checkpoint import load_config, skeleton
from greedy_gnorm.model.families import GROUP_QUERIES, WHOLE
from greedy_gnorm.model.groups import set_group_queries
from greedy_gnorm.model.modeling_pruned import RECORDS
from greedy_gnorm.model.sites import Sites, family_of, find_sites
from greedy_gnorm.model.sizes import module_counts
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.pruning.run import sites_of, units_of
from greedy_gnorm.records.journal import RUN_FILE, Journal
from greedy_gnorm.report.tables import FLOAT32, Quality, SizeTable, stored_precision
from greedy_gnorm.tasks.task import measure_of
from greedy_gnorm.units import Unit, removed_by


def parameter_table(name: str, removed: int | None, *, trust_remote_code: bool = False) -> SizeTable:
    """The table of a run in its own precision, or of a model folder, a configuration or a hub name as float32.

    After are the heads that the run or the configuration kept; with `removed`, so many fewer.
    """
    precision, quality = FLOAT32, None
    if (Path(name) / RUN_FILE).exists():
        journal = Journal.read(Path(name))
        precision, quality = stored_precision(journal.header, journal.steps[0]), _quality(journal)
        before, after = _models_of_run(journal, trust_remote_code=trust_remote_code)
    else:
        config = load_config(name, trust_remote_code=trust_remote_code)
        before, after = _unpruned(config), skeleton(config)
    if removed is not None:
        quality, sites = None, find_sites(after, "heads")
        remove(sites, _any_units(sites, removed))
    return SizeTable.of(module_counts(before), module_counts(after), precision, quality)


def _models_of_run(journal: Journal, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """The model that a run began with and its solution, without weights."""
    config = load_config(journal.folder / "model", trust_remote_code=trust_remote_code)
    gone = [Unit(*unit) for unit in journal.header["model"]["removed"]]
    removed = removed_by(journal.steps[: int(journal.header["result"]["solution"]) + 1])
    widths = {site.kind: site.units for site in sites_of(journal.header)}
    set_group_queries(config, journal.header["model"].get(GROUP_QUERIES, WHOLE))
    for row in family_of(config).rows(config):
        if row.kind in widths and row.plain is not None:  # a uniform result has its own width there
            for name, value in row.plain(config, widths[row.kind]).items():
                setattr(config, name, value)
    models = _unpruned(config), _unpruned(config)
    for model, units in zip(models, (gone, [*gone, *removed]), strict=True):
        remove(find_sites(model, units_of(journal.header)), units)
    return models


def _unpruned(config: Any) -> Any:
    """The model of a configuration with all of its units, without weights."""
    whole = copy.deepcopy(config)
    for record in RECORDS.values():
        setattr(whole, record, {})
    return skeleton(whole)


def _any_units(sites: Sites, count: int) -> list[Unit]:
    """So many of the units that are left: which ones makes no difference where all have one size."""
    units = sites.survivors()
    if not 0 <= count <= len(units):
        raise GnormError(f"--removed {count}: this model has {len(units)} heads.")
    if len({sites[unit.site].unit_cost().parameters for unit in units}) > 1:
        raise GnormError("--removed: the heads of this model differ in size, so their number does not give the table.")
    return units[:count]


def _quality(journal: Journal) -> Quality:
    if "result" not in journal.header:
        raise GnormError(f"The run in {journal.folder} is not finished: continue it with --resume.")
    measure = measure_of(journal.header)
    before, after = (journal.steps[step] for step in (0, int(journal.header["result"]["solution"])))
    distilled = journal.header["result"].get("distilled")
    reached = measure.of(after) if distilled is None else float(distilled["quality"][measure.name][1])
    return measure.name, measure.of(before), reached
