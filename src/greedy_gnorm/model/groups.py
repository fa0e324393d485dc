"""What is removed where several query heads share a key/value head: whole groups, or one query head from each group."""

from __future__ import annotations

from typing import Any

from greedy_gnorm.errors import GnormError, UnsupportedModel
from greedy_gnorm.model.families import EACH, GROUP_QUERIES, WHOLE, query_heads, recorded_group_queries
from greedy_gnorm.model.modeling_pruned import RECORDS
from greedy_gnorm.model.sites import family_of
from greedy_gnorm.units import ATTENTION

MODES = (WHOLE, EACH)


def choose_group_queries(config: Any, asked: str | None) -> str:
    """The mode for a model: the one that is asked for, else the one that its configuration records.

    A model can't be pruned in both modes, and query heads can only be taken from groups that have several.
    """
    if asked not in (None, *MODES):
        raise GnormError(f"Unknown group_queries {asked!r}. Choose from: {', '.join(MODES)}.")
    recorded = recorded_group_queries(config)
    chosen = asked or recorded
    if chosen != recorded and getattr(config, RECORDS[ATTENTION], None):
        raise GnormError(
            f"This model was pruned with --group-queries {recorded}, so it can't be pruned on with {chosen}."
        )
    if chosen == EACH and family_of(config).each_group is None:
        raise UnsupportedModel(
            f"--group-queries {EACH}: {config.model_type} models have no groups of query heads; leave it out."
        )
    if chosen == EACH and query_heads(config) == 1:
        raise UnsupportedModel(
            f"--group-queries {EACH}: every query head of this model has its own key and value; leave it out."
        )
    return chosen


def set_group_queries(config: Any, mode: str) -> None:
    """Record the mode in a configuration, from which `find_sites` learns it."""
    if mode != WHOLE:
        setattr(config, GROUP_QUERIES, mode)
    elif hasattr(config, GROUP_QUERIES):
        delattr(config, GROUP_QUERIES)
