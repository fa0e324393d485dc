"""What `gnorm methods` lists; it needs no torch."""

from __future__ import annotations

from greedy_gnorm.cli.terminal import show_json, show_table
from greedy_gnorm.pruning.methods import METHODS, Method
from greedy_gnorm.pruning.rules import RULES
from greedy_gnorm.scores import SCORES, Score
from greedy_gnorm.tasks.objectives import OBJECTIVES


def _scoring(method: Method) -> str:
    """When a method scores, and what it does besides to choose units."""
    trials = f", {method.look_ahead} trials" if method.look_ahead else ""
    return ("every step" if method.recompute else "once") + trials + (", swaps" if method.swap else "")


def show_methods(*, as_json: bool) -> None:
    """Methods, scores, objectives and stopping rules, as tables or as JSON."""
    rows = [
        {
            "--method": name,
            "score": method.score,
            "removes": "heads" if method.units == "heads" else "heads and neurons",
            "first": "highest" if method.highest_first else "lowest",
            "scores": _scoring(method),
            "recovery": method.recover,
            "objective": score.objective or "-",
            "labels": "needed" if score.asks_for_labels(OBJECTIVES[score.objective or "logit-norm"]) else "-",
            "cost of scoring": score.cost,
            "paper": score.paper,
        }
        for name in METHODS
        if (method := METHODS[name]) and (score := SCORES[method.score])
    ]
    objectives = {
        name: OBJECTIVES[name].about + (", needs labels" if OBJECTIVES[name].needs_labels else "")
        for name in OBJECTIVES
    }
    scores = {name: f"{SCORES[name].about}{options_text(SCORES[name])}" for name in SCORES}
    rules = {RULES[name].form: RULES[name].about for name in RULES}
    if as_json:
        show_json({"methods": rows, "scores": scores, "objectives": objectives, "rules": rules})
        return
    show_table(list(rows[0]), [list(row.values()) for row in rows], numbers=False)
    for name, column, content in (
        ("score", "what it is (--score-options)", scores),
        ("objective", "number computed for each sentence", objectives),
        ("stop", "when the run ends", rules),
    ):
        cells = [list(row) for row in content.items()]
        show_table([f"--{name}", column], cells, numbers=False)


def options_text(score: Score) -> str:
    """The options of a score and their values, as they follow its description."""
    return "".join(f"; {name}={value}" for name, value in score.defaults().items())
