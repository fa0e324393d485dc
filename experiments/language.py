"""Compress a language model by several methods: python experiments/language.py MODEL [METHOD ...]

MODEL is the folder of a causal language model; the results are those of SmolLM2-135M-Instruct, which the script
shared/tools/smollm2.py beside the project writes. The text is shared/data/wikitext-2: units are chosen and projections
fitted on its validation part, quality is that on its test part. A run that was interrupted goes on. The tables go to
docs/results.md; with --table alone nothing is run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import greedy_gnorm as gg
from greedy_gnorm.records.journal import RUN_FILE, Journal
from greedy_gnorm.report.tables import as_markdown

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from pages import write  # noqa: E402

DATA = HERE.parents[1] / "shared" / "data" / "wikitext-2"
RUNS = HERE.parent / "runs" / "language"
METHODS = ("joint-refit", "joint-rounds", "joint-magnitude", "joint-random")
PLAN: dict[str, Any] = {
    "block_length": 256,
    "samples": 32,
    "calibration_tokens": 8192,
    "eval_samples": 24,
    "params": "0.842",
    "rounds": 4,
}
PROMPT = "The capital of France is"


def table() -> str:
    """A line for each run: perplexity after each round, and on the test rows before and after."""
    runs = {path.parent.name: Journal.read(path.parent) for path in sorted(RUNS.glob(f"*/{RUN_FILE}"))}
    lines, shares = [], []
    for name, journal in runs.items():
        result = journal.header.get("result")
        if result is None:
            continue
        steps, test = journal.steps, result["test"]
        shares = [f"{step.parameters / steps[0].parameters:.1%}" for step in steps]
        before, after = test["quality"]["perplexity"]
        low, high = test["intervals"]["perplexity"]["after"]
        lines.append(
            [name, *(f"{step.quality['perplexity']:.1f}" for step in steps), f"{before:.1f}",
             f"{after:.1f} ({low:.1f} to {high:.1f})"]
        )  # fmt: skip
    return as_markdown(["method", *shares, "test, unpruned", "test, last step"], lines)


def sentences(model: str) -> str:
    """What the unpruned model and the compressed ones say."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    given = tokenizer(PROMPT, return_tensors="pt")
    lines = []
    for name, folder in {"unpruned": model, **{name: str(RUNS / name / "model") for name in METHODS}}.items():
        if Path(folder).exists():
            tokens = gg.load(folder).generate(**given, max_new_tokens=24, do_sample=False)
            lines.append([name, tokenizer.decode(tokens[0], skip_special_tokens=True).replace("\n", " ")])
    return as_markdown(["model", "greedy continuation"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("methods", nargs="*", choices=[*METHODS, []], help="which methods; all by default")
    parser.add_argument("--table", action="store_true", help="only write the tables")
    given = parser.parse_args()
    for method in [] if given.table else given.methods or METHODS:
        gg.compress(given.model, str(DATA), method=method, out=RUNS / method, resume=True, **PLAN)
    write("results.md", "language", table() + "\n" + sentences(given.model))


if __name__ == "__main__":
    main()
