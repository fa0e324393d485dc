"""gnorm eval, and the predictions of a run: numbers by hand, changed rows, other tasks, damaged files."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import LABEL_NAMES, tiny_batch, tiny_config, tiny_model, tiny_rows, tiny_tokenizer

import greedy_gnorm as gg
from greedy_gnorm.cli.app import main
from greedy_gnorm.data.batches import Batch, Batches
from greedy_gnorm.passes.predictions import compared_predictions
from greedy_gnorm.records.predictions import read_predictions
from greedy_gnorm.tasks.classification import SingleLabel

pytestmark = pytest.mark.filterwarnings("ignore:The calibration rows have")
OPTIONS = {"rounds": 2, "samples": 24, "calibration_tokens": 600, "measure_speed": False, "recover": "none"}
NAMES = ["neg", "neutral", "pos"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model, rows with a test split, and a run that changes many predictions."""
    home = tmp_path_factory.mktemp("eval")
    model, tokenizer = tiny_model("bert", seed=1, num_hidden_layers=2, **LABEL_NAMES), tiny_tokenizer()
    with torch.no_grad():  # no class is predicted for all rows
        texts = tokenizer([row["text"] for row in tiny_rows(200)], padding=True, return_tensors="pt")
        model.classifier.bias -= model(**texts).logits.mean(0)
    model.save_pretrained(home / "classifier")
    tokenizer.save_pretrained(home / "classifier")
    rows = [{**row, "sentence": row.pop("text")} for row in tiny_rows(200)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    gg.compress(home / "classifier", home / "rows.jsonl", text="sentence", macs=0.4, out=home / "run", **OPTIONS)
    return home


def by_hand(home, rows):
    """Labels, and what both saved models predict with which probability."""
    tokenizer, sides = tiny_tokenizer(), []
    for folder in (home / "classifier", home / "run" / "model"):
        model = gg.load(folder)
        with torch.no_grad():
            found = [model(**tokenizer(row["sentence"], return_tensors="pt")).logits[0].softmax(0) for row in rows]
        sides.append([(NAMES[int(each.argmax())], float(each.max())) for each in found])
    return [row["label"] for row in rows], *sides


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_both_models_on_the_same_rows(home, tmp_path):
    rows = read(home / "rows.jsonl")
    labels, before, after = by_hand(home, rows)
    done = gg.evaluate(home / "run", home / "rows.jsonl", examples=5, out=tmp_path)  # the text column is the run's
    right = [
        np.mean([label == name for label, (name, _) in zip(labels, side, strict=True)]) for side in (before, after)
    ]
    assert done.rows == 200
    assert done.quality["accuracy"] == pytest.approx(right)
    changed = [place for place in range(200) if before[place][0] != after[place][0]]
    assert 5 < len(changed) == done.changed_count
    assert done.agreement == pytest.approx(1 - len(changed) / 200)
    low, high = done.intervals["agreement"]["after"]
    assert low < done.agreement < high
    low, high = done.intervals["accuracy"]["change"]
    assert low <= right[1] - right[0] <= high
    for row, name in zip(done.per_class, NAMES, strict=True):
        for side, content in (("before", before), ("after", after)):
            hits = sum(label == predicted == name for label, (predicted, _) in zip(labels, content, strict=True))
            told, there = sum(predicted == name for predicted, _ in content), labels.count(name)
            assert (row["class"], row["rows"]) == (name, there)
            assert row[side]["precision"] == pytest.approx(hits / told if told else 0)
            assert row[side]["recall"] == pytest.approx(hits / there)
    for side, content in (("before", before), ("after", after)):
        expected = [
            [sum(pair == (a, b) for pair in zip(labels, (name for name, _ in content), strict=True)) for b in NAMES]
            for a in NAMES
        ]
        assert done.confusion[side] == expected
    surest = sorted(changed, key=lambda place: -(before[place][1] + after[place][1]))[:5]
    assert [each["text"] for each in done.changed] == [rows[place]["sentence"] for place in surest]
    first = done.changed[0]
    assert first["label"] == labels[surest[0]]
    for side, content in (("before", before), ("after", after)):
        assert first[side]["label"] == content[surest[0]][0]
        assert first[side]["probability"] == pytest.approx(content[surest[0]][1], abs=1e-5)
    assert json.loads((tmp_path / "eval.json").read_text()) == json.loads(json.dumps(done.to_json()))
    assert repr(done).startswith(f"Evaluation(200 rows: accuracy {right[0]:.4f} to {right[1]:.4f} (")
    text = (tmp_path / "eval.md").read_text()
    assert f"| neg | 67 | {done.per_class[0]['before']['precision']:.3f} |" in text
    assert f"The prediction changed for {len(changed)} of 200 rows" in text
    assert (tmp_path / "confusion.csv").read_text().splitlines()[1] == (
        f"neg,neg,{done.confusion['before'][0][0]},{done.confusion['after'][0][0]}"
    )


def test_the_terminal_shows_it(home, capsys, tmp_path):
    arguments = ["eval", str(home / "run" / "model"), "--data", str(home / "rows.jsonl"), "--eval-samples", "60"]
    assert main([*arguments, "--examples", "2"]) == 0
    shown = capsys.readouterr().out
    for expected in (
        "60 rows (95 % interval)",
        "agreement",
        "precision before",
        "after: label \\ predicted",
        "the 2 largest",
    ):
        assert expected in shown, expected
    assert main([*arguments, "--quiet"]) == 0
    shown = capsys.readouterr()
    assert "accuracy" in shown.out
    assert "precision" not in shown.out
    assert shown.err == ""
    assert main([*arguments, "--json", "--examples", "0"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["rows"], content["changed"], content["out"]) == (60, [], None)


def test_a_run_in_python_is_evaluated_on_rows_in_memory():
    model, batches = tiny_model("bert", **LABEL_NAMES), [tiny_batch(seed=seed) for seed in range(3)]
    run = gg.prune(model, batches[:1], eval_data=batches[1:2], stop="heads=6", tokenizer=tiny_tokenizer())
    done = gg.evaluate(run, [{"text": row["text"], "label": row["label"]} for row in tiny_rows(30)])
    assert (done.rows, done.data["in_memory"]) == (30, True)
    ready = gg.evaluate(run, batches[2:])
    assert (ready.rows, ready.changed) == (5, [])  # without texts there is nothing to show
    with pytest.raises(gg.GnormError, match="examples must be a whole number"):
        gg.evaluate(run, batches[2:], examples=-1)


def test_the_unpruned_model_is_named_or_refused(home, tmp_path):
    rows = home / "rows.jsonl"
    with pytest.raises(gg.GnormError, match=r"holds no run.*--model"):
        gg.evaluate(home / "classifier", rows)
    with pytest.raises(gg.GnormError, match="There is no folder"):
        gg.evaluate(tmp_path / "nothing", rows)
    with pytest.raises(gg.GnormError, match="is not the model of the run"):
        gg.evaluate(home / "run", rows, model=home / "run" / "model")
    same = gg.evaluate(home / "classifier", rows, model=home / "classifier", text="sentence", eval_samples=30)
    assert (same.changed_count, same.agreement, same.quality["loss"][0]) == (0, 1.0, same.quality["loss"][1])
    tiny_model("bert", num_labels=2).save_pretrained(tmp_path / "other")
    with pytest.raises(gg.GnormError, match="do not predict the same"):
        gg.evaluate(home / "classifier", rows, model=tmp_path / "other")
    unfinished = tmp_path / "unfinished"
    shutil.copytree(home / "run", unfinished)
    shutil.rmtree(unfinished / "model")
    with pytest.raises(gg.GnormError, match="is not finished"):
        gg.evaluate(unfinished, rows)


def test_regression_has_measures_and_agreement_only(tmp_path, capsys):
    model = tiny_model("bert", num_labels=1)
    batches = [
        {**tiny_batch(seed=seed), "labels": torch.randn(5, generator=torch.Generator().manual_seed(seed))}
        for seed in range(3)
    ]
    run = gg.prune(model, batches[:1], eval_data=batches[1:2], stop="heads=4")
    done = gg.evaluate(run, batches[1:], out=tmp_path)
    assert set(done.quality) == {"r2", "pearson", "spearman", "mean_absolute_error", "loss", "agreement"}
    assert done.quality["agreement"][0] == 1.0 != done.agreement
    assert (done.classes, done.per_class, done.confusion, done.changed_count) == ((), (), None, None)
    assert {path.name for path in tmp_path.iterdir()} == {"eval.json", "eval.md", "measures.csv"}


def test_several_labels_have_numbers_for_each_label():
    model = tiny_model("bert", problem_type="multi_label_classification", **LABEL_NAMES)
    batches = [tiny_batch(rows=8, seed=seed) for seed in range(3)]
    for seed, batch in enumerate(batches):
        batch["labels"] = torch.randint(0, 2, (8, 3), generator=torch.Generator().manual_seed(seed)).float()
    run = gg.prune(model, batches[:1], eval_data=batches[1:2], stop="heads=6")
    done = gg.evaluate(run, batches[2:])
    with torch.no_grad():
        inputs = {name: tensor for name, tensor in batches[2].items() if name != "labels"}
        predicted = run.model(**inputs).logits > 0
    labels = batches[2]["labels"].bool()
    for place, row in enumerate(done.per_class):
        hits = int((predicted & labels)[:, place].sum())
        assert row["rows"] == int(labels[:, place].sum())
        assert row["after"]["recall"] == pytest.approx(hits / int(labels[:, place].sum()))
    assert done.confusion is None
    assert done.agreement is not None


def test_a_run_keeps_the_predictions_on_its_test_rows(home):
    content = read_predictions(home / "run")
    record = json.loads((home / "run" / "run.json").read_text())
    test = record["result"]["test"]
    assert content["rows"] == test["rows"] == record["data"]["test"]["rows"]
    assert content["classes"] == NAMES
    for side, place in (("before", 0), ("after", 1)):
        right = sum(content["confusion"][side][number][number] for number in range(3))
        assert right / content["rows"] == pytest.approx(test["quality"]["accuracy"][place])
    assert 0 < len(content["changed"]) <= min(48, content["changed_count"])
    texts = {row["sentence"]: row["label"] for row in read(home / "rows.jsonl")}
    for row in content["changed"]:
        assert texts[row["text"]] == row["label"]
        assert row["text_pair"] is None
        assert row["before"]["label"] != row["after"]["label"]


def test_a_pruning_keeps_them_too_and_repeats_without_texts(home, tmp_path):
    options = {"stop": "heads=5", "samples": 24, "text": "sentence", "latency": False, "examples": False}
    run = gg.prune(home / "classifier", home / "rows.jsonl", out=tmp_path / "run", **options)
    content = read_predictions(tmp_path / "run")
    assert content == run.predictions
    assert content["rows"] == run.test["rows"]
    assert content["changed"] == []
    assert content["changed_count"] > 0
    assert "--no-examples --out AGAIN" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_texts_can_be_left_out_of_all_files(home, tmp_path):
    options = ["--text", "sentence", "--macs", "0.4", "--rounds", "2", "--samples", "24", "--calibration-tokens", "600"]
    arguments = ["compress", str(home / "classifier"), "--data", str(home / "rows.jsonl"), *options]
    assert (
        main(
            [
                *arguments,
                "--recover",
                "none",
                "--no-measure-speed",
                "--no-examples",
                "--out",
                str(tmp_path / "run"),
                "--quiet",
            ]
        )
        == 0
    )
    content, kept = read_predictions(tmp_path / "run"), read_predictions(home / "run")
    assert content == {**kept, "changed": []}
    shown = [
        path
        for path in (tmp_path / "run").rglob("*")
        if path.is_file() and path.suffix in (".json", ".jsonl", ".html", ".md", ".csv")
    ]
    for row in kept["changed"]:
        assert not any(row["text"] in path.read_text(encoding="utf-8") for path in shown)


def test_without_labels_the_unpruned_predictions_are_the_labels(home):
    rows = [{"text": row["sentence"]} for row in read(home / "rows.jsonl")]
    run = gg.compress(home / "classifier", rows, labels="own", macs=0.4, **OPTIONS)
    content = run.predictions
    assert content["labels"] == "own"
    assert all(row["before"]["recall"] in (0.0, 1.0) for row in content["per_class"])
    assert content["agreement"] == pytest.approx(run.test["quality"]["agreement"][1])
    assert {row["label"] for row in content["changed"]} == {None}


def test_the_largest_changes_come_first_and_at_most_so_many():
    task, count = SingleLabel(tiny_config("bert", **LABEL_NAMES)), 60
    chance = np.random.default_rng(0)
    before, after = (
        np.stack([np.zeros(count), np.full(count, side), np.zeros(count), chance.uniform(0.4, 1, count)], axis=1)
        for side in (0, 1)
    )
    after[:2, 1] = 0  # two rows are predicted as before
    texts = tuple((f"row {number}", "pair" if number % 2 else None) for number in range(count))
    batches = Batches((Batch({}, None, tuple(range(count))),), "", texts=texts)
    content = compared_predictions(task, batches, [before, after])
    sums = [row["before"]["probability"] + row["after"]["probability"] for row in content["changed"]]
    assert (content["changed_count"], len(sums)) == (58, 48)
    assert sums == sorted(sums, reverse=True)
    assert {row["text_pair"] for row in content["changed"]} == {"pair", None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("agreement"), "agreement is missing"),
        (lambda content: content["classes"].pop(), "per_class does not have the classes"),
        (lambda content: content["confusion"]["after"][0].pop(), "confusion.after does not have a row and a column"),
        (
            lambda content: content["changed"][0]["before"].update(probability="<b>"),
            r"changed\[0\].before.probability is",
        ),
        (lambda content: content.update(changed_count=0), "more rows have changed than are counted"),
    ],
)
def test_a_damaged_file_is_refused(home, tmp_path, change, message):
    content = read_predictions(home / "run")
    change(content)
    (tmp_path / "predictions.json").write_text(json.dumps(content))
    with pytest.raises(gg.RunFolderError, match=message):
        read_predictions(tmp_path)
    (tmp_path / "predictions.json").write_text("{")
    with pytest.raises(gg.RunFolderError, match="is damaged"):
        read_predictions(tmp_path)
    (tmp_path / "predictions.json").unlink()
    assert read_predictions(tmp_path) is None
