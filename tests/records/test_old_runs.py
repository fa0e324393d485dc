"""Folders that 0.1.0 wrote: they are read, steps are taken from them, and they are resumed."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from fingerprints import FILE, machine

import greedy_gnorm as gg
from greedy_gnorm.cli.app import main
from greedy_gnorm.comparison.analysis import read_comparison, read_experiment
from greedy_gnorm.records import schema
from greedy_gnorm.records.journal import Journal, identity
from greedy_gnorm.settings import Settings
from greedy_gnorm.units import Unit

OLD = Path(__file__).parent / "runs-0.1.0"
HALF = [
    "prune", "model", "--data", "rows.jsonl", "--samples", "12", "--stop", "heads=5", "--stop", "drop=0.9",
    "--score-options", "variant=A", "--method", "ae-greedy", "--label-map", "neg=neg,pos=pos",
    "--out", "half", "--resume", "--no-latency", "--quiet",
]  # fmt: skip
COMPARE = {"out": "comparison", "samples": 9, "eval_samples": 21, "methods": "greedy-gnorm,random", "runs": 1}


@pytest.fixture
def old(tmp_path, monkeypatch):
    """A copy of the folders, with the working directory that they were made in."""
    shutil.copytree(OLD, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def scores_of(line):
    return np.array([[np.nan if score is None else score for score in row] for row in line["scores"] or []])


def lines(folder):
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def change_header(path, change):
    header = json.loads(path.read_text())
    change(header)
    path.write_text(json.dumps(header))


def test_the_fixture_is_of_the_old_schema():
    for path in [*OLD.rglob("run.json"), *OLD.rglob("experiment.json")]:
        assert "schema" not in json.loads(path.read_text())
    assert lines(OLD / "half") == lines(OLD / "whole")[:3]


def test_settings_that_were_text_are_read_as_lists_and_dicts(old):
    half, finished = (Journal.read(old / name).header for name in ("half", "finished"))
    assert half["schema"] == schema.SCHEMA
    assert half["config"]["label_map"] == {"neg": "neg", "pos": "pos"}
    assert half["config"]["score_options"] == {"variant": "A"}
    assert half["config"]["stop"] == ["heads=5", "drop=0.9"]
    assert half["config"]["protect"] == []
    assert finished["config"]["protect"] == [[0, 1]]
    assert half["model"]["sites"][1] == {
        "name": "bert.encoder.layer.1.attention", "kind": "attention", "layer": 1, "units": 4, "applications": 1
    }  # fmt: skip
    assert half["higher_is_better"] is True


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("protect", "0.3, 11", [[0, 3], 11]),
        ("savings", "kept-layers,gram", ["kept-layers", "gram"]),
        ("savings", "none", "none"),
        ("device_map", '{"": "disk"}', {"": "disk"}),
        ("device_map", "auto", "auto"),
        ("score_options", "eps=1e-5, variant=A", {"eps": 1e-5, "variant": "A"}),
        ("samples", None, None),
    ],
)
def test_every_setting_that_was_text(name, text, value, old):
    change_header(old / "half" / "run.json", lambda header: header["config"].update({name: text}))
    assert Journal.read(old / "half").header["config"][name] == value


@pytest.mark.parametrize("folder", ["finished", "half", "whole", "comparison"])
def test_the_report(folder, old, capsys):
    assert main(["report", str(old / folder)]) == 0
    text = (old / folder / "report.html").read_text()
    assert "04904eee09bc2a36" in text
    assert ("L0·H1</" in text) == (folder == "finished"), "the protected head, among the settings"


def test_the_table(old, capsys):
    assert main(["table", str(old / "whole"), "--format", "csv"]) == 0
    model, *_ = csv.DictReader(capsys.readouterr().out.splitlines())
    steps = lines(old / "whole")
    assert [int(model[name]) for name in ("Params before", "Params after")] == [
        steps[0]["parameters"],
        steps[5]["parameters"],
    ]
    assert main(["table", str(old / "whole")]) == 0
    assert "on the rows that the step was chosen on" in capsys.readouterr().err


def test_a_step_is_taken(old, capsys):
    take = ["prune", "--from-run", "finished", "--at-step", "3", "--out", "taken", "--no-latency", "--quiet"]
    assert main(take) == 0
    removed = [tuple(unit) for line in lines(old / "finished")[:4] for unit in line["removed"]]
    assert gg.find_sites(gg.load(old / "taken" / "model"), "heads").removed() == sorted(Unit(*unit) for unit in removed)
    assert [line["removed"] for line in lines(old / "taken")] == [
        line["removed"] for line in lines(old / "finished")[:4]
    ]
    header = json.loads((old / "taken" / "run.json").read_text())
    assert header["schema"] == schema.SCHEMA
    assert header["config"]["protect"] == [[0, 1]]


def test_an_old_model_folder_loads(old):
    removed = sorted(Unit(*unit) for line in lines(old / "whole") for unit in line["removed"])
    assert len(removed) == 5
    assert gg.find_sites(gg.load(old / "whole" / "model"), "heads").removed() == removed


def test_an_interrupted_run_ends_as_it_would_have(old, capsys):
    before = (old / "half" / "journal.jsonl").read_bytes()
    assert main(HALF) == 0, capsys.readouterr().err
    assert (old / "half" / "journal.jsonl").read_bytes().startswith(before)
    ends = lines(old / "half"), lines(old / "whole")
    assert [line["removed"] for line in ends[0]] == [line["removed"] for line in ends[1]]
    assert [line["quality"]["accuracy"] for line in ends[0]] == [line["quality"]["accuracy"] for line in ends[1]]
    for ours, theirs in zip(*ends, strict=True):
        np.testing.assert_allclose(scores_of(ours), scores_of(theirs), rtol=1e-5)
    if (
        machine() == json.loads(FILE.read_text())["machine"]
    ):  # seals hold every digit of the scores, so they belong to the machine that made them
        assert [line["seal"] for line in ends[0]] == [line["seal"] for line in ends[1]]
    weights = [(old / name / "model" / "model.safetensors").read_bytes() for name in ("half", "whole")]
    assert weights[0] == weights[1]
    header = json.loads((old / "half" / "run.json").read_text())
    assert header["schema"] == schema.SCHEMA
    assert header["result"]["solution"] == 5
    assert Journal.read(old / "half").header == header, "what is written is read again as it is"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seed", "1"], "seed was 0 and is now 1"),
        (["--protect", "0.1"], r"protect was [] and is now [[0, 1]]"),
        (["--label-map", "neg=neg"], "label_map was {'neg': 'neg', 'pos': 'pos'} and is now {'neg': 'neg'}"),
        (["--score-options", "variant=B"], "score_options was {'variant': 'A'} and is now {'variant': 'B'}"),
    ],
)
def test_another_run_is_refused(more, message, old, capsys):
    before = (old / "half" / "journal.jsonl").read_bytes()
    assert main([*HALF, *more]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert (old / "half" / "journal.jsonl").read_bytes() == before


def test_where_it_computes_is_not_what_it_computes(old, capsys):
    resources = ["--cache-memory", "0", "--tokens-per-batch", "1024", "--device", "cpu", "--device-map", '{"": "cpu"}']
    assert main([*HALF, *resources]) == 0, capsys.readouterr().err
    assert [line["removed"] for line in lines(old / "half")] == [line["removed"] for line in lines(old / "whole")]


@pytest.mark.parametrize("name", ["savings", "min_heads", "trust_remote_code", "heads_per_step", "samples"])
def test_a_setting_that_a_record_does_not_have_yet_is_its_default(name, old):
    change_header(old / "half" / "run.json", lambda header: header["config"].pop(name))
    recorded = identity(Journal.read(old / "half").header)[name]
    assert recorded == Settings().to_json()[name]


def test_a_new_setting_is_no_difference_in_the_present_schema_either(old, capsys):
    assert main(HALF) == 0
    change_header(old / "half" / "run.json", lambda header: header["config"].pop("savings"))
    assert main(HALF) == 0, capsys.readouterr().err
    assert main([*HALF, "--savings", "none"]) == 2
    assert "savings was 'all' and is now 'none'" in capsys.readouterr().err


def test_a_comparison_is_resumed(old):
    before = {path: path.read_bytes() for path in (old / "comparison" / "parts").rglob("journal.jsonl")}
    read = read_comparison(old / "comparison")
    resumed = gg.compare("model", "rows.jsonl", trajectories=2, resume=True, **COMPARE)
    assert {path: path.read_bytes() for path in before} == before
    assert {name: len(walks) for name, walks in resumed.curves.items()} == {"greedy-gnorm": 1, "random": 2}
    for name, walks in resumed.curves.items():
        assert [[step.removed for step in walk] for walk in walks] == [
            [step.removed for step in walk] for walk in read.curves[name]
        ]
    more = gg.compare("model", "rows.jsonl", trajectories=3, resume=True, **COMPARE)
    assert len(more.curves["random"]) == 3
    assert json.loads((old / "comparison" / "experiment.json").read_text())["schema"] == schema.SCHEMA


def test_a_comparison_of_0_1_0_protected_no_head_whatever_it_recorded(old):
    change_header(
        old / "comparison" / "experiment.json", lambda header: header["config"].update(protect="0.1", min_heads=2)
    )
    config = read_experiment(old / "comparison")["config"]
    assert (config["protect"], config["min_heads"]) == ([], 0)
    with pytest.raises(gg.RunFolderError, match=r"protect was \[\] and is now \[\[0, 1\]\]"):
        gg.compare("model", "rows.jsonl", trajectories=2, resume=True, protect=[(0, 1)], **COMPARE)


@pytest.mark.parametrize("file", ["finished/run.json", "comparison/experiment.json"])
def test_a_later_schema_is_refused(file, old, capsys):
    change_header(old / file, lambda header: header.update(schema=3))
    assert main(["report", str((old / file).parent)]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "was written by a later version of greedy-gnorm (schema 3, this version reads up to 2): upgrade" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["config"].update(protect="x"), "protect must be heads and layers"),
        (lambda header: header["config"].update(label_map="x"), "label_map must be pairs"),
        (lambda header: header["config"].update(seed="x"), "seed must be"),
        (lambda header: header["model"].update(shape=[3, 4]), "schema is missing"),
        (lambda header: header.update(schema="2"), "is damaged"),
    ],
)
def test_a_damaged_old_header_is_refused(change, message, old, capsys):
    change_header(old / "finished" / "run.json", change)
    assert main(["report", str(old / "finished")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
