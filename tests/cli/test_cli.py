"""The command line as a person types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import tiny_model, tiny_rows, tiny_tokenizer

from greedy_gnorm.cli.app import main
from greedy_gnorm.report import figures


@pytest.fixture
def prune(model_folder, data_file, tmp_path):
    """`gnorm prune` on the tiny classifier; more arguments may follow or replace."""

    def call(*more, out="run", model=model_folder, data=data_file):
        return main(["prune", str(model), "--data", str(data), "--out", str(tmp_path / out), "--samples", "12", *more])

    return call


def test_prune_tells_what_it_did(prune, capsys, tmp_path):
    assert prune("--stop", "heads=3") == 0
    text = capsys.readouterr()
    assert "Removed 3 of 8 heads" in text.out
    assert "heads=3: 3 heads removed" in text.out
    assert str(tmp_path / "run" / "model") in text.out.replace("\n", "")
    assert "parameters" in text.out
    lines = [line for line in text.err.splitlines() if line.startswith("step")]
    assert len(lines) == 4
    assert "accuracy" in lines[1]
    assert "left" in lines[-1]
    assert "scoring: 12 rows" in text.err


def test_quiet_and_json(prune, capsys, tmp_path):
    assert prune("--stop", "heads=3", "--quiet", "--json") == 0
    text = capsys.readouterr()
    assert text.err == ""
    result = json.loads(text.out)
    assert result["heads"] == {"total": 8, "removed": 3}
    assert result["out"] == str(tmp_path / "run")
    assert (
        result["quality"]["accuracy"][0]
        == json.loads((tmp_path / "run" / "run.json").read_text())["result"]["quality"]["accuracy"][0]
    )


def test_resume(prune, capsys):
    assert prune("--stop", "heads=3") == 0
    assert prune("--stop", "heads=3") == 2
    assert "--resume" in capsys.readouterr().err
    assert prune("--stop", "heads=3", "--resume") == 0


def test_options_from_a_file_and_the_line_wins(model_folder, data_file, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {model_folder}\ndata: {data_file}\nout: {tmp_path / 'a'}\nstop: heads=2\nmethod: random\nsamples: 9\n"
    )
    assert main(["prune", "--config", str(path), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["heads"]["removed"] == 2
    header = json.loads((tmp_path / "a" / "run.json").read_text())
    assert (header["config"]["method"], header["config"]["samples"]) == ("random", 9)
    assert (
        main(["prune", "--config", str(path), "--out", str(tmp_path / "b"), "--stop", "heads=4", "--json", "--quiet"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["heads"]["removed"] == 4
    path.write_text("metod: random\n")
    assert main(["prune", "--config", str(path)]) == 2
    assert "unknown setting 'metod'" in capsys.readouterr().err
    path.write_text("- a\n- b\n")
    assert main(["prune", "--config", str(path)]) == 2
    path.write_text("a: !!python/object/apply:os.system ['true']\n")
    assert main(["prune", "--config", str(path)]) == 2


@pytest.mark.draws
def test_score_writes_the_matrix_and_a_heat_map(model_folder, data_file, tmp_path, capsys, monkeypatch):
    out, drawn = tmp_path / "scores", []
    heat_map = figures.heat_map
    monkeypatch.setattr(figures, "heat_map", lambda *given: drawn.append(given) or heat_map(*given))
    command = ["score", str(model_folder), "--data", str(data_file), "--out", str(out)]
    assert main([*command, "--score", "gnorm", "--objective", "loss"]) == 0
    content = json.loads((out / "scores.json").read_text())
    ((scores, title, sites),) = drawn
    assert (scores.values.tolist(), title) == (content["values"], "gnorm")
    assert [site.units for site in sites] == [4, 4]
    lowest = ", ".join(f"L{layer}·H{head}" for layer, head in content["order"][:5])
    assert f"Lowest scores: {lowest}\n" in capsys.readouterr().out
    assert len(content["values"]) == 2
    assert len(content["values"][0]) == 4
    assert set(content["parts"]) == {"q", "k", "v"}
    assert len(content["order"]) == 8
    assert (out / "scores.png").read_bytes().startswith(b"\x89PNG")
    product = [[content["parts"][name][0][0] for name in ("q", "k", "v")]]
    assert content["values"][0][0] == pytest.approx(product[0][0] * product[0][1] * product[0][2], rel=1e-12)


@pytest.mark.draws
def test_score_writes_through_no_link(model_folder, data_file, tmp_path, capsys):
    """A link in the folder that the user names is replaced; the file that it points to stays as it was."""
    out, elsewhere = tmp_path / "scores", tmp_path / "elsewhere"
    out.mkdir()
    names = ("scores.json", "scores.pdf", "scores.png", "scores.svg")
    elsewhere.write_text("precious")
    for name in names:
        (out / name).symlink_to(elsewhere)
    assert main(["score", str(model_folder), "--data", str(data_file), "--out", str(out), "--samples", "9"]) == 0
    assert elsewhere.read_text() == "precious"
    assert not any((out / name).is_symlink() for name in names)
    assert sorted(path.name for path in out.iterdir()) == sorted(names)


def test_methods(capsys):
    assert main(["methods"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("greedy-gnorm", "inverse-gnorm", "random", "logit-norm", "drop=D"))
    assert main(["methods", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["methods"][0]["--method"] == "greedy-gnorm"


SLOW = ("torch", "transformers", "datasets", "sklearn", "scipy", "matplotlib")
FIRST_WORDS = """
import json, sys
from greedy_gnorm.cli import main
for arguments, code in json.loads(sys.argv[1]):
    assert main(arguments) == code, arguments
    loaded = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
    assert not loaded, (arguments, loaded)
"""


def test_help_lists_and_errors_come_before_the_slow_libraries(model_folder, data_file, tmp_path):
    """Imports are counted, not seconds: these take seconds to load, and everything else well below one."""
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "file").touch()
    inputs = [str(model_folder), "--data", str(data_file)]
    recorded = str(Path(__file__).parents[1] / "records" / "runs-0.1.0" / "whole")
    steps = [["--at", "foo"], ["--at", "drop=x"], ["--at", "drop=3"], ["--at", "fastest"], ["--at-step", "99"]]
    calls = [
        *((["prune", "--from-run", recorded, *step], 2) for step in steps),
        (["--help"], 0),
        (["prune", "--help"], 0),
        (["methods"], 0),
        (["methods", "--json"], 0),
        (["prune", str(tmp_path / "none"), "--data", str(data_file)], 2),
        (["prune", "no-such-model", "--data", str(data_file)], 2),
        (["prune", str(model_folder), "--data", "none.csv"], 2),
        (["prune", *inputs, "--eval-data", "none.csv"], 2),
        (["prune", *inputs, "--out", str(tmp_path / "occupied")], 2),
        (["prune", *inputs, "--stop", "drop=abc"], 2),
        (["prune", *inputs, "--stop", "banana"], 2),
        (["prune", *inputs, "--method", "gnorm"], 2),
        (["prune", *inputs, "--objective", "x"], 2),
        (["prune", "--from-run", str(tmp_path / "none"), "--at-step", "1"], 2),
        (["compress", *inputs, "--method", "greedy-gnorm"], 2),
        (["compress", *inputs, "--macs", "140%"], 2),
        (["score", *inputs, "--score", "x"], 2),
        (["compare", *inputs, "--methods", "gnorm"], 2),
        (["compare", *inputs, "--out", str(tmp_path / "occupied")], 2),
        (["report", str(tmp_path / "none")], 2),
        (["table", str(tmp_path / "none")], 2),
        (["export", str(tmp_path / "none")], 2),
        (["eval", str(tmp_path / "none"), "--data", str(data_file)], 2),
        (["bench", str(tmp_path / "none")], 2),
        (["demo", "--stop", "banana"], 2),
    ]
    command = [sys.executable, "-c", FIRST_WORDS, json.dumps(calls), json.dumps(SLOW)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == sum(code == 2 for _, code in calls), done.stderr
    assert not (tmp_path / "runs").exists()


NEVER_LOADED = ("sklearn", "scipy.stats", "greedy_gnorm.demo")
ONE_RUN = """
import gc, json, sys
from greedy_gnorm.cli import main
assert main(json.loads(sys.argv[1])) == 0
assert gc.isenabled()
assert gc.get_freeze_count() > 100_000, "Python looks for garbage among the code of torch"
loaded = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
assert not loaded, loaded
"""


def test_a_run_loads_no_library_that_it_does_not_need(model_folder, data_file, tmp_path):
    """Each of these takes up to two seconds to load."""
    arguments = ["prune", str(model_folder), "--data", str(data_file), "--samples", "12", "--quiet"]
    command = [sys.executable, "-c", ONE_RUN, json.dumps(arguments), json.dumps(NEVER_LOADED)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("runs/*/report.html"))


def test_what_is_loaded_is_said_at_once(model_folder, data_file, tmp_path):
    command = [sys.executable, "-m", "greedy_gnorm", "score", str(model_folder), "--data", str(data_file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stderr.readline() == "Loading torch and transformers ...\n"
    process.kill()
    process.communicate()


def test_help_explains_itself(capsys):
    assert main(["--help"]) == 0
    assert "prune" in capsys.readouterr().out
    assert main(["prune", "--help"]) == 0
    text = capsys.readouterr().out
    for option in (
        "--data",
        "--eval-data",
        "--samples",
        "--eval-samples",
        "--method",
        "--objective",
        "--stop",
        "--seed",
    ):
        assert option in text
    for option in ("--quiet", "--out", "--resume", "--json", "--protect", "--min-heads"):
        assert option in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "/no/such.csv"}, "no file or folder /no/such.csv"),
        ({"model": "/no/such"}, "no model folder /no/such"),
        ({"model": "no-such-model"}, "There is no folder no-such-model here, and the hub can't be reached"),
        ({"model": "no such model"}, "no model of this name on the hub"),
        ({"more": ["--method", "x"]}, "Choose from: greedy-gnorm"),
        ({"more": ["--method", "gnorm"]}, "Did you mean 'greedy-gnorm'?"),
        ({"more": ["--method", "michel-gredy"]}, "Did you mean 'michel-greedy'?"),
        ({"more": ["--objective", "x"]}, "Choose from: logit-norm"),
        ({"more": ["--metric", "f2"]}, "Choose from: accuracy"),
        ({"more": ["--label-map", "neg=Bad"]}, "does not know the label 'Bad', which the label map gives for 'neg'"),
        ({"more": ["--stop", "x"]}, "Choose from: heads"),
        ({"more": ["--stop", "heads=0"]}, "N must be a whole number of heads, such as heads=5"),
        ({"more": ["--stop", "heads=9"]}, "from 1 to 8"),
        ({"more": ["--stop", "drop=abc"]}, "drop=abc: D must be at least 0"),
        ({"more": ["--stop", "drop=100%"]}, "D must be at least 0 and below 1"),
        ({"more": ["--stop", "fraction=2"]}, "at most 1"),
        ({"more": ["--label", "x"]}, "no column 'x'"),
        ({"more": ["--samples", "-1"]}, "at least 1"),
        ({"more": ["--samples", "many"]}, "--samples"),
        ({"more": ["--nonsense"]}, "--nonsense"),
        ({"more": ["--seed", "-1"]}, "seed must be at least 0"),
        ({"more": ["--score-options", "x=1"]}, "no option 'x'"),
        ({"more": ["--score-options", "x"]}, "score_options must be pairs such as variant=A,eps=1e-5"),
        ({"more": ["--label-map", "x"]}, "label_map must be pairs such as neg=NEGATIVE,pos=POSITIVE"),
        ({"more": ["--protect", "x"]}, "protect must be heads and layers such as 0.3,11"),
        ({"more": ["--protect", "0.9"]}, "layer 0 has no head 9; its heads are 0 to 3"),
        ({"more": ["--protect", "L5"]}, "this model has no layer 5; its layers are 0 to 1"),
        ({"more": ["--savings", "x"]}, "Unknown saving 'x'"),
        ({"more": ["--device-map", "{"]}, "not valid JSON"),
        ({"more": ["--dtype", "int8"]}, "dtype must be 'auto'"),
        ({"out": "occupied"}, "not empty"),
    ],
)
def test_a_users_error_is_one_message_and_code_2(prune, changes, message, capsys, tmp_path):
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "file").touch()
    more = changes.pop("more", [])
    assert prune(*more, **changes) == 2
    text = capsys.readouterr().err
    assert message in text
    assert "Traceback" not in text
    assert not (tmp_path / "run").exists()


def test_an_unsupported_family(prune, tmp_path, capsys):
    from transformers import AutoConfig

    AutoConfig.for_model("openai-gpt").save_pretrained(tmp_path / "gpt")
    assert prune(model=tmp_path / "gpt") == 2
    assert "'openai-gpt'; supported model types are: bert, roberta" in capsys.readouterr().err.replace("\n", " ")


def test_an_output_folder_that_can_not_be_made(prune, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert prune(out="file/run") == 2
    assert "Can't write to" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere: test_kill.py mounts a read-only disk")
def test_a_read_only_output_folder(prune, tmp_path, capsys):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert prune(out="locked/run") == 2
    assert "Can't write to" in capsys.readouterr().err


def test_debug_shows_the_traceback(prune):
    from greedy_gnorm import GnormError

    with pytest.raises(GnormError):
        prune("--method", "x", "--debug")


def test_signals_keep_the_journal_whole_and_say_how_to_continue(tmp_path, write_rows, capsys):
    """Ctrl-C after a few steps, a scheduler's SIGTERM after a few more; then the run is finished."""
    folder, out = tmp_path / "model", tmp_path / "run"
    tiny_model("bert", num_hidden_layers=6).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    data = write_rows(tiny_rows(200, labels=("0", "1", "2")))
    call = ["prune", str(folder), "--data", str(data), "--stop", "all", "--no-latency", "--out", str(out)]
    journal, done = out / "journal.jsonl", []
    for number, resume in ((signal.SIGINT, []), (signal.SIGTERM, ["--resume"])):
        command = [sys.executable, "-m", "greedy_gnorm", *call, *resume]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while not journal.exists() or journal.read_text().count("\n") < len(done) + 3:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Interrupted" in err
        assert "--resume" in err
        assert "Traceback" not in err
        steps = [json.loads(line)["removed"] for line in journal.read_text().splitlines()]
        assert steps[: len(done)] == done
        assert len(done) + 3 <= len(steps) < 25
        assert not (out / "model").exists()
        done = steps
    assert main([*call, "--resume", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 24
    assert [json.loads(line)["removed"] for line in journal.read_text().splitlines()][: len(done)] == done


def test_names_that_look_like_markup_are_shown_as_they_are(prune, capsys):
    assert prune("--stop", "heads=1", out="run[/b] :smile:") == 0
    assert "run[/b] :smile:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("protect: 0.10", "protect must be a list of (layer, head) pairs and layers, such as [(0, 3), 11], not 0.1"),
        ("label-map: [neg, pos]", "label_map must be a dict"),
        ("label-map: {no: NEGATIVE}", "label_map must be a dict from the data's labels to the model's"),
        ("score_options: 3", "score_options must be a dict"),
        ("samples: 3.5", "--samples"),
        ("samples: true", "--samples"),
        ("samples: [3]", "samples must be one value, not [3]"),
        ("resume: perhaps", "--resume"),
        ("format: tiny", "--format"),
        ("stop: {drop: 0.01}", "stop must be a name or a list of names, not {'drop': 0.01}"),
        ("stop: [drop=0.01, 3]", "stop must be a name or a list of names, not ['drop=0.01', 3]"),
    ],
)
def test_wrong_values_in_a_file(line, message, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(line + "\n")
    command = ["prune", "model", "--data", "rows.csv", "--out", str(tmp_path / "run"), "--config", str(path)]
    assert main(command) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert message in text
    assert "Traceback" not in text
    assert not (tmp_path / "run").exists()


def test_a_file_has_lists_and_dicts_and_every_option_by_its_name(model_folder, data_file, tmp_path, capsys):
    path, out = tmp_path / "run.yaml", tmp_path / "run"
    path.write_text(
        f"""model: {model_folder}
data: {data_file}
out: {out}
stop: [drop=0.9, heads=3]
protect: [[0, 3], 1]
label-map: {{neg: neg, pos: pos, neutral: neutral}}
method: ae
score_options: {{variant: A, eps: 1e-5}}
savings: [kept-layers, gram]
device-map:
samples: 9
format: dense
latency: false
quiet: true
json: true
"""
    )
    assert main(["prune", "--config", str(path)]) == 0
    text = capsys.readouterr()
    assert json.loads(text.out)["heads"]["removed"] == 3
    assert text.err == ""
    header = json.loads((out / "run.json").read_text())
    expected = {
        "stop": ["drop=0.9", "heads=3"],
        "protect": [[0, 3], 1],
        "label_map": {"neg": "neg", "pos": "pos", "neutral": "neutral"},
        "score_options": {"variant": "A", "eps": 1e-5},
        "savings": ["kept-layers", "gram"],
        "device_map": None,
        "samples": 9,
    }
    assert {name: header["config"][name] for name in expected} == expected
    assert header["result"]["latency"] == []
    assert "pruned_heads" not in json.loads((out / "model" / "config.json").read_text()), "the model is dense"
    line = ["--protect", "L0H3,1", "--label-map", "neg=neg,pos=pos,neutral=neutral", "--savings", "kept-layers,gram"]
    line += ["--score-options", "variant=A,eps=1e-5", "--stop", "drop=0.9", "--stop", "heads=3", "--method", "ae"]
    again = ["prune", str(model_folder), "--data", str(data_file), "--samples", "9", "--out", str(tmp_path / "again")]
    assert main([*again, *line, "--no-latency", "--quiet"]) == 0
    assert json.loads((tmp_path / "again" / "run.json").read_text())["config"] == header["config"]
    assert main(["prune", "--config", str(path), "--resume"]) == 0


@pytest.mark.parametrize("command", ["prune", "score", "compare"])
def test_the_list_of_settings_has_the_names_that_a_user_types(command, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("nonsense: 1\n")
    assert main([command, "--config", str(tmp_path / "run.yaml")]) == 2
    text = " ".join(capsys.readouterr().err.split())
    names = text.partition("Settings: ")[2].rstrip(".").split(", ")
    assert main([command, "--help"]) == 0
    options = re.findall(r"^  --([\w-]+)", capsys.readouterr().out, flags=re.MULTILINE)
    assert {"json", "quiet", "label-map", "model"} <= set(names)
    assert not {"form", "as-json", "as_json", "config", "show", "context", "name", "help"} & set(names)
    assert {*options, "model"} == {*names, "config", "help"}


def test_help_speaks_of_layers(capsys):
    for command in ("prune", "compress", "score", "compare", "report", "table", "export", "methods", "demo"):
        assert main([command, "--help"]) == 0
        assert "site" not in capsys.readouterr().out.lower()


def test_the_version(capsys):
    from greedy_gnorm import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gnorm {__version__}\n"


def test_the_demo_checks_its_options_before_it_trains(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["demo", "--stop", "banana"]) == 2
    assert main(["demo", "--seed", "-1"]) == 2
    assert not list(tmp_path.iterdir())
    assert "Unknown stopping rule 'banana'" in capsys.readouterr().err
