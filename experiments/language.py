"""Compress a language model by several methods: python experiments/language.py MODEL [NAME ...]

MODEL is the folder of a causal language model; the results are those of SmolLM2-135M-Instruct, which the script
shared/tools/smollm2.py beside the project writes. The text is shared/data/wikitext-2: units are chosen and projections
fitted on its validation part, quality is that on its test part. A run that was interrupted goes on. The tables go to
docs/results.md; with --table alone nothing is run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import greedy_gnorm as gg
from greedy_gnorm.data.loading import evaluation_batches
from greedy_gnorm.model.checkpoint import save
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import row_statistics, tested
from greedy_gnorm.pruning.methods import resolve_method
from greedy_gnorm.pruning.prepare import load_inputs, load_sets, on_device, recovery_for
from greedy_gnorm.pruning.run import at_step, units_of
from greedy_gnorm.records.files import replace_folder, write_json
from greedy_gnorm.records.journal import RUN_FILE, Journal
from greedy_gnorm.report.tables import as_markdown
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import task_of

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from pages import write  # noqa: E402

TEXT = HERE.parents[1] / "shared" / "data" / "wikitext-2"
DATA, TEST = str(TEXT / "valid.txt"), str(TEXT / "test.txt")
RUNS = HERE.parent / "runs" / "language"
SHARED: dict[str, Any] = {"block_length": 256, "eval_samples": 64}
COMPRESSED: dict[str, Any] = {**SHARED, "samples": 32, "calibration_tokens": 8192}
JOINT: dict[str, dict[str, Any]] = {
    method: {**COMPRESSED, "method": method, "params": "0.8", "rounds": 5}
    for method in ("joint-refit", "joint-rounds", "joint-magnitude", "joint-random")
}
"""The runs to 80 % of all parameters, by method."""
TENTH = {"joint-refit-0.9": {**COMPRESSED, "method": "joint-refit", "params": "0.9", "rounds": 2}}
HEADS: dict[str, Any] = {**SHARED, "eval_samples": 4, "samples": 2, "stop": "all", "method": "greedy-gnorm"}
MORE = {"joint-refit-16x": 16}
"""The units of joint-refit, fitted on so many times the tokens."""
NAMES = (*JOINT, *TENTH, "heads", *MORE)
PROMPTS = ("The capital of France is", "The history of the city begins in")


def fit_again(model: str, times: int, folder: Path) -> None:
    """Fit the units of joint-refit's last step on more tokens, and measure the result on the same test rows."""
    journal = Journal.read(RUNS / "joint-refit")
    settings = Settings.of(JOINT["joint-refit"])
    settings = settings.model_copy(update={"calibration_tokens": times * settings.calibration_tokens})
    unpruned, tokenizer = load_inputs(model, None, settings, units_of(journal.header))
    unpruned = on_device(unpruned, settings)
    sets = load_sets(unpruned, tokenizer, DATA, TEST, settings)
    recovery = recovery_for(resolve_method(settings)[0], unpruned, sets, settings.recover_steps)
    fitted = at_step(unpruned, journal.steps, len(journal.steps) - 1, units_of(journal.header), recovery)
    rows = evaluation_batches(unpruned, tokenizer, task_of(unpruned), TEST, settings)
    tables = [row_statistics(find_sites(each), rows).numpy() for each in (unpruned, fitted)]
    with replace_folder(folder) as partial:
        save(fitted, tokenizer, partial / "model")
        write_json(partial / "test.json", tested(task_of(unpruned), rows, tables))


def run(name: str, model: str) -> None:
    """One run, in runs/language/NAME; a finished one is kept."""
    if name in finished() or (name in MORE and (RUNS / name).exists()):
        return
    print(name, flush=True)
    if name in MORE:
        fit_again(model, MORE[name], RUNS / name)
    elif name == "heads":
        gg.prune(model, DATA, eval_data=TEST, out=RUNS / name, resume=True, **HEADS)
    else:
        gg.compress(model, DATA, eval_data=TEST, out=RUNS / name, resume=True, **(JOINT | TENTH)[name])


def finished() -> dict[str, Journal]:
    """The runs that have a result."""
    found = {name: RUNS / name for name in NAMES if (RUNS / name / RUN_FILE).exists()}
    journals = {name: Journal.read(folder) for name, folder in found.items()}
    return {name: journal for name, journal in journals.items() if "result" in journal.header}


def perplexity(test: dict[str, Any]) -> str:
    """A perplexity on test rows with its interval."""
    low, high = test["intervals"]["perplexity"]["after"]
    return f"{test['quality']['perplexity'][1]:.1f} ({low:.1f} to {high:.1f})"


def joint_table() -> str:
    """A line for each run: perplexity after each round, and on the test rows at the end."""
    journals = finished()
    runs = {name: journals[name] for name in JOINT if name in journals}
    first = next(iter(runs.values()))
    steps, test = first.steps, first.header["result"]["test"]
    shares = [f"{step.parameters / steps[0].parameters:.1%}" for step in steps]
    lines = []
    for name, journal in runs.items():
        found = [f"{step.quality['perplexity']:.1f}" for step in journal.steps]
        lines.append([name, *found, perplexity(journal.header["result"]["test"])])
    unpruned = test["quality"]["perplexity"][0]
    text = f"Unpruned {unpruned:.1f} on {test['rows']} test blocks.\n\n"
    text += as_markdown(["method", *shares, "test, last step"], lines)
    others = [
        [f"`--params 0.9`, {len(journals[name].steps) - 1} rounds", perplexity(journals[name].header["result"]["test"])]
        for name in TENTH
        if name in journals
    ]
    for name, times in MORE.items():
        if (RUNS / name).exists():
            text_of = f"`--params 0.8`, the units of joint-refit fitted on {times} times the tokens"
            others.append([text_of, perplexity(json.loads((RUNS / name / "test.json").read_text(encoding="utf-8")))])
    return text + ("\n" + as_markdown(["joint-refit", "test"], others) if others else "")


def heads_table() -> str:
    """The perplexity as groups of heads are removed one by one."""
    journal = finished()["heads"]
    steps = journal.steps
    places = sorted({*range(0, len(steps), 10), len(steps) - 1})
    return as_markdown(
        ["groups removed", *(str(place) for place in places)],
        [["perplexity", *(f"{steps[place].quality['perplexity']:.1f}" for place in places)]],
    )


def sentences(model: str) -> str:
    """What the unpruned model and the compressed ones say."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    folders = {"unpruned": model, **{name: str(RUNS / name / "model") for name in (*TENTH, *JOINT, *MORE)}}
    lines = []
    for name, folder in folders.items():
        if Path(folder).exists():
            loaded = gg.load(folder)
            said = []
            for prompt in PROMPTS:
                given = tokenizer(prompt, return_tensors="pt")
                tokens = loaded.generate(**given, max_new_tokens=24, do_sample=False)
                said.append(tokenizer.decode(tokens[0], skip_special_tokens=True).replace("\n", " "))
            lines.append([name, *said])
    return as_markdown(["model", *("greedy continuation" for _ in PROMPTS)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], help="which runs; all by default")
    parser.add_argument("--table", action="store_true", help="only write the tables")
    given = parser.parse_args()
    for name in [] if given.table else given.names or NAMES:
        run(name, given.model)
    write("results.md", "language", joint_table() + "\n" + sentences(given.model))
    if "heads" in finished():
        write("results.md", "language-heads", heads_table())


if __name__ == "__main__":
    main()
