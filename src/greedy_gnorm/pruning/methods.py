"""Methods: a score, how often it is recomputed, which end goes first, how many units per step, how to recover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from greedy_gnorm.errors import GnormError
from greedy_gnorm.registry import Registry
from greedy_gnorm.scores import SCORES
from greedy_gnorm.settings import Settings

GREEDY, RANDOM, JOINT, JOINT_RANDOM = "greedy-gnorm", "random", "joint-refit", "joint-random"
RANDOMS = (RANDOM, JOINT_RANDOM)
"""The methods of which a comparison shows many trajectories."""
EVERY_STEP = 1
NEVER = 0


@dataclass(frozen=True)
class Method:
    """`recompute` is the number of steps between scorings: 1 for every step, 0 for once, on the unpruned model.

    A method of `heads` removes so many `heads_per_step`. Any other one works in rounds towards a budget, removing the
    units with the lowest scores per cost. `recover` says how quality is recovered after each step.
    """

    score: str
    recompute: int
    highest_first: bool = False
    heads_per_step: int = 1
    units: str = "heads"
    recover: str = "none"

    @property
    def in_rounds(self) -> bool:
        """Whether the method works towards a budget, in rounds."""
        return self.units != "heads"

    def scores_at(self, step: int) -> bool:
        """Whether scores are recomputed at this step (the first is 1)."""
        return step == 1 or (self.recompute > 0 and (step - 1) % self.recompute == 0)

    def changed(self, given: Settings) -> Method:
        """The method with what the user sets."""
        names = ("recompute", "heads_per_step", "recover")
        own = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
        return replace(self, **own)


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

METHODS.add(JOINT, Method("fisher", EVERY_STEP, units="both", recover="least-squares"))
METHODS.add("joint-gates", Method("fisher", EVERY_STEP, units="both", recover="gates"))
METHODS.add("joint-rounds", Method("fisher", EVERY_STEP, units="both"))
METHODS.add("joint-one-shot", Method("fisher", NEVER, units="both"))
METHODS.add("joint-gnorm", Method("gnorm", EVERY_STEP, units="both"))
METHODS.add("joint-magnitude", Method("magnitude", NEVER, units="both"))
METHODS.add(JOINT_RANDOM, Method("random", NEVER, units="both"))

HEADS_ONLY = tuple(name for name in METHODS if not METHODS[name].in_rounds)
JOINTS = tuple(name for name in METHODS if METHODS[name].in_rounds)
"""The methods that remove heads and neurons together."""


def methods_named(text: str | Sequence[str]) -> list[str]:
    """The names of methods in `a,b,c`, `paper` (the paper's five), `all` (of heads) or `joint` (heads and neurons).

    `all` omits the greedy versions of scores that take many passes; they can be given by name.
    """
    names = text.split(",") if isinstance(text, str) else list(text)
    found: list[str] = []
    for name in (name.strip() for name in names):
        if name == "paper":
            found += PAPER
        elif name == "all":
            found += [each for each in HEADS_ONLY if not (METHODS[each].recompute and _takes_many_passes(each))]
        elif name == "joint":
            found += JOINTS
        elif name:
            METHODS[name]
            found.append(name)
    if not found:
        raise GnormError(f"Name the methods to compare: paper, all, joint, or some of {', '.join(METHODS)}.")
    kinds = {METHODS[each].in_rounds for each in found}
    if len(kinds) > 1:
        raise GnormError(
            "Methods that remove heads and methods that remove heads and neurons can't be compared at once."
        )
    return list(dict.fromkeys(found))


def _takes_many_passes(method: str) -> bool:
    return SCORES[METHODS[method].score].many_passes
