"""Steps as a table of numbers (pandas)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from greedy_gnorm.units import UNIT_WORDS, SiteInfo, Step

if TYPE_CHECKING:
    from pandas import DataFrame


def frame_of(steps: Sequence[Step], sites: Sequence[SiteInfo]) -> DataFrame:
    """One row for each step: the units removed so far (in all and by kind), every measure, the known costs, seconds."""
    from pandas import DataFrame

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
