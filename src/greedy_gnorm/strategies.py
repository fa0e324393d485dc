"""Strategies: a score, when to compute it again, which end goes first, how many heads a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from greedy_gnorm.errors import GnormError
from greedy_gnorm.registry import Registry

EVERY_STEP = 1
NEVER = 0


@dataclass(frozen=True)
class Strategy:
    """`recompute` counts steps between scorings (1: every step, 0: once, on the unpruned model)."""

    score: str
    recompute: int
    highest_first: bool = False
    heads_per_step: int = 1

    def scores_at(self, step: int) -> bool:
        """Whether this step (the first is 1) computes the scores anew."""
        return step == 1 or (self.recompute > 0 and (step - 1) % self.recompute == 0)

    def changed(self, recompute: int | None, heads_per_step: int | None) -> Strategy:
        """The strategy with what the user set otherwise."""
        if recompute is not None and recompute < 0:
            raise GnormError(f"recompute must be 0 (never) or a number of steps, not {recompute}.")
        if heads_per_step is not None and heads_per_step < 1:
            raise GnormError(f"heads per step must be at least 1, not {heads_per_step}.")
        return replace(
            self,
            recompute=self.recompute if recompute is None else recompute,
            heads_per_step=self.heads_per_step if heads_per_step is None else heads_per_step,
        )


STRATEGIES: Registry[Strategy] = Registry("method")
STRATEGIES.add("greedy-gnorm", Strategy("gnorm", EVERY_STEP))
STRATEGIES.add("inverse-gnorm", Strategy("gnorm", EVERY_STEP, highest_first=True))
STRATEGIES.add("random", Strategy("random", NEVER))
