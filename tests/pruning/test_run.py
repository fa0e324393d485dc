"""Whole runs on tiny models: the loop, the run folder, resuming, and the caller's model."""

from __future__ import annotations

import csv
import itertools
import json

import numpy as np
import pytest
import torch
from conftest import LABEL_NAMES, tiny_batch, tiny_model, tiny_rows, tiny_tokenizer
from twins import slow_gradient_norms

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import evaluate
from greedy_gnorm.records.journal import Journal
from greedy_gnorm.units import Step, Unit, removed_by

DATA, EVALUATION = [tiny_batch(seed=1)], [tiny_batch(rows=30, seed=2)]


def run(model=None, **options):
    options = {"eval_data": EVALUATION, "stop": "all", **options}
    return gg.prune(model or tiny_model("bert", num_hidden_layers=2), DATA, **options)


def essence(steps):
    """What must not depend on when and how often a run was interrupted: all but the seconds."""
    return [{name: value for name, value in step.to_json().items() if name != "seconds"} for step in steps]


def greedy_by_hand(model, count, sign=1):
    """The paper's Algorithm 1, spelled out with the slow twin."""
    order = []
    for _ in range(count):
        logs = np.log(slow_gradient_norms(model, DATA)).sum(0)
        head = Unit(*(int(place) for place in np.unravel_index(np.nanargmin(sign * logs), logs.shape)))
        gg.remove_heads(model, {head.site: [head.index]})
        order.append(head)
    return order


def test_the_order_is_that_of_the_algorithm_by_hand(family):
    total = len(find_sites(tiny_model(family), "heads").survivors())
    expected = greedy_by_hand(tiny_model(family, dtype=torch.float64), total)
    steps = run(tiny_model(family, dtype=torch.float64)).steps
    assert removed_by(steps) == expected
    assert [step.step for step in steps] == list(range(total + 1))
    assert steps[0].removed == ()
    assert steps[0].scores is None
    assert steps[-1].stop == "no head is left to remove"
    assert all(step.stop is None for step in steps[:-1])


def test_inverse_removes_the_most_important_first():
    expected = greedy_by_hand(tiny_model("bert", num_hidden_layers=2, dtype=torch.float64), 8, sign=-1)
    model = tiny_model("bert", num_hidden_layers=2, dtype=torch.float64)
    assert removed_by(run(model, method="inverse-gnorm").steps) == expected


def test_random_is_seeded_and_uniform():
    orders = {seed: removed_by(run(method="random", seed=seed).steps) for seed in range(12)}
    assert removed_by(run(method="random", seed=3).steps) == orders[3]
    assert all(len(set(order)) == 8 for order in orders.values())
    assert len({order[0] for order in orders.values()}) > 3


def test_quality_and_size_are_those_of_the_model_at_each_step():
    model = tiny_model("bert", num_hidden_layers=2)
    steps = run(model).steps
    for step in steps:
        gg.remove_heads(model, {head.site: [head.index] for head in step.removed})
        assert step.quality == evaluate(find_sites(model, "heads"), ready_batches(EVALUATION))
        assert step.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert step.bytes == 4 * step.parameters


def test_scores_are_those_the_pick_was_made_by():
    for step in run().steps[1:]:
        assert step.removed == tuple(step.scores.order()[:1])
        assert np.isnan(step.scores.values).sum() == step.step - 1


def test_the_solution_is_chosen_from_the_curve_and_the_model_is_its(tmp_path):
    result = run(out=tmp_path / "run", stop="knee")
    chosen = result.solution.step
    assert 0 <= chosen < len(result.steps)
    assert len(find_sites(result.model, "heads").removed()) == chosen
    loaded = gg.load(tmp_path / "run" / "model")
    assert find_sites(loaded, "heads").removed() == sorted(removed_by(result.steps[: chosen + 1]))
    assert evaluate(find_sites(loaded, "heads"), ready_batches(EVALUATION)) == pytest.approx(
        dict(result.solution.quality), abs=1e-6
    )


@pytest.mark.parametrize(
    ("options", "count"),
    [({"stop": "heads=3"}, 3), ({"stop": "fraction=0.5"}, 4), ({"stop": ["heads=7", "fraction=0.25"]}, 2)],
)
def test_counting_rules(options, count):
    result = run(**options)
    assert len(result.steps) - 1 == result.solution.step == count
    assert len(find_sites(result.model, "heads").removed()) == count


def test_several_heads_a_step_do_not_overshoot():
    steps = run(heads_per_step=3, stop="heads=7").steps
    assert [len(step.removed) for step in steps] == [0, 3, 3, 1]
    assert [len(step.removed) for step in run(heads_per_step=5).steps] == [0, 5, 3]


def test_scores_computed_once_or_every_few_steps():
    once = run(recompute=0).steps
    assert removed_by(once) == once[1].scores.order()
    every_three = run(recompute=3).steps
    for first, second in itertools.pairwise(every_three[1:]):
        carried = first.scores.without(first.removed)
        same = np.array_equal(carried.values, second.scores.values, equal_nan=True)
        assert same == (second.step % 3 != 1)


def test_heads_can_be_protected_and_a_minimum_kept():
    result = run(protect=[(0, 1), 1])
    assert {head.site for head in removed_by(result.steps)} == {0}
    assert Unit(0, 1) not in removed_by(result.steps)
    assert result.steps[-1].stop == "no head is left to remove"
    result = run(min_heads=2)
    assert len(removed_by(result.steps)) == 4
    counts = [len(site.survivors) for site in find_sites(run(min_heads=2, stop="heads=4").model, "heads")]
    assert counts == [2, 2]
    for wrong, message in (
        ({"protect": [(0, 9)]}, "layer 0 has no head 9; its heads are 0 to 3"),
        ({"protect": [2]}, "no layer 2; its layers are 0 to 1"),
        ({"protect": [0, 1]}, "all are protected"),
        ({"min_heads": 4}, "all are protected"),
        ({"min_heads": 2, "stop": "heads=5"}, "from 1 to 4"),
        ({"min_heads": -1}, "at least 0"),
    ):
        with pytest.raises(gg.GnormError, match=message):
            run(**wrong)


def test_a_model_with_one_head():
    model = tiny_model("bert", num_hidden_layers=1, num_attention_heads=1)
    result = run(model)
    assert removed_by(result.steps) == [Unit(0, 0)]
    assert result.solution.step == 0
    gg.remove_heads(model, {0: [0]})
    with pytest.raises(gg.GnormError, match="no attention heads left"):
        run(model)


def test_an_evaluation_set_smaller_than_a_batch():
    result = gg.prune(
        tiny_model("bert", **LABEL_NAMES),
        tiny_rows(30),
        tokenizer=tiny_tokenizer(),
        eval_data=tiny_rows(33)[30:],
        stop="heads=1",
    )
    assert {use: part["rows"] for use, part in result.header["data"].items()} == {
        "scoring": 23, "evaluation": 7, "test": 3
    }  # fmt: skip


def test_pruning_goes_on_from_a_pruned_model():
    model = tiny_model("bert", num_hidden_layers=2)
    gg.remove_heads(model, {0: [0, 1]})
    result = run(model, stop="all")
    assert len(removed_by(result.steps)) == 6
    assert np.isnan(result.steps[1].scores.values).sum() == 2


@pytest.mark.draws
def test_the_run_folder(tmp_path, model_folder, data_file):
    folder = tmp_path / "run"
    result = gg.prune(str(model_folder), str(data_file), stop="all", out=folder, samples=20, seed=5)
    header = json.loads((folder / "run.json").read_text())
    assert header["seed"] == header["config"]["seed"] == 5
    assert header["versions"]["torch"] == torch.__version__
    assert header["data"]["scoring"]["rows"] == 20
    assert len(header["data"]["scoring"]["fingerprint"]) == 16
    assert header["result"]["solution"] == result.solution.step
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(9))
    assert set(lines[1]) >= {"step", "removed", "scores", "quality", "parameters", "bytes", "seconds"}
    assert set(lines[1]["quality"]) == {"accuracy", "macro_f1", "mcc", "loss"}
    assert np.array(lines[1]["scores"]).shape == (2, 4)
    assert essence(Step.from_json(line) for line in lines) == essence(result.steps)
    with (folder / "tables" / "curve.csv").open() as file:
        assert [int(row["heads_removed"]) for row in csv.DictReader(file)] == list(range(9))
    assert "| Accuracy |" in (folder / "tables" / "parameters.md").read_text()
    for name in ("curve", "mask", "scores"):  # what they plot: tests/report/test_figures.py
        assert (folder / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (folder / "figures" / f"{name}.svg").read_text()
    assert {path.name for path in (folder / "model").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "README.md",
    }
    assert not [path for path in folder.rglob("*") if "partial" in path.name or path.suffix in (".bin", ".pt", ".pkl")]


def test_the_same_seed_gives_the_same_run(data_file, model_folder):
    first, second, other = (
        gg.prune(str(model_folder), str(data_file), stop="heads=3", samples=9, seed=seed) for seed in (1, 1, 2)
    )
    assert essence(first.steps) == essence(second.steps)
    assert essence(first.steps) != essence(other.steps)


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("options", "torn"),
    [({}, False), ({}, True), ({"recompute": 0}, False), ({"recompute": 3}, True), ({"method": "random"}, False)],
    ids=str,
)
def test_a_run_resumed_ends_like_one_that_was_never_stopped(options, torn, tmp_path):
    whole = run(out=tmp_path / "whole", **options)

    def stop_at(number):
        def on_step(step, gone, limit):
            if step.step == number:
                raise Stop

        return on_step

    for number in (0, 2, 5):
        with pytest.raises(Stop):
            run(out=tmp_path / "parts", resume=number > 0, on_step=stop_at(number), **options)
    if torn:
        with (tmp_path / "parts" / "journal.jsonl").open("a") as file:
            file.write('{"step": 6, "removed": [[0,')
        with pytest.warns(UserWarning, match="torn"):
            resumed = run(out=tmp_path / "parts", resume=True, **options)
    else:
        resumed = run(out=tmp_path / "parts", resume=True, **options)
    assert essence(resumed.steps) == essence(whole.steps)
    assert essence(Journal.read(tmp_path / "parts").steps) == essence(whole.steps)
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]


def test_resuming_a_finished_run_changes_nothing_and_an_empty_folder_begins_one(tmp_path, caplog):
    with caplog.at_level("INFO", "greedy_gnorm"):
        first = run(out=tmp_path / "run", resume=True)
    assert "holds no run to resume: starting from the beginning" in caplog.text
    before = (tmp_path / "run" / "journal.jsonl").read_bytes()
    again = run(out=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == before
    assert again.solution.step == first.solution.step


def test_another_run_is_refused_not_overwritten(tmp_path):
    folder = tmp_path / "run"
    run(out=folder, stop="heads=1")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(gg.RunFolderError, match=r"already holds a run.*--resume"):
        run(out=folder, stop="heads=1")
    for changed, message in (
        ({"stop": "heads=2"}, "stop was"),
        ({"seed": 1}, "seed was 0 and is now 1"),
        ({"model": tiny_model("bert", num_hidden_layers=2, seed=9)}, "the weights of the model differ"),
        ({"eval_data": [tiny_batch(seed=7)]}, "the evaluation rows differ[.]"),
    ):
        with pytest.raises(gg.RunFolderError, match=f"another run: {message}"):
            run(**{"out": folder, "resume": True, "stop": "heads=1", **changed})
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious.txt").write_text("mine")
    with pytest.raises(gg.RunFolderError, match="not empty"):
        run(out=tmp_path / "other")


def test_a_damaged_journal_is_refused(tmp_path):
    folder = tmp_path / "run"
    run(out=folder, stop="heads=2")
    lines = (folder / "journal.jsonl").read_text().splitlines()
    (folder / "journal.jsonl").write_text("\n".join([lines[0], "{}", lines[2]]) + "\n")
    with pytest.raises(gg.RunFolderError, match=r"Line 2 .* is damaged"):
        run(out=folder, stop="heads=2", resume=True)
    (folder / "journal.jsonl").write_text("\n".join([lines[0], lines[2]]) + "\n")
    with pytest.raises(gg.RunFolderError, match="is step 2, not 1"):
        run(out=folder, stop="heads=2", resume=True)


def test_a_half_precision_checkpoint_stays_one(tmp_path):
    model = tiny_model("bert", num_hidden_layers=2, dtype=torch.float16)
    result = run(model, stop="heads=2", out=tmp_path / "run")
    assert result.model.dtype == torch.float16
    assert gg.load(tmp_path / "run" / "model").dtype == torch.float16
    assert result.solution.bytes == 2 * result.solution.parameters


def test_unknown_names_list_the_choices():
    for wrong, message in (
        ({"method": "gredy-gnorm"}, "Did you mean 'greedy-gnorm'.*Choose from: greedy-gnorm, inverse-gnorm, ae"),
        ({"objective": "x"}, "Unknown objective 'x'.*logit-norm, loss"),
        ({"stop": "x"}, "Unknown stopping rule 'x'.*heads, fraction"),
        ({"dtype": "int8"}, "dtype must be 'auto', 'float32'"),
        ({"device": "nowhere"}, "Can't compute on 'nowhere'"),
        ({"recompute": -1}, "recompute"),
        ({"heads_per_step": 0}, "at least 1"),
        ({"samples": -3}, "samples must be at least 1"),
    ):
        with pytest.raises(gg.GnormError, match=message):
            run(**wrong)
    with pytest.raises(gg.GnormError, match=r"Unknown score 'x'. Choose from: .*gnorm"):
        gg.score(tiny_model("bert"), DATA, score="x")


def test_a_model_without_a_trained_classifier_is_refused(tmp_path):
    from conftest import tiny_config
    from transformers import BertForMaskedLM

    BertForMaskedLM(tiny_config("bert")).save_pretrained(tmp_path)
    with pytest.raises(gg.GnormError, match=r"no weights for .*classifier.*BertForMaskedLM"):
        gg.load(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path, data_file):
    tiny_model("bert", **LABEL_NAMES).save_pretrained(tmp_path / "bare")
    with pytest.raises(gg.GnormError, match="has no tokenizer"):
        gg.prune(tmp_path / "bare", data_file)


@pytest.mark.parametrize("damage", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_folder_is_refused(damage, model_folder, data_file):
    (model_folder / damage).write_text("{}" if damage != "model.safetensors" else "junk")
    with pytest.raises(gg.GnormError, match="Can't"):
        gg.prune(model_folder, data_file)
    with pytest.raises(gg.GnormError, match="is a file"):
        gg.load(model_folder / "config.json")


def test_nan_weights_are_refused_whatever_the_method():
    model = tiny_model("bert")
    with torch.no_grad():
        model.classifier.weight[0, 0] = float("nan")
    with pytest.raises(gg.NonFiniteScore, match="NaN or infinite"):
        run(model, method="random")


@pytest.mark.parametrize("content", ["{}", "[]", "null", "{"])
def test_a_damaged_header_is_refused(content, tmp_path):
    run(out=tmp_path / "run", stop="heads=1")
    (tmp_path / "run" / "run.json").write_text(content)
    with pytest.raises(gg.RunFolderError, match=r"not the file of a run|no readable run"):
        run(out=tmp_path / "run", stop="heads=1", resume=True)


def test_reading_a_journal_writes_nothing(tmp_path):
    run(out=tmp_path / "run", stop="heads=2")
    path = tmp_path / "run" / "journal.jsonl"
    path.write_text(path.read_text() + '{"step": 3')
    before = path.read_bytes()
    assert len(Journal.read(tmp_path / "run").steps) == 3
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("protect", ["0.1"]),
        ("stop", 5),
        ("samples", "x"),
        ("seed", -1),
        ("seed", True),
        ("text", 3),
        ("device", "meta"),
    ],
)
def test_settings_of_the_wrong_type_are_refused(name, value):
    with pytest.raises(gg.GnormError, match="Can't compute" if name == "device" else name):
        run(**{name: value})


def test_progress_counts_the_heads_that_went_before(tmp_path):
    def stop(step, gone, limit):
        if step.step == 3:
            raise Stop

    with pytest.raises(Stop):
        run(out=tmp_path / "run", stop="heads=5", on_step=stop)
    seen = []
    run(out=tmp_path / "run", stop="heads=5", resume=True, on_step=lambda step, gone, limit: seen.append((gone, limit)))
    assert seen == [(4, 5), (5, 5)]
