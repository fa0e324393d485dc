"""gnorm compress from rows to a saved model: targets, choices, resuming, steps taken out, runs without labels."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from conftest import LABEL_NAMES, tiny_batch, tiny_model, tiny_rows, tiny_tokenizer

import greedy_gnorm as gg
from greedy_gnorm import runs
from greedy_gnorm.data.sets import divided_rows
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.pruning.choices import choose
from greedy_gnorm.report.parameters import parameter_table
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import task_of
from greedy_gnorm.units import Cost, Measure, Step

OPTIONS = {"rounds": 3, "samples": 24, "calibration_tokens": 600, "measure_speed": False}
pytestmark = pytest.mark.filterwarnings("ignore:The calibration rows have")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in tiny_rows(200)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "classifier"
    tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def finished(folder, rows, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "half"
    return gg.compress(folder, rows, macs=0.5, out=out, **OPTIONS), out


def logits(model):
    batch = tiny_batch()
    batch.pop("labels")
    with torch.no_grad():
        return model(**batch).logits


def seals(folder):
    return [json.loads(line)["seal"] for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_the_target_is_reached_and_told(finished):
    run, out = finished
    first, last = run.steps[0].cost, run.solution.cost
    assert last.multiplications <= 0.5 * first.multiplications
    assert run.solution is run.steps[-1]
    assert run.reason == "--macs 0.5 is reached"
    assert len(run.steps) == 4
    result = json.loads((out / "run.json").read_text())["result"]
    assert result["multiplications"] == [first.multiplications, last.multiplications]
    assert result["neurons"]["total"] == 48
    assert sum(result["neurons"]["left"]) == 48 - result["neurons"]["removed"]
    assert result["heads"]["total"] == 8
    low, high = result["test"]["intervals"]["accuracy"]["after"]
    assert low <= result["test"]["quality"]["accuracy"][1] <= high
    assert [choice["step"] for choice in result["choices"] if "fastest" in choice["name"]] == [3]


def test_the_saved_model_is_the_solution(finished):
    run, out = finished
    loaded = gg.load(out / "model")
    assert torch.equal(logits(loaded), logits(run.model))
    assert [len(site.survivors) for site in find_sites(loaded)] == [
        len(site.survivors) for site in find_sites(run.model)
    ]


def test_no_row_has_two_uses(folder, rows):
    model = gg.load(folder)
    pool, choosing, test = divided_rows(task_of(model), None, rows, None, Settings(), needs_labels=True)
    texts = [{row.words for row in part} for part in (pool, choosing, test)]
    assert texts[0].isdisjoint(texts[1] | texts[2])
    assert texts[1].isdisjoint(texts[2])
    assert sum(map(len, texts)) == 200


def test_splits_are_used_for_what_they_are(folder, tmp_path):
    parts = {"train": range(100), "validation": range(100, 140), "test": range(140, 200)}
    all_rows = tiny_rows(200)
    for name, places in parts.items():
        lines = [json.dumps(all_rows[place]) + "\n" for place in places]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    task = task_of(gg.load(folder))
    pool, choosing, test = divided_rows(task, None, tmp_path, None, Settings(), needs_labels=True)
    assert [len(part) for part in (pool, choosing, test)] == [100, 40, 60]
    (tmp_path / "validation.jsonl").unlink()
    pool, choosing, test = divided_rows(task, None, tmp_path, None, Settings(), needs_labels=True)
    assert [len(part) for part in (pool, choosing, test)] == [100, 30, 30], "both from the test split"
    train, other = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    pool, choosing, other = divided_rows(task, None, train, other, Settings(), needs_labels=True)
    assert [len(part) for part in (pool, choosing, other)] == [75, 25, 60]


def test_a_run_that_was_cut_short_ends_alike(finished, folder, rows, tmp_path):
    _, out = finished
    for lines in (1, 2, 3):
        half = tmp_path / f"half-{lines}"
        shutil.copytree(out, half)
        kept = (half / "journal.jsonl").read_text().splitlines(keepends=True)[:lines]
        (half / "journal.jsonl").write_text("".join(kept), encoding="utf-8")
        header = json.loads((half / "run.json").read_text())
        del header["result"]
        (half / "run.json").write_text(json.dumps(header), encoding="utf-8")
        gg.compress(folder, rows, macs=0.5, out=half, resume=True, **OPTIONS)
        assert seals(half) == seals(out)
        weights = [(each / "model" / "model.safetensors").read_bytes() for each in (half, out)]
        assert weights[0] == weights[1]


def test_any_step_is_rebuilt(finished, tmp_path):
    run, out = finished
    for step in (1, 2):
        taken = gg.take_step(out, step, out=tmp_path / f"step-{step}", latency=False)
        assert torch.equal(logits(taken.model), logits(run.at(step)))
        assert torch.equal(logits(gg.load(tmp_path / f"step-{step}" / "model")), logits(taken.model))


def test_other_calibration_rows_are_noticed(finished, tmp_path, rows):
    _, out = finished
    text = rows.read_text()
    rows.write_text(text.replace("good", "dull"), encoding="utf-8")
    try:
        with pytest.raises(gg.GnormError, match="has changed since the run"):
            gg.take_step(out, 1, out=tmp_path / "step", latency=False)
    finally:
        rows.write_text(text, encoding="utf-8")


def test_no_label_is_needed(folder, tmp_path):
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": row["text"]}) + "\n" for row in tiny_rows(160)), encoding="utf-8")
    with pytest.raises(gg.DataError, match="Which column is the label"):
        gg.compress(folder, data, macs=0.5, **OPTIONS)
    run = gg.compress(folder, data, macs=0.5, labels="own", **OPTIONS)
    assert run.steps[0].quality == {"agreement": 1.0}
    assert run.measure == Measure("agreement", True, 1.0)
    assert set(run.test["quality"]) == {"agreement"}
    again = gg.compress(folder, data, macs=0.5, labels="own", **OPTIONS)
    assert [step.removed for step in again.steps] == [step.removed for step in run.steps]


def test_own_labels_beside_those_of_the_data(folder, rows):
    run = gg.compress(folder, rows, macs=0.6, labels="own", **OPTIONS)
    assert {"agreement", "accuracy", "macro_f1", "mcc", "loss"} == set(run.steps[0].quality)
    assert set(run.test["intervals"]) == {"agreement", "accuracy", "macro_f1", "mcc", "loss"}
    assert run.header["quality"] == "agreement"


def test_without_a_target_the_smallest_within_the_drop(folder, rows):
    run = gg.compress(folder, rows, max_drop=0.5, **{**OPTIONS, "rounds": 5})
    base = run.steps[0].quality["accuracy"]
    assert run.solution.quality["accuracy"] >= base - 0.5
    assert all(step.quality["accuracy"] < base - 0.5 for step in run.steps[run.solution.step + 1 :])


def test_choices_are_the_smallest_steps_within_a_loss():
    qualities = [0.8, 0.81, 0.79, 0.801, 0.794, 0.785, 0.7]
    steps = [
        Step(place, (), None, {"accuracy": quality}, Cost(100 - place, 400 - place, 1000 - 100 * place), {})
        for place, quality in enumerate(qualities)
    ]
    chosen = choose(steps, Measure("accuracy", True, 1.0), 10, fastest=True)
    assert [(choice.name, choice.step) for choice in chosen] == [
        ("free", 3), ("-1 point", 4), ("-2 points", 5), ("fastest", 6),
    ]  # fmt: skip
    assert chosen[-1].promised == pytest.approx(1000 / 400)


def test_units_of_one_kind_only(folder, rows):
    for units, kind in (("heads", "attention"), ("ffn", "ffn")):
        run = gg.compress(folder, rows, macs=0.75, units=units, **OPTIONS)
        sites = find_sites(run.model)
        touched = {site.kind for site in sites if len(site.survivors) < site.total}
        assert touched == {kind}


def test_a_uniform_result_is_an_ordinary_model(folder, rows, tmp_path):
    import transformers

    run = gg.compress(folder, rows, macs=0.7, units="ffn", uniform=True, multiple_of=4, out=tmp_path / "run", **OPTIONS)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert torch.equal(logits(plain), logits(run.model))
    assert plain.config.intermediate_size % 4 == 0
    assert not list((tmp_path / "run" / "model").glob("*.py"))
    table = parameter_table(str(tmp_path / "run"), None)
    assert [table.rows[0].before, table.rows[0].after] == [run.steps[0].parameters, run.solution.parameters]
    assert "loads without any flag" in (tmp_path / "run" / "model" / "README.md").read_text()


def test_promised_and_measured_speed_are_recorded(folder, rows, tmp_path):
    run = gg.compress(
        folder, rows, speedup=1.05, shape="4x16", out=tmp_path / "run", **{**OPTIONS, "measure_speed": True}
    )
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    assert header["times"]["whole"] == run.steps[0].cost.milliseconds
    assert run.solution.cost.milliseconds <= header["times"]["whole"] / 1.05
    assert header["shape"] == {"rows": 4, "tokens": 16, "squares": 256}
    assert [(each["batch"], each["tokens"]) for each in header["result"]["latency"]][-1] == (4, 16)
    assert all(choice["measured"] > 0 for choice in header["result"]["choices"])
    assert run.reason == "--speedup 1.05 is predicted"
    resumed = gg.compress(folder, rows, speedup=1.05, shape="4x16", out=tmp_path / "run", resume=True, **OPTIONS)
    assert resumed.steps[0].cost == run.steps[0].cost, "the times that the run measured are used again"


def test_a_time_is_measured_at_the_shape_of_its_target(folder, rows, tmp_path):
    run = gg.compress(folder, rows, speedup=1.05, out=tmp_path / "run", **{**OPTIONS, "measure_speed": True})
    shape = run.header["shape"]
    own = (shape["rows"], round(shape["tokens"]))
    assert own not in ((1, 32), (8, 128))
    assert [(each.batch, each.tokens) for each in run.latencies] == [(1, 32), own]
    taken = gg.take_step(tmp_path / "run", 1, out=tmp_path / "taken")
    assert [(each.batch, each.tokens) for each in taken.latencies] == [(1, 32), own]


def test_a_step_is_timed_in_the_precision_of_its_run(folder, rows, tmp_path, monkeypatch):
    half = tmp_path / "half"
    gg.load(folder).half().save_pretrained(half)
    tiny_tokenizer().save_pretrained(half)
    options = {**OPTIONS, "measure_speed": True, "rounds": 1}
    timed = []
    own = runs.torch_latencies
    monkeypatch.setattr(runs, "torch_latencies", lambda *given, **more: timed.append(given[:2]) or own(*given, **more))
    gg.compress(half, rows, macs=0.6, out=tmp_path / "run", **options)
    taken = gg.take_step(tmp_path / "run", 1, out=tmp_path / "taken")
    assert {model.dtype for pair in timed for model in pair} == {torch.float32}
    assert taken.model.dtype == torch.float16
    assert timed[-1][1].dtype == torch.float32


def test_pruning_heads_with_recovery(folder, rows, tmp_path):
    options = {"stop": "heads=3", "samples": 24, "calibration_tokens": 600, "latency": False}
    plain = gg.prune(folder, rows, **options)
    run = gg.prune(folder, rows, recover="least-squares", out=tmp_path / "run", **options)
    assert run.steps[1].removed == plain.steps[1].removed
    assert run.solution.quality["loss"] != plain.solution.quality["loss"]
    assert torch.equal(logits(gg.load(tmp_path / "run" / "model")), logits(run.model))
    assert not torch.equal(logits(run.model), logits(plain.model))
    taken = gg.take_step(tmp_path / "run", 2, out=tmp_path / "taken", latency=False)
    assert torch.equal(logits(taken.model), logits(run.at(2)))


def test_rules_by_multiplications(folder, rows):
    run = gg.prune(folder, rows, stop="macs=0.8", samples=24, latency=False)
    assert run.solution.cost.multiplications <= 0.8 * run.steps[0].cost.multiplications
    assert run.steps[-2].cost.multiplications > 0.8 * run.steps[0].cost.multiplications
    assert gg.prune(folder, rows, stop="speedup=1.25", samples=24).removed == run.removed
    with pytest.raises(gg.GnormError, match="`gnorm compress` removes feed-forward neurons too"):
        gg.prune(folder, rows, stop="speedup=9", samples=24)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "greedy-gnorm"}, "gnorm compress takes the methods joint-refit"),
        ({"macs": 1.5}, "macs must be a share between 0 and 1"),
        ({"speedup": 0.5}, "speedup must be a number above 1"),
        ({"max_drop": -1}, "max_drop must be a number, 0 or more"),
        ({"shape": "8 by 128"}, "shape must be rows x tokens"),
        ({"units": "neurons"}, "units must be 'heads', 'ffn' or 'both'"),
        ({"labels": "none"}, "labels must be 'data' or 'own'"),
        ({"recover": "magic"}, "recover must be 'none', 'least-squares', 'gates', 'mean' or 'distill'"),
        ({"shape": "8x4000", "speedup": 2}, "the model takes at most 48 tokens"),
        ({"min_heads": 4, "macs": 0.1, "protect": [0, 1]}, "all are protected"),
    ],
)
def test_wrong_settings_are_refused(options, message, folder, rows):
    with pytest.raises(gg.GnormError, match=message):
        gg.compress(folder, rows, **{**OPTIONS, **options})


def test_too_few_calibration_tokens_are_told(folder, rows):
    few = r"The calibration rows have \d+ tokens; 240 or more are advisable for maps with 24 inputs\. "
    with pytest.warns(UserWarning, match=few + "Use more of the rows: --calibration-tokens 240"):
        gg.compress(folder, rows, macs=0.8, **{**OPTIONS, "calibration_tokens": 50, "rounds": 1})
    few_rows = [{"text": row["text"]} for row in tiny_rows(30)]
    with pytest.warns(UserWarning, match=few + r"Give more rows\.$"):
        gg.compress(folder, few_rows, macs=0.8, labels="own", **{**OPTIONS, "rounds": 1})


def test_ready_batches_need_evaluation_batches(folder):
    with pytest.raises(gg.DataError, match="give data and eval_data"):
        gg.compress(folder, [tiny_batch()], macs=0.5, **OPTIONS)
    run = gg.compress(folder, [tiny_batch(rows=40)], eval_data=[tiny_batch(seed=3)], macs=0.5, **OPTIONS)
    assert run.solution.cost.multiplications <= 0.5 * run.steps[0].cost.multiplications
    assert run.test is None


def test_the_callers_model_is_not_changed(rows):
    model = tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES)
    before = [parameter.clone() for parameter in model.parameters()]
    run = gg.compress(model, rows, tokenizer=tiny_tokenizer(), macs=0.5, **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert find_sites(model).removed() == []
    assert run.model is not model
