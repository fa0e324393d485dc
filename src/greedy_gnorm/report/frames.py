"""Results as tables of numbers (pandas)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import singledispatch

import numpy as np
from pandas import DataFrame, concat

from greedy_gnorm.comparison.analysis import Comparison
from greedy_gnorm.pruning.run import Run, sites_of
from greedy_gnorm.units import UNIT_WORDS, Scores, SiteInfo, Step, Vector, unit_names


@singledispatch
def table_of(result: object) -> DataFrame:
    """The numbers of a result."""
    raise TypeError(f"There is no table of {type(result).__name__}.")


@table_of.register
def _(run: Run) -> DataFrame:
    return _steps(run.steps, sites_of(run.header))


@table_of.register
def _(comparison: Comparison) -> DataFrame:
    sites, names = sites_of(comparison.header), ["method", "run"]
    frames = {
        (method, run): _steps(walk, sites)
        for method, walks in comparison.curves.items()
        for run, walk in enumerate(walks)
    }
    return concat(frames, names=names).reset_index(names).reset_index(drop=True)


@table_of.register
def _(scores: Scores) -> DataFrame:
    units = [(site.layer, UNIT_WORDS[site.kind], index) for site in scores.sites for index in range(site.units)]
    numbers: dict[str, Sequence[Vector]] = {"score": scores.vectors}
    if scores.logs is not None:
        numbers["log_score"] = scores.logs
    frame = DataFrame(units, columns=["layer", "kind", "index"], index=unit_names(scores.sites))
    for name, vectors in {**numbers, **scores.parts}.items():
        frame[name] = np.concatenate(list(vectors))
    return frame.rename_axis("unit")


def _steps(steps: Sequence[Step], sites: Sequence[SiteInfo]) -> DataFrame:
    """One row for each step: the units removed so far (in all and by kind), every measure, the known costs, seconds."""
    kinds = [kind for kind in UNIT_WORDS if any(site.kind == kind for site in sites)]
    gone, rows = Counter[str](), []
    for step in steps:
        gone.update(sites[unit.site].kind for unit in step.removed)
        rows.append(
            {
                "step": step.step,
                "removed": gone.total(),
                **{f"{UNIT_WORDS[kind]}s_removed": gone[kind] for kind in kinds},
                **step.quality,
                **step.cost.to_json(),
                "seconds": sum(step.seconds.values()),
            }
        )
    return DataFrame(rows)
