"""Methods: a score, how often it is recomputed, which end is removed first, how many heads per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from greedy_gnorm.errors import GnormError
from greedy_gnorm.registry import Registry
from greedy_gnorm.scores import SCORES

GREEDY, RANDOM = "greedy-gnorm", "random"
EVERY_STEP = 1
NEVER = 0


@dataclass(frozen=True)
class Method:
    """`recompute` is the number of steps between scorings: 1 for every step, 0 for once, on the unpruned model."""

    score: str
    recompute: int
    highest_first: bool = False
    heads_per_step: int = 1

    def scores_at(self, step: int) -> bool:
        """Whether scores are recomputed at this step (the first is 1)."""
        return step == 1 or (self.recompute > 0 and (step - 1) % self.recompute == 0)

    def changed(self, recompute: int | None, heads_per_step: int | None) -> Method:
        """The method with the user's numbers, where given."""
        return replace(
            self,
            recompute=self.recompute if recompute is None else recompute,
            heads_per_step=self.heads_per_step if heads_per_step is None else heads_per_step,
        )


METHODS: Registry[Method] = Registry("method")
METHODS.add("greedy-gnorm", Method("gnorm", EVERY_STEP))
METHODS.add("inverse-gnorm", Method("gnorm", EVERY_STEP, highest_first=True))
METHODS.add("ae", Method("entropy", NEVER, highest_first=True))
METHODS.add("inverse-ae", Method("entropy", NEVER))
METHODS.add("random", Method("random", NEVER))

PAPER = tuple(METHODS)
"""The five methods that the paper compares."""

METHODS.add("gnorm-static", Method("gnorm", NEVER))
METHODS.add("ae-greedy", Method("entropy", EVERY_STEP, highest_first=True))
for _name in SCORES:
    if _name not in ("gnorm", "entropy", "random"):
        METHODS.add(_name, Method(_name, NEVER))
        METHODS.add(f"{_name}-greedy", Method(_name, EVERY_STEP))


def methods_named(text: str | Sequence[str]) -> list[str]:
    """The names of methods in `a,b,c`, `paper` (the paper's five) or `all`.

    `all` omits the greedy versions of scores that take many passes; they can be given by name.
    """
    names = text.split(",") if isinstance(text, str) else list(text)
    found: list[str] = []
    for name in (name.strip() for name in names):
        if name == "paper":
            found += PAPER
        elif name == "all":
            found += [each for each in METHODS if not (METHODS[each].recompute and _takes_many_passes(each))]
        elif name:
            METHODS[name]
            found.append(name)
    if not found:
        raise GnormError(f"Name the methods to compare: paper, all, or some of {', '.join(METHODS)}.")
    return list(dict.fromkeys(found))


def _takes_many_passes(method: str) -> bool:
    return SCORES[METHODS[method].score].many_passes
