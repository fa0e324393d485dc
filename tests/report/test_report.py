"""The report page as text, the commands that make it, and what it promises: any point becomes a model."""

from __future__ import annotations

import base64
import csv
import html
import json
import re
import shlex

import numpy as np
import pytest
import torch
from conftest import LABEL_NAMES, tiny_batch, tiny_model, tiny_rows, tiny_tokenizer
from journals import PREDICTIONS, RAGGED, comparison, header, joint_header, joint_walk, walk

import greedy_gnorm as gg
from greedy_gnorm.cli import console, sketch
from greedy_gnorm.cli.app import main
from greedy_gnorm.cli.progress import Progress
from greedy_gnorm.cli.steps import StepDisplay
from greedy_gnorm.pruning.curves import curve, mean_over_curve
from greedy_gnorm.pruning.run import Run, sites_of
from greedy_gnorm.records.journal import Journal
from greedy_gnorm.report import writer as report
from greedy_gnorm.report.outcome import curve_csv
from greedy_gnorm.units import Measure, SiteInfo, Unit, layer_names, removed_by, unit_name, unit_names

EVIL = '</script><img src=x onerror="alert(1)"><b>&amp;\u2028'


def content(path):
    """The data that the page's script reads."""
    (text,) = re.findall(r'<script type="application/json" id="content">(.*?)</script>', path.read_text("utf-8"), re.S)
    return json.loads(text)


def words(path):
    """What a reader sees, without scripts and style."""
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", path.read_text("utf-8"), flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def scores_of(run):
    """(scorings, heads of all layers) from the packed scores of a run on the page."""
    values = np.frombuffer(base64.b64decode(run["scores"]["values"]), "<f4")
    return values.reshape(-1, sum(row["units"] for row in run["rows"]))


@pytest.fixture
def made(tmp_path):
    """A finished run and its page."""
    journal = walk(tmp_path / "run", header())
    return journal, gg.write_report([journal.folder])


PERPLEXITY = {"quality": "perplexity", "higher_is_better": False}


@pytest.mark.parametrize("options", [{}, {"layout": RAGGED, "dtype": "bfloat16", **PERPLEXITY}])
def test_the_page_holds_the_journals_values(options, tmp_path):
    journal = walk(tmp_path / "run", header(**options))
    path = gg.write_report([journal.folder])
    assert path == journal.folder / "report.html"
    (run,) = content(path)["walks"]
    names = list(journal.steps[0].quality)
    assert run["qualities"] == {name: [round(step.quality[name], 6) for step in journal.steps] for name in names}
    assert run["parameters"] == [step.parameters for step in journal.steps]
    assert run["bytes"] == [step.bytes for step in journal.steps]
    units = [Unit(site, n) for site, row in enumerate(run["rows"]) for n in range(row["units"])]
    assert [units[head] for step in run["removed"] for head in step] == removed_by(journal.steps)
    assert run["solution"] == journal.header["result"]["solution"]
    packed = scores_of(run)
    for step, place in zip(journal.steps[1:], run["scores"]["places"][1:], strict=True):
        assert np.allclose(packed[place], np.concatenate(step.scores.logs) / np.log(10), rtol=1e-6, equal_nan=True)


def test_layers_of_any_shape_have_rows_and_names(tmp_path):
    journal = walk(tmp_path / "run", header(layout=RAGGED))
    path = gg.write_report([journal.folder])
    (run,) = content(path)["walks"]
    assert [(row["name"], row["units"]) for row in run["rows"]] == [("0", 4), ("1a", 4), ("1b", 6), ("2", 6)]
    assert run["names"][:5] == ["L0·H0", "L0·H1", "L0·H2", "L0·H3", "L1a·H0"]
    assert run["names"][8:] == [f"L1b·H{n}" for n in range(6)] + [f"L2·H{n}" for n in range(6)]
    text = words(path)
    names = [unit_name(sites_of(journal.header), unit) for unit in removed_by(journal.steps)]
    assert " ".join(re.findall(r"L\d[ab]?·H\d", text)) == " ".join(names), "the table of all steps"
    assert "3 layers of 4 to 10 heads" in text
    assert "site" not in text.replace("opposite", "")


def test_a_measure_where_lower_is_better(tmp_path):
    folder = comparison(tmp_path / "c", {"ae": 2, "michel": 2}, layout=RAGGED, **PERPLEXITY)
    path = gg.write_report([folder])
    page, text = content(path), words(path)
    walks = {
        name: [Journal.read(folder / "parts" / f"{name}-{run}").steps for run in (0, 1)] for name in ("ae", "michel")
    }
    measure = Measure("perplexity", higher_is_better=False)
    means = {name: np.mean([mean_over_curve(curve(w, measure)) for w in runs]) for name, runs in walks.items()}
    best = min(means, key=means.get)
    assert best != max(means, key=means.get)
    assert page["walks"][page["first"]]["label"] == f"{best}, run 1", "the run with the lowest curve"
    assert "Perplexity (lower is better)" in text
    assert page["charts"]["comparison"]["layout"]["yaxis"]["title"]["text"] == "Perplexity (lower is better)"
    lowest, highest = min(means.values()), max(means.values())
    assert re.search(rf"{lowest:.3f} \(\d+\.\d+ to \d+\.\d+\)[*=]", text), "marked as the best"
    assert not re.search(rf"{highest:.3f} \(\d+\.\d+ to \d+\.\d+\)\*", text)
    assert "heads before 1 % worse" in text
    before = walks["ae"][0][0].quality["perplexity"]
    assert f" {before:.2f} " in text, "no share, so not in per cent"
    assert f"{100 * before:.2f}" not in text


@pytest.mark.parametrize(
    ("model", "on_hub", "source", "title"),
    [
        ("/data/models/my-bert", False, "/data/reviews.jsonl.gz", "my-bert on reviews"),
        ("models/tiny/", False, "data/", "tiny on data"),
        ("runs/first/model", False, "data.csv", "first on data"),
        ("org/name", True, "hub:glue:sst2:train", "org/name on glue"),
    ],
)
def test_the_title_is_the_short_names_of_model_and_data(model, on_hub, source, title, tmp_path):
    journal = walk(tmp_path / "run", header(model=model, on_hub=on_hub, source=source), steps=2)
    text = gg.write_report([journal.folder]).read_text("utf-8")
    assert f"<h1>{title}</h1>" in text
    assert f"<title>{title} · greedy-gnorm</title>" in text


@pytest.mark.parametrize(("dtype", "named"), [("float32", "float32"), ("float16", "float16"), (None, "float32")])
def test_sizes_are_those_on_disk_and_named(dtype, named, tmp_path):
    journal = walk(tmp_path / "run", header(dtype=dtype))
    chosen = journal.steps[journal.header["result"]["solution"]]
    text = words(gg.write_report([journal.folder]))
    assert f"Size ({named}) {chosen.bytes / 2**20:.2f} MB" in text
    assert f"MB ({named})" in text
    assert content(journal.folder / "report.html")["walks"][0]["precision"] == named


def test_the_top_says_it_in_sentences_and_figures(tmp_path):
    journal = walk(tmp_path / "run", header(), latency=True)
    chosen = journal.steps[journal.header["result"]["solution"]]
    text = words(gg.write_report([journal.folder]))
    before, after = journal.steps[0].quality["accuracy"], chosen.quality["accuracy"]
    assert f"{chosen.step} of 12 attention heads were removed by greedy-gnorm. On 50 rows," in text
    assert f"accuracy went from {before:.4f} to {after:.4f}" in text
    assert "The model is 0.6% smaller and 1.25 times as fast (measured)." in text
    assert f"{chosen.bytes / 2**20:.2f} MB" in text
    assert "1.25 times 200.0 to 160.0 ms (torch, batch 8, 128 tokens, 2 threads)" in text
    assert "torch, batch 8, 128 tokens, 2 threads 200.00 160.00 1.25" in text, "the table"


@pytest.mark.parametrize(
    ("change", "verdict", "is_loss"),
    [
        ([-0.0106, 0.0035], "no measurable loss", False),
        ([-0.0106, -0.0035], "a measurable loss", True),
        ([0.0035, 0.0106], "a measurable gain", False),
        ([-0.0035, 0.0106], "no measurable change", False),
    ],
)
def test_the_verdict_says_whether_a_loss_can_be_measured(change, verdict, is_loss, tmp_path):
    journal = walk(tmp_path / "run", header(), complete=True)
    after = 0.8037 + sum(change) / 2
    intervals = {"accuracy": {"before": [0.78, 0.82], "after": [after - 0.02, after + 0.02], "change": change}}
    test = {"rows": 1421, "quality": {"accuracy": [0.8037, after]}, "intervals": intervals}
    journal.finish({**journal.header["result"], "test": test})
    path = gg.write_report([journal.folder])
    assert f"(95 % interval {change[0]:+.4f} to {change[1]:+.4f} ), {verdict} ." in words(path).replace(
        verdict + ".", verdict + " ."
    )
    assert ('<b class="loss">a measurable loss</b>' in path.read_text("utf-8")) == is_loss
    assert (f'<dd class="loss">{after:.4f}</dd>' in path.read_text("utf-8")) == is_loss
    assert "times as fast (estimated)" in words(path)


def test_the_choices_are_a_table_with_commands(tmp_path):
    journal = walk(tmp_path / "my run", header(), complete=True)
    path = gg.write_report([journal.folder])
    choices = journal.header["result"]["choices"]
    assert {choice["name"] for choice in choices} & {"free", "knee"}
    text = words(path)
    for choice in choices:
        low, high = choice["interval"]
        size = f"{choice['removed']} {choice['parameters']:,} {choice['bytes'] / 2**20:.2f}"
        assert f"{size} {choice['promised']:.2f} estimated {choice['quality']:.4f} ({low:.4f} to {high:.4f})" in text
    commands = [html.unescape(each) for each in re.findall(r'data-command="(.*?)"', path.read_text("utf-8"))]
    assert all(shlex.split(each)[:4] == ["gnorm", "prune", "--from-run", str(journal.folder)] for each in commands)
    assert [shlex.split(each)[4] for each in commands] == ["--at"] * len(choices)
    assert text.index("Choices") < text.index("Step by step") < text.index("On test rows") < text.index("Record")


def test_a_solution_that_is_no_choice_has_a_row_too(tmp_path):
    journal = walk(tmp_path / "run", header(), complete=True)
    steps = {choice["step"] for choice in journal.header["result"]["choices"]}
    other = next(place for place in range(1, 12) if place not in steps)
    journal.finish({**journal.header["result"], "solution": other})
    text = gg.write_report([journal.folder]).read_text("utf-8")
    assert f'<tr data-step="{other}" class="solution"><th scope="row"><button' in text
    assert ">solution</button> ★</th>" in text
    assert f"--at-step {other} --out" in text


def test_classes_and_changed_predictions_are_shown_and_escaped(tmp_path):
    journal = walk(tmp_path / "run", header(), complete=True)
    example = {**PREDICTIONS["changed"][0], "text": EVIL, "text_pair": "long " * 500}
    predictions = {**PREDICTIONS, "changed": [example, *PREDICTIONS["changed"][1:]]}
    (journal.folder / "predictions.json").write_text(json.dumps(predictions))
    path = gg.write_report([journal.folder])
    text = words(path)
    assert "neg 400 0.800 +0.000 0.650 -0.050 0.750 +0.000" in text
    assert "another class for 71 of 1,421 test rows (5.0%). 48 of them:" in text
    assert text.count("the film number") == 47
    assert "True: pos . Before: pos (61%) . After: neg (55%) ." in text
    assert html.escape(EVIL) in path.read_text("utf-8").replace("&#34;", "&quot;")
    assert "long " * 130 not in text, "shortened"


def test_examples_that_were_not_stored_are_called_so(tmp_path):
    journal = walk(tmp_path / "run", header(), complete=True)
    (journal.folder / "predictions.json").write_text(json.dumps({**PREDICTIONS, "changed": []}))
    assert "The run stored no examples of them (--no-examples)." in words(gg.write_report([journal.folder]))


@pytest.mark.parametrize(
    "change",
    [
        {"classes": ["a"]},
        {"changed": [{"text": 3}]},
        {"confusion": {"before": [[1]], "after": [[1]]}},
        {"agreement": 2},
        {"per_class": {}},
    ],
)
def test_damaged_predictions_are_refused(change, tmp_path):
    journal = walk(tmp_path / "run", header(), complete=True)
    (journal.folder / "predictions.json").write_text(json.dumps({**PREDICTIONS, **change}))
    with pytest.raises(gg.RunFolderError, match=r"predictions.json is damaged"):
        gg.write_report([journal.folder])


def test_a_choice_of_a_step_that_does_not_exist_is_refused(tmp_path):
    journal = walk(tmp_path / "run", header(), complete=True)
    (first, *_) = journal.header["result"]["choices"]
    journal.finish({**journal.header["result"], "choices": [{**first, "step": 99}]})
    with pytest.raises(gg.RunFolderError, match="is step 99, which does not exist"):
        gg.write_report([journal.folder])


def test_speed_that_was_not_measured_is_called_so(made):
    assert "Speed not measured" in words(made[1])
    assert "Measured speed" not in words(made[1])


def test_the_details_are_given(made):
    text = words(made[1])
    for part in ("fedcba9876543210", "0123456789abcdef", "100 in 7 batches", "50 in 7 batches", "greedy-gnorm 0.1.0"):
        assert part in text
    assert "gnorm prune my-model --data reviews.csv --stop all --objective logit-norm --out AGAIN" in text


def test_the_command_that_repeats_a_run_makes_the_same_run(tmp_path, model_folder, data_file, monkeypatch, capsys):
    options = [
        "--samples",
        "0",
        "--seed",
        "3",
        "--stop",
        "heads=4",
        "--stop",
        "drop=0.9",
        "--protect",
        "0.1",
        "--min-heads",
        "1",
        "--no-examples",
    ]
    command = ["prune", str(model_folder), "--data", str(data_file), "--out", str(tmp_path / "run"), *options]
    assert main([*command, "--no-latency", "--quiet"]) == 0
    text = (tmp_path / "run" / "report.html").read_text("utf-8")
    again = html.unescape(re.search(r'<code id="again".*?>(gnorm prune .*? --out AGAIN)</code>', text)[1])
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(again)[1:], "--no-latency", "--quiet"]) == 0
    first, second = (Journal.read(folder) for folder in (tmp_path / "run", tmp_path / "AGAIN"))
    assert first.header["config"] == second.header["config"]
    assert [step.removed for step in first.steps] == [step.removed for step in second.steps]
    capsys.readouterr()


def test_a_run_on_objects_in_memory_names_no_command(tmp_path):
    model = tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES)
    gg.prune(
        model, tiny_rows(), tokenizer=tiny_tokenizer(), samples=9, stop="heads=2", latency=False, out=tmp_path / "run"
    )
    assert "This command repeats the run" not in words(tmp_path / "run" / "report.html")
    with pytest.raises(gg.GnormError, match="given in Python"):
        gg.take_step(tmp_path / "run", 1, out=tmp_path / "one")
    tiny_tokenizer().save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "saved")
    taken = gg.take_step(tmp_path / "run", 1, out=tmp_path / "one", model=tmp_path / "saved", latency=False)
    assert len(taken.removed) == 1


def test_mark_up_in_the_data_is_text(tmp_path):
    journal = walk(tmp_path / "run", header(model=EVIL, source=EVIL, method=EVIL))
    text = gg.write_report([journal.folder]).read_text("utf-8")
    assert "<img" not in text.replace("<image", "").split("<script>")[0]
    assert text.count("</script>") == 3
    assert html.escape(EVIL) in text.replace("&#34;", "&quot;")


def test_data_for_the_script_cannot_leave_its_element():
    text = str(report.embedded({"a": EVIL, "b": "<!--"}))
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": EVIL, "b": "<!--"}


def test_nothing_is_loaded_from_elsewhere(made):
    text = made[1].read_text("utf-8")
    outside = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert not re.findall(r'(?:src|href)="(?!data:|#)', outside)
    assert "default-src 'none'" in outside
    assert 'http-equiv="refresh"' not in outside


def test_static_scores_are_stored_once(tmp_path):
    once = walk(tmp_path / "once", header(method="ae"), rescored=False)
    run = content(gg.write_report([once.folder]))["walks"][0]
    assert len(scores_of(run)) == 1
    assert set(run["scores"]["places"]) == {0}
    again = walk(tmp_path / "again", header())
    run = content(gg.write_report([again.folder]))["walks"][0]
    assert len(scores_of(run)) == 12
    assert run["scores"]["places"] == [0, *range(12)]


def test_a_score_of_zero_has_its_place(tmp_path):
    journal = walk(tmp_path / "run", header(), steps=1)
    lines = journal.folder / "journal.jsonl"
    first, second = map(json.loads, lines.read_text().splitlines())
    second["log_scores"][2][3] = "-inf"
    del second["seal"]
    lines.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    page = content(gg.write_report([journal.folder]))["walks"][0]
    assert scores_of(page)[0, 11] == -np.inf
    assert np.isfinite(page["scores"]["range"]).all()


def test_a_run_of_the_size_of_roberta_large_stays_under_8_mb(tmp_path):
    journal = walk(tmp_path / "run", header(24, 16))
    assert len(journal.steps) == 385
    path = gg.write_report([journal.folder])
    assert path.stat().st_size < 8_000_000
    assert len(scores_of(content(path)["walks"][0])) == 384


def test_a_large_comparison_leaves_out_scores_rather_than_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "SCORE_BYTES", 900)
    folder = comparison(tmp_path / "c", {"greedy-gnorm": 2, "inverse-gnorm": 1, "ae": 1})
    runs = {run["label"]: run["scores"] is not None for run in content(gg.write_report([folder]))["walks"]}
    assert runs == {"greedy-gnorm, run 1": True, "greedy-gnorm, run 2": False, "inverse-gnorm": False, "ae": True}


def test_an_unfinished_run_is_called_so(tmp_path):
    journal = walk(tmp_path / "run", header(), steps=5)
    path = gg.write_report([journal.folder])
    assert "So far greedy-gnorm has removed 5 of 12 attention heads" in words(path)
    assert "not finished" in words(path)
    assert content(path)["walks"][0]["solution"] is None
    live = gg.write_report([journal.folder], live=True).read_text("utf-8")
    assert '<meta http-equiv="refresh" content="5">' in live


def test_a_run_with_nothing_but_its_start_has_a_page(tmp_path):
    journal = walk(tmp_path / "run", header(), steps=0)
    assert content(gg.write_report([journal.folder]))["walks"][0]["scored"] is False


def test_a_comparison_has_its_lines_boxes_and_tables(tmp_path):
    folder = comparison(tmp_path / "c", {"greedy-gnorm": 2, "ae": 2, "random": 6})
    path = gg.write_report([folder])
    assert path == folder / "report.html"
    page, text = content(path), words(path)
    kinds = {(trace.get("meta"), trace["type"]) for trace in page["charts"]["comparison"]["data"]}
    assert kinds == {("greedy-gnorm", "scatter"), ("ae", "scatter"), ("random", "box"), (None, "scatter")}
    lines = {
        trace["meta"]: trace
        for trace in page["charts"]["comparison"]["data"]
        if trace.get("line") and trace.get("meta")
    }
    walks = [Journal.read(folder / "parts" / f"ae-{run}").steps for run in range(2)]
    mean = np.mean([[step.quality["accuracy"] for step in walk] for walk in walks], axis=0)
    assert lines["ae"]["y"] == pytest.approx(mean.tolist(), abs=1e-6)
    assert {trace["meta"] for trace in page["charts"]["drift"]["data"]} == {"greedy-gnorm", "random"}
    assert "At the knee of the curve" in text
    assert "parameters before" in text
    assert (
        "gnorm compare my-model --data reviews.csv --methods greedy-gnorm,ae,random --runs 2 --trajectories 6" in text
    )
    assert page["walks"][page["first"]]["label"] == "greedy-gnorm, run 1"
    assert page["walks"][0]["folder"] == str(folder / "parts" / "greedy-gnorm-0")


def test_parts_that_are_not_finished_are_left_out(tmp_path):
    folder = comparison(tmp_path / "c", {"greedy-gnorm": 1})
    walk(folder / "parts" / "ae-0", header(method="ae"), steps=3)
    assert [run["label"] for run in content(gg.write_report([folder]))["walks"]] == ["greedy-gnorm"]


def test_several_runs_make_one_page(tmp_path):
    folders = [
        walk(tmp_path / "a", header()).folder,
        walk(tmp_path / "b", header(seed=2), steps=4).folder,
        walk(tmp_path / "d", header(2, 2, method="ae")).folder,
    ]
    path = gg.write_report(folders)
    assert path == tmp_path / "report.html"
    labels = [run["label"] for run in content(path)["walks"]]
    assert labels == [f"greedy-gnorm ({folders[0]})", f"greedy-gnorm ({folders[1]})", f"ae ({folders[2]})"]
    assert "unfinished" in words(path)
    assert "3 runs side by side" in words(path)
    assert gg.write_report(folders[1:], tmp_path / "other.html") == tmp_path / "other.html"
    assert [run["label"] for run in content(tmp_path / "other.html")["walks"]] == ["greedy-gnorm", "ae"]


def test_what_cannot_be_shown_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "holds no run and no comparison" in capsys.readouterr().err
    journal = Journal.begin(tmp_path / "begun", header())
    assert main(["report", str(journal.folder)]) == 2
    assert "has no step yet" in capsys.readouterr().err
    run, compared = walk(tmp_path / "run", header()).folder, comparison(tmp_path / "c", {"ae": 1})
    assert main(["report", str(run), str(compared)]) == 2
    assert "give only this folder" in capsys.readouterr().err
    other = header()
    other["quality"] = "macro_f1"
    assert main(["report", str(run), str(walk(tmp_path / "other", other).folder)]) == 2
    assert "some measure accuracy, others macro_f1" in capsys.readouterr().err
    assert main(["report", str(run), "--out", str(tmp_path / "no" / "such" / "file.html")]) == 2
    assert "Can't write to" in capsys.readouterr().err
    (compared / "experiment.json").write_text("{")
    assert main(["report", str(compared)]) == 2
    assert "holds no readable run: experiment.json" in capsys.readouterr().err


def test_the_command_opens_the_page(made, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    journal, path = made
    path.unlink()
    assert main(["report", str(journal.folder), "--open"]) == 0
    assert str(path) in capsys.readouterr().out
    assert path.exists()
    assert opened == [path.as_uri()]
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    assert main(["report", str(journal.folder), "--open"]) == 2
    assert "No browser could be started" in capsys.readouterr().err


@pytest.fixture
def pruned(model_folder, data_file, tmp_path, capsys):
    """A small finished run."""
    command = ["prune", str(model_folder), "--data", str(data_file), "--out", str(tmp_path / "run"), "--samples", "12"]
    assert main([*command, "--stop", "all", "--quiet", "--no-latency"]) == 0
    capsys.readouterr()
    return tmp_path / "run"


def test_prune_and_compare_end_in_a_page(pruned, model_folder, data_file, tmp_path, capsys):
    assert len(content(pruned / "report.html")["walks"][0]["parameters"]) == 9
    command = ["compare", str(model_folder), "--data", str(data_file), "--out", str(tmp_path / "c"), "--samples", "9"]
    assert main([*command, "--methods", "greedy-gnorm,random", "--runs", "1", "--trajectories", "2"]) == 0
    assert len(content(tmp_path / "c" / "report.html")["walks"]) == 3
    out = capsys.readouterr().out
    assert "greedy-gnorm at its knee:" in out
    assert "report.html" in out


def test_any_point_becomes_a_model_without_scoring_again(pruned, tmp_path, model_folder, monkeypatch, capsys):
    monkeypatch.setattr("greedy_gnorm.pruning.loop._scored", lambda *_: pytest.fail("scored again"))
    page = content(pruned / "report.html")["walks"][0]
    line = f"gnorm prune --from-run {page['folder']} --at-step 3 --out {page['out']}3"
    assert main([*shlex.split(line)[1:], "--no-latency"]) == 0
    assert "Removed 3 of 8 heads" in capsys.readouterr().out
    taken = tmp_path / "run-step-3"
    heads = removed_by(Journal.read(pruned).steps[:4])
    by_hand = gg.load(model_folder)
    gg.remove_heads(
        by_hand, {site: [head.index for head in heads if head.site == site] for site in {head.site for head in heads}}
    )
    batch = {name: value for name, value in tiny_batch().items() if name != "labels"}
    with torch.no_grad():
        assert torch.equal(gg.load(taken / "model")(**batch).logits, by_hand(**batch).logits)
    card = (taken / "model" / "README.md").read_text("utf-8")
    assert re.search(r"\| solution \| 3 \| [\d,]+ \|", card), "the card opens with the row that it is"
    assert "the result was tested" not in card, "the model of this step was not"
    assert (taken / "model" / "tokenizer.json").exists()
    assert Journal.read(taken).steps[-1].quality == Journal.read(pruned).steps[3].quality
    assert main(["report", str(taken)]) == 0
    assert "3 of 8 attention heads were removed" in words(taken / "report.html")
    assert (
        main(["prune", "--from-run", str(pruned), "--at-step", "0", "--out", str(tmp_path / "zero"), "--no-latency"])
        == 0
    )
    assert "keeping every head" in capsys.readouterr().out


def test_taking_a_point_refuses_what_does_not_fit(pruned, tmp_path, model_folder, capsys):
    base = ["prune", "--out", str(tmp_path / "x")]
    for more, message in (
        (["--from-run", str(pruned), "--at-step", "9"], "There is no step 9"),
        (["--from-run", str(pruned), "--at-step", "-1"], "the run has steps 0 to 8"),
        (["--from-run", str(pruned)], "Use --from-run together with one of --at and --at-step"),
        (["--at-step", "1"], "Use --from-run together with one of --at and --at-step"),
        (
            ["--from-run", str(pruned), "--at-step", "1", "--method", "ae"],
            "settings of that run: remove --method",
        ),
        (["--from-run", str(pruned), "--at-step", "1", "--live"], "settings of that run: remove --live"),
        (["--from-run", str(tmp_path), "--at-step", "1"], "holds no readable run"),
        ([], "Give a model and data"),
        ([str(model_folder)], "Give a model and data"),
    ):
        assert main([*base, *more]) == 2, more
        assert message in capsys.readouterr().err.replace("\n", " "), more
    tiny_model("bert", seed=5, num_hidden_layers=2, **LABEL_NAMES).save_pretrained(model_folder)
    assert main([*base, "--from-run", str(pruned), "--at-step", "1"]) == 2
    assert "is not the model of the run" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    with pytest.raises(gg.GnormError, match="Unknown format 'x'"):
        gg.take_step(pruned, 1, out=tmp_path / "x", format="x")


def test_a_live_page_follows_the_run_and_is_not_written_too_often(tmp_path, monkeypatch):
    journal = walk(tmp_path / "run", header(), steps=3)
    clock = [100.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: clock[0])
    path = journal.folder / "report.html"
    with pytest.raises(KeyboardInterrupt), report.LiveReport(journal.folder) as live:  # noqa: PT012
        live()
        assert "This page reloads every five seconds" in words(path)
        path.unlink()
        clock[0] += 1.9
        live()
        assert not path.exists()
        clock[0] += 0.2
        live()
        assert "This page reloads every five seconds" in words(path)
        raise KeyboardInterrupt
    assert "This page reloads" not in words(path)
    assert "not finished" in words(path)


def test_prune_live(model_folder, data_file, tmp_path, monkeypatch, capsys):
    seen = []
    write = report.write_report
    monkeypatch.setattr(
        report, "write_report", lambda *given, **options: seen.append(options) or write(*given, **options)
    )
    command = [
        "prune",
        str(model_folder),
        "--data",
        str(data_file),
        "--samples",
        "9",
        "--stop",
        "heads=2",
        "--no-latency",
    ]
    assert main([*command, "--out", str(tmp_path / "run"), "--live"]) == 0
    assert seen[0] == {"live": True}
    assert "This page reloads" not in words(tmp_path / "run" / "report.html")
    seen.clear()
    assert main([*command, "--out", str(tmp_path / "plain")]) == 0
    assert seen == []
    capsys.readouterr()


def test_the_terminal_shows_a_mask_and_a_curve(pruned, tmp_path, capsys, monkeypatch):
    command = ["prune", "--from-run", str(pruned), "--at-step", "5", "--no-latency"]
    assert main([*command, "--out", str(tmp_path / "a")]) == 0
    text = capsys.readouterr().out
    rows = re.findall(r"^ +\d  ((?:[■·] ?)+)$", text, re.M)
    assert [len(row.split()) for row in rows] == [4, 4]
    assert "".join(rows).count("·") == 5
    assert "█" in text
    assert main([*command, "--out", str(tmp_path / "b"), "--quiet"]) == 0
    assert "■" not in capsys.readouterr().out
    assert main([*command, "--out", str(tmp_path / "c"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["heads"]["removed"] == 5
    monkeypatch.setattr(console, "_is_plain", lambda: True)
    assert main([*command, "--out", str(tmp_path / "d")]) == 0
    plain = capsys.readouterr().out
    assert not set("■·█▁^") & set(plain.replace("^ solution", ""))
    assert "# kept, . removed" in plain


def test_the_sketch_of_a_mask():
    model = header(layout=[(3,), (3,)], layers=1, removed=(Unit(0, 0),))["model"]
    model["sites"][1]["applications"] = 4
    assert sketch.mask(model, [Unit(1, 2)]) == ["  0  · ■ ■", "  1  ■ ■ ·  in 4 layers"]
    assert sketch.mask(model, [Unit(1, 2)], plain=True) == ["  0  . # #", "  1  # # .  in 4 layers"]
    model = header(layout=[(2,), (2, 3)])["model"]
    assert sketch.mask(model, [Unit(2, 2)]) == ["  0  ■ ■", " 1a  ■ ■", " 1b  ■ ■ ·"]


FALLING = [(0, 1.0), (1, 0.5), (2, 0.0)]


def test_the_sketch_of_a_curve():
    assert sketch.curve(FALLING, height=2, width=3) == ["█  ", "██ "]
    assert sketch.curve([(0, 1.0), (1, 0.25), (2, 0.0)], height=1, width=3) == ["█▂ "]
    assert sketch.curve(FALLING, height=1, width=3, plain=True) == ["#: "]
    assert [sketch.place(FALLING, point, width=5) for point in range(3)] == [0, 2, 4]


def test_the_sketch_of_a_curve_of_any_values():
    assert sketch.curve([(0, 100.0), (1, 200.0), (2, 400.0)], height=1, width=3) == ["▂▄█"], "perplexity"
    assert sketch.curve([(0, 0.5), (1, 0.0), (2, -0.5)], height=1, width=3) == ["█▄ "], "r2 may fall below zero"
    assert sketch.curve([(0, -1.0), (1, -2.0), (2, -4.0)], height=1, width=3) == ["▆▄ "], "zero is the top"
    assert sketch.curve([(0, 0.0), (1, 0.0)], height=1, width=2) == ["  "]
    between = sketch.axis(FALLING, [(0, 2.0), (1, 1.0)])
    assert between == (0.0, 2.0)
    assert sketch.curve(FALLING, between, height=1, width=3) == ["▄▂ "], "one axis for all curves of a comparison"


def test_the_terminal_draws_layers_and_measures_of_any_kind(tmp_path, capsys):
    journal = walk(tmp_path / "run", header(layout=RAGGED, dtype="bfloat16", **PERPLEXITY))
    solution = journal.steps[journal.header["result"]["solution"]]
    run = Run(journal.steps, solution, None, None, journal.header, None)
    console.show_run(run, journal.folder)
    text = capsys.readouterr().out
    rows = re.findall(r"^ +(\d[ab]?)  ((?:[■·] ?)+)$", text, re.M)
    assert [(name, len(cells.split())) for name, cells in rows] == [("0", 4), ("1a", 4), ("1b", 6), ("2", 6)]
    assert "".join(cells for _, cells in rows).count("·") == len(run.removed)
    highest = max(step.quality["perplexity"] for step in journal.steps)
    assert f"perplexity (0 to {highest:.4g}, lower is better), after 0 to 20 heads removed" in text
    assert re.search(rf"MB \(bfloat16\) +{journal.steps[0].bytes / 2**20:.2f} +{solution.bytes / 2**20:.2f}", text)


def test_progress_lines_name_heads_as_the_page_does(tmp_path, capsys):
    journal = walk(tmp_path / "run", header(layout=RAGGED))
    display = StepDisplay(journal.folder, Progress())
    for gone, step in enumerate(journal.steps):
        display(step, gone, 20)
    lines = capsys.readouterr().err.splitlines()
    assert "removed none" in lines[0]
    names = [re.search(r"removed (\S+)", line)[1] for line in lines[1:]]
    assert names == [unit_name(sites_of(journal.header), unit) for unit in removed_by(journal.steps)]


def test_progress_of_a_run_that_goes_on_is_against_the_unpruned_model(tmp_path, capsys):
    journal = joint_walk(tmp_path / "run", joint_header())
    display = StepDisplay(journal.folder, Progress())
    first, *_, last = journal.steps
    display(last, len(journal.steps) - 1, len(journal.steps) - 1)
    share = last.cost.multiplications / first.cost.multiplications
    assert share < 0.9
    assert f"{share:.1%} of the multiplications" in capsys.readouterr().err


def test_the_table_of_the_curve_names_heads(tmp_path):
    journal = walk(tmp_path / "run", header(layout=RAGGED))
    rows = list(csv.DictReader(curve_csv(journal.steps, sites_of(journal.header)).splitlines()))
    names = [unit_name(sites_of(journal.header), unit) for unit in removed_by(journal.steps)]
    assert [row["removed"] for row in rows] == ["", *names]
    assert {name[:3] for name in names} == {"L0·", "L1a", "L1b", "L2·"}


def test_names_of_layers_and_units():
    kinds = [("attention", 0, 2), ("ffn", 0, 3), ("attention", 1, 1), ("attention", 1, 1), ("ffn", 1, 1)]
    sites = [SiteInfo(f"module {place}", *kind) for place, kind in enumerate(kinds)]
    assert layer_names(sites) == ["0·H", "0·N", "1a·H", "1b·H", "1·N"]
    names = ["L0·H0", "L0·H1", "L0·N0", "L0·N1", "L0·N2", "L1a·H0", "L1b·H0", "L1·N0"]
    assert unit_names(sites) == names
    units = [Unit(place, index) for place, site in enumerate(sites) for index in range(site.units)]
    assert [unit_name(sites, unit) for unit in units] == names
    many = [SiteInfo("x", "attention", 0, 1)] * 100_000
    assert len(set(unit_names(many[:60]))) == 60
    assert len(unit_names(many)) == 100_000
