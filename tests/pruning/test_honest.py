"""Honest numbers: three sets of rows, intervals, warnings, the measure that a user names, steps by what they lose."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from conftest import LABEL_NAMES, tiny_batch, tiny_model, tiny_rows, tiny_tokenizer

import greedy_gnorm as gg
from greedy_gnorm.comparison.analysis import Comparison
from greedy_gnorm.data.sets import compared_rows, divided_rows
from greedy_gnorm.records.journal import Journal
from greedy_gnorm.report.tables import take_name
from greedy_gnorm.runs import _warn_of_other_losses
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.intervals import wilson
from greedy_gnorm.tasks.task import task_of
from greedy_gnorm.units import Cost, Measure, Step, Unit, pack_rows, unpack_rows

ROWS = tiny_rows(200)


def model():
    return tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("honest") / "run"
    folder = out.with_name("model")
    model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    data = out.with_name("rows.jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return gg.prune(folder, data, samples=16, stop="all", out=out, latency=False), out


def test_a_run_has_three_sets_of_rows(finished):
    run, out = finished
    data = json.loads((out / "run.json").read_text())["data"]
    assert {use: part["rows"] for use, part in data.items()} == {"scoring": 16, "evaluation": 37, "test": 50}
    assert len({part["fingerprint"] for part in data.values()}) == 3
    assert run.test["rows"] == 50


def test_every_measure_has_an_interval_and_a_paired_one(finished):
    run, _ = finished
    assert set(run.test["intervals"]) == set(run.test["quality"]) == {"accuracy", "macro_f1", "mcc", "loss"}
    for name, sides in run.test["quality"].items():
        intervals = run.test["intervals"][name]
        for side, value in zip(("before", "after"), sides, strict=True):
            low, high = intervals[side]
            assert low <= value <= high
        assert intervals["change"][0] <= sides[1] - sides[0] <= intervals["change"][1]


def test_the_journal_says_which_rows_were_right(finished):
    run, out = finished
    for step in Journal.read(out).steps:
        right = unpack_rows(step.right, 37)
        assert right.mean() == step.quality["accuracy"]
        assert step.interval == wilson(int(right.sum()), 37)
    assert [step.right for step in run.steps] == [step.right for step in Journal.read(out).steps]


def test_packed_rows():
    right = np.random.default_rng(0).random(21) < 0.5
    assert (unpack_rows(pack_rows(right), 21) == right).all()
    for text, rows in ((pack_rows(right), 30), ("?", 8)):
        with pytest.raises(ValueError, match=r"bits|base64|Only|padd"):
            unpack_rows(text, rows)


def test_a_step_by_what_it_loses(finished, tmp_path):
    run, out = finished
    choices = {choice.name: choice for choice in run.choices()}
    assert choices
    for choice in choices.values():
        assert choice.interval == run.steps[choice.step].interval
        assert choice.promised > 1
    place = next(iter(choices.values())).step
    name = take_name(next(iter(choices.values())))
    taken = gg.take_step(out, name, out=tmp_path / "taken", latency=False)
    assert taken.solution.step == place
    assert "taken from" in taken.why
    assert taken.choices() == [choice for choice in run.choices() if choice.step <= place]
    assert (taken.test == run.test) == (place == run.solution.step)
    assert sum(p.numel() for p in run.at(name).parameters()) == sum(p.numel() for p in taken.model.parameters())


def test_the_measure_that_a_user_names(tmp_path):
    options = {"tokenizer": tiny_tokenizer(), "samples": 16, "stop": "all", "latency": False}
    run = gg.prune(model(), ROWS, metric="macro_f1", out=tmp_path / "f1", **options)
    assert run.measure == Measure("macro_f1", largest=1.0)
    for step in run.steps:
        low, high = step.interval
        assert low <= step.quality["macro_f1"] <= high
        assert step.right is None, "macro F1 is no share of rows"
    assert gg.prune(model(), ROWS, metric="loss", **options).measure.higher_is_better is False
    with pytest.raises(gg.GnormError, match="metric must be one of accuracy, macro_f1, mcc, loss"):
        gg.prune(model(), ROWS, metric="f1", **options)
    with pytest.raises(gg.GnormError, match="Unknown metric 'f2'"):
        gg.prune(model(), ROWS, metric="f2", **options)
    bare = [{"text": row["text"]} for row in ROWS]
    with pytest.raises(gg.DataError, match="Measuring mcc requires labels"):
        gg.prune(model(), bare, labels="own", metric="mcc", **options)


def test_the_default_stops_after_a_lost_point():
    assert Settings().stop == ("drop=0.01",)
    run = gg.prune(model(), ROWS, tokenizer=tiny_tokenizer(), samples=16, eval_samples=30)
    first = run.measure.of(run.steps[0])
    assert run.measure.of(run.solution) >= first - 0.01


def test_rows_divide_by_what_the_data_has():
    task = task_of(model())

    def sizes(**counts):
        rows, place = [], 0
        for split, count in counts.items():
            rows += [{**row, "split": split} for row in ROWS[place : place + count]]
            place += count
        parts = divided_rows(task, None, rows, None, Settings(), needs_labels=False)
        texts = [{row.words for row in part} for part in parts]
        assert not texts[0] & (texts[1] | texts[2])
        assert not texts[1] & texts[2]
        compared = compared_rows(task, None, rows, None, Settings(), needs_labels=False)
        return [len(part) for part in parts], [len(part) for part in compared]

    assert sizes(train=100, validation=40, test=60) == ([100, 40, 60], [100, 60])
    assert sizes(train=100, validation=40) == ([100, 20, 20], [100, 40])
    assert sizes(train=100, test=60) == ([100, 30, 30], [100, 60])
    assert sizes(validation=120, test=60) == ([120, 30, 30], [120, 60])


def test_training_rows_without_labels_are_scored_on():
    task = task_of(model())
    rows = [{**row, "split": "train" if place < 100 else "test"} for place, row in enumerate(ROWS)]
    for row in rows[:100]:
        row["label"] = None
    pool, choosing, test = divided_rows(task, None, rows, None, Settings(), needs_labels=False)
    assert [len(pool), len(choosing), len(test)] == [100, 50, 50]
    bare = [{"text": row["text"]} for row in ROWS[:100]]
    pool, choosing, test = divided_rows(task, None, bare, ROWS[100:], Settings(), needs_labels=False)
    assert [len(pool), len(choosing), len(test)] == [100, 50, 50]


def test_little_data_is_divided_in_two_and_told():
    options = {"tokenizer": tiny_tokenizer(), "stop": "heads=1"}
    with pytest.warns(UserWarning, match="Only 15 evaluation rows") as caught:
        run = gg.prune(model(), tiny_rows(30), **options)
    assert any("quality reported on the same 15 rows" in str(each.message) for each in caught)
    with pytest.warns(UserWarning, match="Only 50 test rows"):
        gg.prune(model(), ROWS, **options)
    assert run.test is None


def test_a_model_at_chance_is_told():
    rows = [{**row, "label": "neg"} if place % 4 else row for place, row in enumerate(ROWS)]
    with pytest.warns(UserWarning, match="not above the .* of always answering neg"):
        gg.prune(model(), rows, tokenizer=tiny_tokenizer(), samples=9, stop="heads=1")


def test_another_measure_that_falls_much_more_is_told():
    def steps(accuracy, macro):
        qualities = (
            {"accuracy": 0.9, "macro_f1": 0.85, "loss": 1.0},
            {"accuracy": accuracy, "macro_f1": macro, "loss": 9},
        )
        return [Step(n, (), None, quality, Cost(1, 4), {}) for n, quality in enumerate(qualities)]

    measure = Measure("accuracy", largest=1.0)
    with pytest.warns(UserWarning, match=r"macro_f1 fell by 10\.0 points, accuracy by 1\.0"):
        _warn_of_other_losses(None, steps(0.89, 0.75), 1, measure)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _warn_of_other_losses(None, steps(0.89, 0.83), 1, measure)


def walk(right, seed):
    """A walk of as many heads as curves of right rows."""
    quality = [{"accuracy": float(np.mean(each))} for each in right]
    return [
        Step(n, (Unit(0, n - 1),) if n else (), None, quality[n], Cost(100 - n, 400 - 4 * n), {}, right=pack_rows(each))
        for n, each in enumerate(right)
    ]


def test_the_best_is_marked_where_the_difference_holds():
    chance, rows = np.random.default_rng(0), 400
    before = chance.random(rows) < 0.9

    def method(lost):
        """Runs whose every step loses this share of the rows that were right."""
        runs = []
        for seed in range(2):
            right = [before]
            for _ in range(4):
                right.append(right[-1] & (chance.random(rows) >= lost))
            runs.append(walk(right, seed))
        return runs

    header = {"quality": "accuracy", "higher_is_better": True, "data": {"evaluation": {"rows": rows}}}
    curves = {"good": method(0.02), "alike": method(0.02), "bad": method(0.2)}
    columns, cells = Comparison(header, curves).summary
    marks = {row[0]: row[columns.index("mean")][-1] for row in cells}
    assert marks["good"] == marks["alike"] == "="
    assert marks["bad"] not in "*="
    assert " to " in cells[0][columns.index("mean")]
    columns, cells = Comparison(header, {name: curves[name] for name in ("good", "bad")}).summary
    assert [row[columns.index("mean")][-1] == "*" for row in cells] == [True, False]
    without = {name: [[replace(step, right=None) for step in run] for run in runs[:1]] for name, runs in curves.items()}
    columns, cells = Comparison(header, without).summary
    assert not any("*" in cell or "=" in cell for row in cells for cell in row), "one run without rows says nothing"


def test_ready_batches_have_two_sets():
    run = gg.prune(model(), [tiny_batch(seed=1)], eval_data=[tiny_batch(rows=30, seed=2)], stop="heads=1")
    assert run.test is None
    assert set(run.header["data"]) == {"scoring", "evaluation"}
