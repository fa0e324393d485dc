"""The parameter table of a model, a configuration or a run, without loading weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.checkpoint import load_config, skeleton
from greedy_gnorm.model.modeling_pruned import RECORDS
from greedy_gnorm.model.sites import Sites, find_sites
from greedy_gnorm.model.sizes import module_counts
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.pruning.run import measure_of
from greedy_gnorm.records.journal import RUN_FILE, Journal
from greedy_gnorm.report.tables import SizeTable, stored_precision
from greedy_gnorm.units import Unit, removed_by


def parameter_table(name: str, removed: int | None, *, trust_remote_code: bool = False) -> SizeTable:
    """The table of a run in its own precision, or of a model folder, a configuration or a hub name as float32.

    After are the heads that the run or the configuration kept; with `removed`, so many fewer.
    """
    journal = Journal.read(Path(name)) if (Path(name) / RUN_FILE).exists() else None
    if journal is None:
        config = load_config(name, trust_remote_code=trust_remote_code)
        before, after = _unpruned(config), skeleton(config)
    else:
        config = load_config(journal.folder / "model", trust_remote_code=trust_remote_code)
        gone = [Unit(*unit) for unit in journal.header["model"]["removed"]]
        before = _without(_unpruned(config), gone)
        after = _without(_unpruned(config), [*gone, *removed_by(journal.steps[: _solution(journal) + 1])])
    if removed is not None:
        sites = find_sites(after)
        remove(sites, _any_units(sites, removed))
    counts = module_counts(before), module_counts(after)
    if journal is None or removed is not None:
        return SizeTable.of(*counts)
    measure, unpruned, solution = measure_of(journal.header), journal.steps[0], journal.steps[_solution(journal)]
    quality = measure.name, measure.of(unpruned), measure.of(solution)
    return SizeTable.of(*counts, stored_precision(journal.header, unpruned), quality)


def _unpruned(config: Any) -> Any:
    """The model of a configuration with all of its units, without weights."""
    whole = copy.deepcopy(config)
    for record in RECORDS.values():
        setattr(whole, record, {})
    return skeleton(whole)


def _without(model: Any, units: Sequence[Unit]) -> Any:
    remove(find_sites(model), units)
    return model


def _any_units(sites: Sites, count: int) -> list[Unit]:
    """So many of the units that are left: which ones makes no difference where all have one size."""
    units = sites.survivors()
    if not 0 <= count <= len(units):
        raise GnormError(f"--removed {count}: this model has {len(units)} heads.")
    if len({sites[unit.site].unit_cost().parameters for unit in units}) > 1:
        raise GnormError("--removed: the heads of this model differ in size, so their number does not give the table.")
    return units[:count]


def _solution(journal: Journal) -> int:
    if "result" not in journal.header:
        raise GnormError(f"The run in {journal.folder} is not finished: continue it with --resume.")
    return int(journal.header["result"]["solution"])
