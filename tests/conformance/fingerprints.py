"""Fingerprints of fixed runs: the seal of the journal, the order of removal and the saved weights.

    python tests/conformance/fingerprints.py [NAME ...]

runs them and writes what they give beside what 0.1.0 gave, into fingerprints.json. Orders and weights are the same on
every machine; seals hold every digit of the scores, so they belong to the machine that made them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from conftest import SHARED, both_batches, tiny_batch, tiny_model  # noqa: E402

import greedy_gnorm as gg  # noqa: E402
from greedy_gnorm.demo import prepare  # noqa: E402
from greedy_gnorm.pruning.methods import METHODS  # noqa: E402
from greedy_gnorm.pruning.run import Run  # noqa: E402
from greedy_gnorm.records.journal import chain_seals  # noqa: E402
from greedy_gnorm.settings import Settings  # noqa: E402
from greedy_gnorm.units import Step, removed_by  # noqa: E402

FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "albert", "albert-groups", "distilbert")
"""Those that 0.1.0 had."""
SCORES = ("confidence", "michel", "michel-raw", "fisher", "tis", "attribution", "leave-one-out", "shapley", "magnitude")
RECORDED_METHODS = (
    "greedy-gnorm", "inverse-gnorm", "ae", "inverse-ae", "random", "gnorm-static", "ae-greedy",
    *(name for score in SCORES for name in (score, f"{score}-greedy")),
)  # fmt: skip
"""The methods that 0.1.0 had."""
FILE = HERE / "fingerprints.json"
SCORING = [tiny_batch(seed=1), tiny_batch(rows=3, seed=2, longest=7)]
EVALUATION = [tiny_batch(rows=7, seed=5), tiny_batch(rows=2, seed=6, longest=6)]
WITHOUT_GRAM = ["kept-layers", "first-token"]
OPTIONS: dict[str, dict[str, Any]] = {"shapley": {"permutations": 3}, "attribution": {"steps": 4}}


def names() -> list[str]:
    """All fixed runs: FAMILY METHOD SAVINGS; the paper's score also without the form that 0.1.0 computed otherwise."""
    tiny = [f"{family} {method}" for family in FAMILIES for method in RECORDED_METHODS]
    real = ["minilm-tweets greedy-gnorm", "demo greedy-gnorm"]
    return [f"{name} {how}" for name in (*tiny, *real) for how in (("all", "direct") if "gnorm" in name else ("all",))]


def run(name: str) -> Run:
    """One of the fixed runs."""
    model, method, how = name.split()
    savings = "all" if how == "all" else WITHOUT_GRAM
    if model == "minilm-tweets":
        settings = {"samples": 64, "eval_samples": 128, "stop": "heads=12", "savings": savings}
        return on_two_sets(SHARED / "models" / model, SHARED / "data" / "tweets.jsonl", **settings)
    if model == "demo":
        assets = prepare(say=lambda line: None)
        return on_two_sets(assets.model, assets.data, stop="all", savings=savings)
    options = OPTIONS.get(METHODS[method].score)
    settings = {"eval_data": EVALUATION, "method": method, "savings": savings, "stop": "all", "score_options": options}
    return gg.prune(tiny_model(model), SCORING, **settings)


def on_two_sets(folder: Path, data: Path, **settings: Any) -> Run:
    """Scored on validation rows and evaluated on test rows, as 0.1.0 divided them."""
    model, tokenizer = gg.load(folder), AutoTokenizer.from_pretrained(folder)
    rows = {name: settings.pop(name) for name in ("samples", "eval_samples") if name in settings}
    sets = both_batches(model, tokenizer, data, settings=Settings(**rows))
    scoring, evaluation = ([{**batch.inputs, "labels": batch.labels} for batch in batches] for batches in sets)
    return gg.prune(model, scoring, eval_data=evaluation, **settings)


RECORDED = ("step", "removed", "scores", "log_scores", "parameters", "bytes", "stop")


def as_before(step: Step) -> dict[str, Any]:
    """What 0.1.0 recorded of a step."""
    line = step.to_json()
    quality = {name: line["quality"][name] for name in ("accuracy", "macro_f1", "loss")}
    return {**{name: line[name] for name in RECORDED if name in line}, "quality": quality, "seconds": line["seconds"]}


def fingerprint(done: Run) -> dict[str, str]:
    """What must not change."""
    with tempfile.TemporaryDirectory() as folder:
        done.model.save_pretrained(folder)
        weights = hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()[:16]
    order = json.dumps([list(unit) for unit in removed_by(done.steps)])
    return {
        "seal": chain_seals(as_before(step) for step in done.steps),
        "order": hashlib.sha256(order.encode()).hexdigest()[:16],
        "weights": weights,
    }


def machine() -> str:
    """What the last digits of a run depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    cpu = {name.strip(): value.strip() for name, value in fields.items()}
    found = [cpu.get(name, "?") for name in ("model name", "cpu family", "model")]
    return ", ".join([*found, torch.backends.cpu.get_cpu_capability(), f"torch {torch.__version__}"])


def main() -> None:
    torch.set_num_threads(1)
    content = json.loads(FILE.read_text())
    content["machine"] = machine()
    for name in sys.argv[1:] or names():
        content["runs"].setdefault(name, {})["now"] = fingerprint(run(name))
        print(name, content["runs"][name], flush=True)
    FILE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
