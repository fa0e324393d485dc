"""What a run folder, a model or other people's files must never lose or be taken for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import LABEL_NAMES, tiny_model, tiny_rows, tiny_tokenizer

import greedy_gnorm as gg
from greedy_gnorm.cli.app import main
from greedy_gnorm.records.files import locked, replace_folder, write_text


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, tiny_rows(60))))
    return path


@pytest.fixture
def call(model_folder, rows):
    return ["prune", str(model_folder), "--data", str(rows), "--stop", "heads=5", "--no-latency", "--quiet"]


@pytest.fixture
def half(call, tmp_path, capsys):
    """A run of five steps of which the last two were lost, and its model."""
    out = tmp_path / "run"
    assert main([*call, "--out", str(out)]) == 0
    lines = (out / "journal.jsonl").read_text().splitlines(keepends=True)
    (out / "journal.jsonl").write_text("".join(lines[:4]))
    shutil.rmtree(out / "model")
    header = json.loads((out / "run.json").read_text())
    del header["result"]
    (out / "run.json").write_text(json.dumps(header))
    capsys.readouterr()
    return out


def resumed(call, out, capsys):
    code = main([*call, "--out", str(out), "--resume"])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line["quality"].update(accuracy=0.9),
        lambda line: line.update(removed=[[0, 0]] if line["removed"] != [[0, 0]] else [[0, 1]]),
        lambda line: line.update(parameters=7),
        lambda line: line["scores"][0].__setitem__(0, 0.5),
        lambda line: line.update(stop="enough"),
    ],
)
def test_a_changed_value_in_an_earlier_line_is_refused(change, call, half, capsys):
    lines = [json.loads(line) for line in (half / "journal.jsonl").read_text().splitlines()]
    change(lines[2])
    (half / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, err = resumed(call, half, capsys)
    assert code == 2
    assert "Line 3 of" in err
    assert "its seal does not match" in err


def test_equal_runs_have_equal_seals(call, half, tmp_path, capsys):
    assert resumed(call, half, capsys)[0] == 0
    assert main([*call, "--out", str(tmp_path / "again")]) == 0
    seals = [
        [json.loads(line)["seal"] for line in (each / "journal.jsonl").read_text().splitlines()]
        for each in (half, tmp_path / "again")
    ]
    assert seals[0] == seals[1]
    assert len(set(seals[0])) == 6


@pytest.mark.filterwarnings("ignore:.*torn")
def test_a_torn_line_that_is_no_text_is_dropped(call, half, capsys):
    with (half / "journal.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "\xff\xfe')
    assert resumed(call, half, capsys)[0] == 0


def test_a_model_that_differs_in_its_configuration_alone_is_another(call, half, model_folder, capsys):
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 0.1}))
    code, err = resumed(call, half, capsys)
    assert code == 2
    assert "the model configuration differs" in err


def test_changed_data_of_the_same_time_is_other_data(call, half, rows, capsys):
    time = rows.stat().st_mtime_ns
    rows.write_text("\n".join(map(json.dumps, reversed(tiny_rows(60)))))
    os.utime(rows, ns=(time, time))
    code, err = resumed(call, half, capsys)
    assert code == 2
    assert "rows differ" in err


def test_a_folder_is_replaced_whole(tmp_path, monkeypatch):
    """Whatever the moment, there is a whole folder at the place or none."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "a").touch()
    (place / "b").touch()
    seen = []
    remove, move = os.remove, os.replace

    def look(function):
        def looking(*arguments, **options):
            seen.append(sorted(path.name for path in place.iterdir()) if place.exists() else None)
            return function(*arguments, **options)

        return looking

    monkeypatch.setattr(os, "replace", look(move))
    monkeypatch.setattr(os, "remove", look(remove))
    monkeypatch.setattr(os, "unlink", look(os.unlink))
    with replace_folder(place) as partial:
        (partial / "c").touch()
    assert sorted(path.name for path in place.iterdir()) == ["c"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert len(seen) >= 4
    assert all(found in (["a", "b"], None, ["c"]) for found in seen)


def test_what_a_killed_process_left_is_taken_away(tmp_path):
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "weights").touch()
    (tmp_path / "parts" / "ae-0").mkdir(parents=True)
    (tmp_path / "parts" / "ae-0" / ".run.json.123.partial").touch()
    (tmp_path / "kept").touch()
    with locked(tmp_path):
        assert {path.name for path in tmp_path.rglob("*")} == {".lock", "kept", "parts", "ae-0"}


def test_a_failed_text_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("out", [".", "..", "nosuch/..", "/"])
def test_a_place_without_a_name_is_refused(out, call, tmp_path, monkeypatch, capsys):
    assert main([*call, "--out", str(tmp_path / "run")]) == 0
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", str(tmp_path / "run"), "--out", out]) == 2
    assert main(["export", str(tmp_path / "run"), "--onnx", "--out", out]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_an_export_takes_no_other_folders_place(call, tmp_path, capsys):
    assert main([*call, "--out", str(tmp_path / "run")]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for target in (tmp_path / "run", tmp_path / "run" / "model", tmp_path):
        assert main(["export", str(tmp_path / "run"), "--onnx", "--out", str(target)]) == 2
        assert "holds no earlier export" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_step_that_was_being_taken_is_taken_again(call, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "taken"
    assert main([*call, "--out", str(run)]) == 0
    take = ["prune", "--from-run", str(run), "--at-step", "2", "--out", str(out), "--no-latency", "--quiet"]
    assert main(take) == 0
    whole = (out / "model" / "model.safetensors").read_bytes()
    header = json.loads((out / "run.json").read_text())
    del header["result"]
    (out / "run.json").write_text(json.dumps(header))
    shutil.rmtree(out / "model")
    assert main(take) == 0
    assert (out / "model" / "model.safetensors").read_bytes() == whole
    capsys.readouterr()
    assert main(take) == 2
    assert "already holds a run" in capsys.readouterr().err
    code, err = resumed(call, out, capsys)
    assert code == 2
    assert "taken was" in err
    assert (out / "model" / "model.safetensors").read_bytes() == whole


def nan_model(folder, **options):
    model = tiny_model("bert", num_hidden_layers=1, **options)
    with torch.no_grad():
        model.bert.encoder.layer[0].attention.self.query.weight[0, 0] = torch.nan
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("score", ["magnitude", "gnorm", "entropy", "leave-one-out"])
def test_nan_weights_have_no_score(score, tmp_path, rows, capsys):
    model = nan_model(tmp_path / "model", **LABEL_NAMES)
    assert main(["score", str(model), "--data", str(rows), "--score", score, "--out", str(tmp_path / "scores")]) == 2
    assert "finite" in capsys.readouterr().err
    assert not (tmp_path / "scores").exists()


def test_nan_weights_are_not_exported(tmp_path, capsys):
    model = nan_model(tmp_path / "model", **LABEL_NAMES)
    assert main(["export", str(model), "--onnx", "--out", str(tmp_path / "onnx")]) == 2
    assert "NaN or infinite" in capsys.readouterr().err
    assert not (tmp_path / "onnx").exists()


def test_a_run_that_failed_before_its_first_step_does_not_block_its_folder(tmp_path, rows, model_folder, capsys):
    out, model = tmp_path / "run", nan_model(tmp_path / "model", **LABEL_NAMES)
    options = ["--data", str(rows), "--out", str(out), "--stop", "heads=1", "--samples", "8", "--quiet"]
    assert main(["prune", str(model), *options]) == 2
    assert "NaN or infinite" in capsys.readouterr().err
    assert (out / "run.json").exists()
    assert main(["prune", str(model_folder), *options]) == 0
    assert main(["prune", str(model_folder), *options]) == 2
    assert "already holds a run" in capsys.readouterr().err
    shutil.rmtree(out)
    assert main(["prune", str(model), *options]) == 2
    assert main(["prune", str(model_folder), *options, "--resume"]) == 0


def test_nan_weights_in_a_regression(tmp_path, capsys):
    model = nan_model(tmp_path / "model", num_labels=1, problem_type="regression")
    data = tmp_path / "numbers.jsonl"
    texts = [row["text"] for row in tiny_rows(30)]
    data.write_text("\n".join(json.dumps({"text": text, "label": place / 7}) for place, text in enumerate(texts)))
    assert main(["prune", str(model), "--data", str(data), "--out", str(tmp_path / "run")]) == 2
    assert "finite" in capsys.readouterr().err


def test_a_disk_that_holds_magnitudes(model_folder, rows, tmp_path):
    plain = gg.score(str(model_folder), str(rows), score="magnitude")
    spread = gg.score(str(model_folder), str(rows), score="magnitude", device_map={"": "disk"})
    assert plain.values.tolist() == spread.values.tolist()


@pytest.mark.parametrize("places", ['{"": "meta"}', "{}", "{"])
def test_odd_places_for_a_model(places, call, tmp_path, capsys):
    assert main([*call, "--out", str(tmp_path / "run"), "--device-map", places]) == 2
    assert "device_map" in capsys.readouterr().err


def test_a_world_that_is_no_number(tmp_path, capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "abc", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["methods"]) == 2
    assert "WORLD_SIZE is 'abc'" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_result_that_can_not_be_shown(call, tmp_path):
    command = [sys.executable, "-m", "greedy_gnorm", *call, "--out", str(tmp_path / "run")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "can't be shown" in done.stderr
    assert (tmp_path / "run" / "model" / "config.json").exists()


def compared(model_folder, rows, out, *more):
    return main(
        ["compare", str(model_folder), "--data", str(rows), "--samples", "9", "--out", str(out), "--quiet", *more]
    )


def test_a_comparison_goes_on_with_more_of_the_same_only(model_folder, rows, tmp_path, capsys):
    out = tmp_path / "compare"
    small = ("--methods", "greedy-gnorm,random", "--runs", "2", "--trajectories", "2")
    assert compared(model_folder, rows, out, *small) == 0
    parts = {path: path.read_bytes() for path in (out / "parts").rglob("*.jsonl")}
    more = ("--methods", "greedy-gnorm,ae,random", "--runs", "3", "--trajectories", "3", "--resume")
    assert compared(model_folder, rows, out, *more) == 0
    assert {path: path.read_bytes() for path in parts} == parts
    assert len(list((out / "parts").iterdir())) == 9
    about = (out / "experiment.json").read_bytes()
    capsys.readouterr()
    for other in (("--seed", "5"), ("--samples", "12"), ("--eval-samples", "8")):
        assert compared(model_folder, rows, out, *more, *other) == 2
        assert "holds another comparison" in capsys.readouterr().err
    assert (out / "experiment.json").read_bytes() == about
    assert compared(model_folder, rows, out, *small, "--resume") == 0
    table = (out / "tables" / "comparison.csv").read_text()
    assert [line.split(",")[:2] for line in table.splitlines()[1:]] == [["greedy-gnorm", "2"], ["random", "2"]]
    assert "random, run 2" in (out / "report.html").read_text()
    assert "random, run 3" not in (out / "report.html").read_text()


def test_options_of_a_score_beside_other_scores(model_folder, rows, tmp_path, capsys):
    methods = ("--methods", "greedy-gnorm,ae", "--runs", "1")
    assert compared(model_folder, rows, tmp_path / "c", *methods, "--score-options", "variant=A") == 0
    told = {
        name: json.loads((tmp_path / "c" / "parts" / name / "run.json").read_text())["config"]["score_options"]
        for name in ("greedy-gnorm-0", "ae-0")
    }
    assert told == {"greedy-gnorm-0": None, "ae-0": {"variant": "A"}}
    assert compared(model_folder, rows, tmp_path / "d", *methods, "--score-options", "wings=2") == 2
    assert "No score of greedy-gnorm, ae has the option 'wings'" in capsys.readouterr().err


def test_runs_that_can_not_differ_are_told(model_folder, rows, tmp_path):
    with pytest.warns(UserWarning, match="do not show how results vary between samples"):
        gg.compare(str(model_folder), str(rows), eval_data=str(rows), out=tmp_path / "c", methods="ae", runs=2)
