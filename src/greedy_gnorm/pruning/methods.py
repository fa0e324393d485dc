"""Methods: a score, how often it is recomputed, which end goes first, how many units per step, how to recover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from greedy_gnorm.errors import GnormError
from greedy_gnorm.pruning.rules import check_rules
from greedy_gnorm.registry import Registry
from greedy_gnorm.scores import SCORES, Score, score_with
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.objectives import OBJECTIVES, Objective
from greedy_gnorm.tasks.task import check_metric

GREEDY, RANDOM, JOINT, JOINT_RANDOM = "greedy-gnorm", "random", "joint-refit", "joint-random"
RANDOMS = (RANDOM, JOINT_RANDOM)
"""The methods of which a comparison shows many trajectories."""
LEAST_SQUARES, DISTILL = "least-squares", "distill"
LOSS = "loss"
EVERY_STEP = 1
NEVER = 0


@dataclass(frozen=True)
class Method:
    """`recompute` is the number of steps between scorings: 1 for every step, 0 for once, on the unpruned model.

    A method of `heads` removes so many `heads_per_step`. Any other one works in rounds towards a budget, removing the
    units with the lowest scores per cost. `recover` says how quality is recovered: by fitting after each step, or also
    by training the chosen model at the end. With `look_ahead`, so many of the heads that are next are removed on trial,
    and the one goes whose removal keeps the outputs closest to the unpruned model's. With `swap`, units of a round are
    exchanged for others while that lowers the estimated loss.
    """

    score: str
    recompute: int
    highest_first: bool = False
    heads_per_step: int = 1
    units: str = "heads"
    recover: str = "none"
    look_ahead: int = 0
    swap: bool = False

    @property
    def in_rounds(self) -> bool:
        """Whether the method works towards a budget, in rounds."""
        return self.units != "heads"

    @property
    def fit(self) -> str:
        """How a step is fitted; training comes after least squares."""
        return LEAST_SQUARES if self.recover == DISTILL else self.recover

    def scores_at(self, step: int) -> bool:
        """Whether scores are recomputed at this step (the first is 1)."""
        return step == 1 or (self.recompute > 0 and (step - 1) % self.recompute == 0)

    def changed(self, given: Settings) -> Method:
        """The method with what the user sets."""
        names = ("recompute", "heads_per_step", "recover", "look_ahead", "swap")
        return replace(self, **{name: getattr(given, name) for name in names if getattr(given, name) is not None})


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

for _name in ("gnorm", "fisher"):
    METHODS.add(f"{_name}-look-ahead", Method(_name, EVERY_STEP, look_ahead=8))

METHODS.add(JOINT, Method("reconstruction-loss", EVERY_STEP, units="both", recover=LEAST_SQUARES))
METHODS.add("joint-fisher", Method("fisher", EVERY_STEP, units="both", recover=LEAST_SQUARES))
METHODS.add("joint-gates", Method("fisher", EVERY_STEP, units="both", recover="gates"))
METHODS.add("joint-rounds", Method("fisher", EVERY_STEP, units="both"))
METHODS.add("joint-one-shot", Method("fisher", NEVER, units="both"))
METHODS.add("joint-gnorm", Method("gnorm", EVERY_STEP, units="both"))
METHODS.add("joint-magnitude", Method("magnitude", NEVER, units="both"))
METHODS.add(JOINT_RANDOM, Method("random", NEVER, units="both"))

JOINTS = tuple(name for name in METHODS if METHODS[name].in_rounds)
"""The methods of heads and neurons that the documentation compares."""

METHODS.add("joint-swap", Method("fisher", EVERY_STEP, units="both", recover=LEAST_SQUARES, swap=True))
METHODS.add("joint-mean", Method("fisher", EVERY_STEP, units="both", recover="mean"))
METHODS.add("joint-kl-fisher", Method("kl-fisher", EVERY_STEP, units="both", recover="least-squares"))
METHODS.add("joint-fisher-joint", Method("fisher-joint", EVERY_STEP, units="both", recover="least-squares"))
METHODS.add("joint-reconstruction", Method("reconstruction", EVERY_STEP, units="both", recover="least-squares"))
METHODS.add("joint-gnorm-plus", Method("gnorm-plus", EVERY_STEP, units="both"))
METHODS.add("joint-output-norm", Method("output-norm", EVERY_STEP, units="both"))

HEADS_ONLY = tuple(name for name in METHODS if not METHODS[name].in_rounds)
ALL_JOINTS = tuple(name for name in METHODS if METHODS[name].in_rounds)
"""The methods that remove heads and neurons together."""


def methods_named(text: str | Sequence[str]) -> list[str]:
    """The names of methods in `a,b,c`, `paper` (the paper's five), `all` (of heads), `joint` or `all-joint`.

    `joint` are the methods of heads and neurons that the documentation compares, `all-joint` are all of them. `all`
    omits methods that take many passes at every step; they can be given by name.
    """
    names = text.split(",") if isinstance(text, str) else list(text)
    found: list[str] = []
    for name in (name.strip() for name in names):
        if name == "paper":
            found += PAPER
        elif name == "all":
            found += [each for each in HEADS_ONLY if not _takes_many_passes(METHODS[each])]
        elif name == "joint":
            found += JOINTS
        elif name == "all-joint":
            found += ALL_JOINTS
        elif name:
            METHODS[name]
            found.append(name)
    if not found:
        groups = "paper, all, joint, all-joint"
        raise GnormError(f"Name the methods to compare: {groups}, or some of {', '.join(METHODS)}.")
    kinds = {METHODS[each].in_rounds for each in found}
    if len(kinds) > 1:
        raise GnormError(
            "Methods that remove heads and methods that remove heads and neurons can't be compared at once."
        )
    return list(dict.fromkeys(found))


def resolve_method(given: Settings) -> tuple[Method, Score, Objective]:
    """Look up the method, score and objective before anything is loaded, so that a wrong name fails at once."""
    method = METHODS[given.method].changed(given)
    score = score_with(method.score, given.score_options)
    check_rules(given.stop)
    check_metric(given.metric)
    objective = objective_for(score, given)
    if objective.needs_reference and score.objective is not None and method.recompute == NEVER:
        raise GnormError(
            f"{objective.name} is zero until a head is removed, so a score that is computed once would rank rounding "
            f"errors: use a greedy method instead of {given.method}, or another objective."
        )
    if method.recover != "none" and given.device_map is not None:
        raise GnormError("device_map can't be combined with recover: fitting needs the whole model on one device.")
    if method.look_ahead > 1 and method.highest_first:
        raise GnormError(
            f"look_ahead spares the outputs, but {given.method} removes what matters most first: choose another method."
        )
    if method.swap and (score.objective is None or objective.name != LOSS):
        used = f"The objective is {objective.name}" if score.objective else f"The score {score.name} has no objective"
        raise GnormError(f"swap compares derivatives of the loss. {used}: choose a method such as {JOINT}.")
    if method.recover != DISTILL and given.recover_steps != Settings.model_fields["recover_steps"].default:
        raise GnormError("recover_steps are those of a distillation: set recover to 'distill' (--recover distill).")
    return method, score, objective


def resolve_score(name: str, given: Settings) -> tuple[Score, Objective]:
    """Look up a score that is computed once, on the unpruned model, and its objective."""
    score = score_with(name, given.score_options)
    objective = objective_for(score, given)
    if objective.needs_reference and score.objective is not None:
        raise GnormError(f"{objective.name} compares with the unpruned model, which is the one to score: it is zero.")
    return score, objective


def check_joint(name: str) -> None:
    """Refuse a method that does not remove heads and neurons together."""
    if not METHODS[name].in_rounds:
        raise GnormError(f"gnorm compress takes the methods {', '.join(ALL_JOINTS)}; {name} is for gnorm prune.")


def objective_for(score: Score, given: Settings) -> Objective:
    """The objective in the settings, else the default of the score."""
    return OBJECTIVES[given.objective or score.objective or next(iter(OBJECTIVES))]


def _takes_many_passes(method: Method) -> bool:
    """Whether every step takes many passes, for its score or for trials."""
    return bool(method.recompute and SCORES[method.score].many_passes) or method.look_ahead > 1
