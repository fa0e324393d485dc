"""What people look at after a compression: the page, figures, tables, the model card and the terminal."""

from __future__ import annotations

import csv
import html
import json
import re
import shlex

import numpy as np
import pytest
from conftest import LABEL_NAMES, tiny_model, tiny_rows, tiny_tokenizer
from journals import header, joint_comparison, joint_header, joint_walk, walk

import greedy_gnorm as gg
from greedy_gnorm.cli import console, sketch
from greedy_gnorm.cli.app import main
from greedy_gnorm.comparison.analysis import read_comparison
from greedy_gnorm.pruning.choices import Choice
from greedy_gnorm.pruning.run import Run, sites_of, unit_counts
from greedy_gnorm.records.journal import Journal
from greedy_gnorm.report import comparison_figures, figures, outcome
from greedy_gnorm.report.card import model_card
from greedy_gnorm.report.compression import aligned, kept_units, scores_of_heads
from greedy_gnorm.tasks.task import measure_of
from greedy_gnorm.units import removed_by

NEURON = re.compile(r"L\d+·N\d+")


def content(path):
    """The data that the page's script reads."""
    (text,) = re.findall(r'<script type="application/json" id="content">(.*?)</script>', path.read_text("utf-8"), re.S)
    return json.loads(text)


def words(path):
    """What a reader sees, without scripts and style."""
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", path.read_text("utf-8"), flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def run_of(journal, model=None):
    """The journal's run as a Python object."""
    result = journal.header["result"]
    return Run(
        journal.steps, journal.steps[result["solution"]], model or tiny_model("bert"), None, journal.header, None,
        test=result["test"], offered=[Choice.from_json(choice) for choice in result["choices"]],
    )  # fmt: skip


@pytest.fixture
def journal(tmp_path):
    return joint_walk(tmp_path / "run", joint_header())


def left_by_layer(journal, kind, step):
    gone = [unit.site for unit in removed_by(journal.steps[: step + 1])]
    sites = journal.header["model"]["sites"]
    return [site["units"] - gone.count(place) for place, site in enumerate(sites) if site["kind"] == kind]


def test_units_are_counted_by_kind_layer_and_step(journal):
    kinds = kept_units(journal.header, journal.steps)
    assert [(kept.words, kept.layers, kept.totals) for kept in kinds] == [
        ("heads", ["0", "1", "2"], [4] * 3),
        ("neurons", ["0", "1", "2"], [20] * 3),
    ]
    for kept, kind in zip(kinds, ("attention", "ffn"), strict=True):
        assert kept.left == [left_by_layer(journal, kind, step.step) for step in journal.steps]
    last = unit_counts(journal.header, removed_by(journal.steps))
    assert {kept.words: kept.left[-1] for kept in kinds} == {word: each["left"] for word, each in last.items()}


def test_units_that_were_gone_before_do_not_count(tmp_path):
    head = joint_header(units="ffn")
    head["model"]["removed"] = [[0, 0], [0, 1], [2, 5]]
    (kept,) = kept_units(head, [])
    assert (kept.totals, kept.total) == ([18, 20, 19], 57)


def test_curves_are_aligned_by_the_cost_of_the_first():
    across, values = aligned([[(100, 0.8), (60, 0.6)], [(100, 0.8), (50, 0.3)]])
    assert across == [100, 60]
    assert np.allclose(values, [[0.8, 0.6], [0.8, 0.4]])


def test_the_page_counts_neurons_and_names_none(journal):
    path = gg.write_report([journal.folder])
    (run,) = content(path)["walks"]
    heads, neurons = run["kept"]["kinds"]
    assert heads["left"] == [left_by_layer(journal, "attention", step.step) for step in journal.steps]
    assert neurons["left"] == [left_by_layer(journal, "ffn", step.step) for step in journal.steps]
    first = journal.steps[0].cost.multiplications
    assert run["kept"]["work"] == [round(100 * step.cost.multiplications / first, 3) for step in journal.steps]
    assert [row["name"] for row in run["rows"]] == ["0", "1", "2"], "the layers of heads"
    assert len(run["names"]) == 12
    assert run["knee"] is None
    sites = journal.header["model"]["sites"]
    for step, removed in zip(journal.steps, run["removed"], strict=True):
        of_heads = [unit for unit in step.removed if sites[unit.site]["kind"] == "attention"]
        assert removed == [unit.site // 2 * 4 + unit.index for unit in of_heads]
    assert not NEURON.search(path.read_text("utf-8"))


def test_the_page_of_a_compression_says_what_it_did(journal):
    text = words(gg.write_report([journal.folder]))
    heads, neurons = kept_units(journal.header, journal.steps)
    assert (
        f"{heads.gone(4)} of 12 attention heads and {neurons.gone(4)} of 60 feed-forward neurons were removed by "
        "joint-refit. On 1,421 test rows, accuracy went from 0.8037 to 0.8001 : a change of -0.0036 "
        "(95 % interval -0.0106 to +0.0035 ), no measurable loss."
    ) in text
    assert re.search(r"The model is \d+\.\d% smaller and 1.25 times as fast \(measured\)", text)
    assert "Multiplications left 50%" in text
    assert "accuracy 0.8037 (0.7822 to 0.8235) 0.8001 (0.7784 to 0.8200) -0.0036 (-0.0106 to +0.0035)" in text
    assert "Rows for calibration source reviews.csv rows 400" in text
    assert "Rows for test source reviews.csv rows 1,421" in text
    assert "attention 3 layers of 4 heads feed-forward 3 layers of 20 neurons" in text
    assert "Knee" in text, "the button, which the script hides"
    assert "heads removed" not in text.lower().replace("heads removed " + str(heads.gone(4)), "")
    assert "went from 0.8000" not in text, "the quality on the rows that a step is chosen on"


def test_every_choice_has_its_command_and_its_place_in_the_chart(journal):
    path = gg.write_report([journal.folder])
    chart = content(path)["charts"]["speed"]["data"][0]
    choices = journal.header["result"]["choices"]
    commands = re.findall(r'data-command="(.*?)"', path.read_text("utf-8"))
    options = {"free": "--at free", "-0.5 points": "--at drop=0.005", "-1 point": "--at drop=0.01"}
    options |= {"-2 points": "--at drop=0.02", "-5 points": "--at drop=0.05", "fastest": "--at fastest"}
    assert commands == [
        f"gnorm prune --from-run {journal.folder} {options[choice['name'].split(', ')[0]]} "
        f"--out {journal.folder}-step-{choice['step']}"
        for choice in choices
    ]
    assert len(options) > len(commands) > 2
    assert chart["text"] == ["unpruned", *(choice["name"] for choice in choices)]
    assert chart["x"] == [1, *(choice["measured"] for choice in choices)]
    assert chart["y"] == [0.8, *(choice["quality"] for choice in choices)]


def test_the_curve_of_the_page_goes_from_all_multiplications_to_few(journal):
    layout = content(gg.write_report([journal.folder]))["charts"]["curve"]["layout"]
    assert layout["xaxis"] == {"title": {"text": "Multiplications left (%)"}, "autorange": "reversed"}


def test_time_spent_on_fitting_is_shown(journal, tmp_path):
    names = [trace["name"] for trace in content(gg.write_report([journal.folder]))["charts"]["time"]["data"]]
    assert names == ["Scoring", "Evaluating", "Removing", "Fitting"]
    plain = walk(tmp_path / "plain", header())
    assert len(content(gg.write_report([plain.folder]))["charts"]["time"]["data"]) == 3


@pytest.mark.parametrize(("units", "kinds"), [("ffn", ["neurons"]), ("heads", ["heads"])])
def test_a_compression_of_one_kind_has_a_page(units, kinds, tmp_path):
    path = gg.write_report([joint_walk(tmp_path / "run", joint_header(units=units)).folder])
    page, text = content(path), words(path)
    assert [kept["words"] for kept in page["walks"][0]["kept"]["kinds"]] == kinds
    assert [name for name in page["charts"] if name.startswith("kept-")] == [f"kept-{words}" for words in kinds]
    assert bool(page["walks"][0]["rows"]) == (units == "heads")
    assert f"{kinds[0].capitalize()} removed" in text


def test_an_unfinished_compression_has_a_page(tmp_path):
    journal = joint_walk(tmp_path / "run", joint_header(), rounds=2, finished=False)
    text = words(gg.write_report([journal.folder]))
    assert "So far joint-refit has removed" in text
    assert "not finished" in text
    assert "On test rows" not in text


def test_compressions_and_prunings_share_a_page(tmp_path):
    journals = [
        joint_walk(tmp_path / "both", joint_header()),
        joint_walk(tmp_path / "ffn", joint_header(units="ffn", method="joint-rounds")),
        walk(tmp_path / "heads", header()),
    ]
    path = gg.write_report([journal.folder for journal in journals])
    page, text = content(path), words(path)
    assert page["charts"]["comparison"]["layout"]["xaxis"]["title"]["text"] == "Parameters left (%)", (
        "the run that only removes heads has no multiplications"
    )
    assert [len(run["kept"]["kinds"]) for run in page["walks"]] == [2, 1, 1]
    assert [run["knee"] is None for run in page["walks"]] == [True, True, False]
    assert "neurons removed" in text


def test_the_page_of_a_model_of_the_size_of_bert_is_small(tmp_path):
    journal = joint_walk(tmp_path / "run", joint_header(layers=12, heads=12, neurons=3072), rounds=20)
    path = gg.write_report([journal.folder])
    assert path.stat().st_size < 6_000_000
    assert len(json.dumps(content(path)["walks"])) < 100_000


def test_the_command_repeats_the_compression(tmp_path, model_folder, write_rows, monkeypatch, capsys):
    data = write_rows(tiny_rows(240))
    options = ["--macs", "0.8", "--rounds", "2", "--units", "ffn", "--multiple-of", "2", "--method", "joint-rounds"]
    command = ["compress", str(model_folder), "--data", str(data), "--out", str(tmp_path / "run"), *options]
    assert main([*command, "--quiet"]) == 0
    (again,) = re.findall(r"(gnorm compress .*? --out AGAIN)", words(tmp_path / "run" / "report.html"))
    assert "--objective" not in again
    assert "--stop" not in again
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(again)[1:], "--quiet"]) == 0
    first, second = (Journal.read(folder) for folder in (tmp_path / "run", tmp_path / "AGAIN"))
    assert first.header["config"] == second.header["config"]
    assert [step.removed for step in first.steps] == [step.removed for step in second.steps]
    capsys.readouterr()


def test_the_default_method_of_compress_is_not_repeated(journal):
    (command,) = re.findall(r"gnorm compress .*? --out AGAIN", words(gg.write_report([journal.folder])))
    assert "--method" not in command
    assert "--macs 0.5 --rounds 4" in command


@pytest.mark.parametrize(("units", "labels"), [("both", "data"), ("ffn", "data"), ("both", "own")])
def test_a_compression_writes_all_of_its_files(units, labels, tmp_path, write_rows, capsys):
    folder = tmp_path / "model"
    tiny_model("bert", **LABEL_NAMES).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    rows = tiny_rows(240)
    data = write_rows([{"text": row["text"]} for row in rows] if labels == "own" else rows)
    out = tmp_path / "run"
    run = gg.compress(
        str(folder), str(data), macs=0.7, rounds=2, units=units, labels=labels, out=out, measure_speed=False
    )
    assert {path.stem for path in (out / "figures").iterdir()} == {
        "curve",
        "kept",
        *(["scores"] if units == "both" else []),
    }
    assert {"curve", "parameters", "choices", "test"} <= {path.stem for path in (out / "tables").iterdir()}
    summary = run.summary()
    lines = list(csv.DictReader((out / "tables" / "curve.csv").open(encoding="utf-8")))
    assert [int(line["neurons_removed"]) for line in lines][-1] == summary["neurons"]["removed"]
    assert [int(line["multiplications"]) for line in lines] == [step.cost.multiplications for step in run.steps]
    assert ("heads_removed" in lines[0]) == (units == "both")
    card = (out / "model" / "README.md").read_text("utf-8")
    assert not NEURON.search(card)
    assert f"{summary['neurons']['removed']} of 72 feed-forward neurons" in card
    assert main(["table", str(out), "--format", "csv"]) == 0
    table = capsys.readouterr().out.splitlines()[1].split(",")
    assert [int(table[1]), int(table[4])] == summary["parameters"]
    console.show_run(run, out)
    assert "of 24 neurons" in capsys.readouterr().out


def test_the_card_says_what_a_user_must_know(journal):
    card = model_card(run_of(journal))
    heads, neurons = kept_units(journal.header, journal.steps)
    assert (
        f"{heads.gone(4)} of 12 attention heads and {neurons.gone(4)} of 60 feed-forward neurons were removed" in card
    )
    assert "| multiplications | 100% | 50.0% |" in card
    assert "| accuracy | 0.8037 (0.7822 to 0.8235) | 0.8001 (0.7784 to 0.8200) |" in card
    assert "what is left was fitted on 400 rows" in card
    assert "the result was tested on 1,421 rows" in card
    assert "Other steps of the same run (its step 4 is this model):" in card
    row = [line for line in card.splitlines() if line.startswith("| ")][3]
    assert row.startswith(f"| fastest | {heads.gone(4)} | {neurons.gone(4)} | {journal.steps[4].parameters:,} |"), (
        "the card opens with the choice that it is"
    )
    assert f"Neurons left by layer: {', '.join(map(str, neurons.left[4]))}." in card
    assert not NEURON.search(card)


@pytest.mark.draws
def test_the_figure_of_units_left(journal):
    kinds = kept_units(journal.header, journal.steps)
    panels = figures.kept(kinds, 2).axes
    assert [axes.get_xlabel() for axes in panels] == ["Heads", "Neurons"]
    for axes, kept in zip(panels, kinds, strict=True):
        whole, left = axes.containers[0], axes.containers[1]
        assert [bar.get_width() for bar in whole] == kept.totals
        assert [bar.get_width() for bar in left] == kept.left[2]


@pytest.mark.draws
def test_the_figure_of_the_curve_is_against_multiplications(journal):
    (axes,) = figures.work_figure(journal.steps, 3, measure_of(journal.header)).axes
    _, line, solution = axes.lines
    first = journal.steps[0].cost.multiplications
    assert np.allclose(line.get_xdata(), [100 * step.cost.multiplications / first for step in journal.steps])
    assert solution.get_ydata() == [journal.steps[3].quality["accuracy"]]
    assert axes.get_xlim()[0] > axes.get_xlim()[1], "from all to few"
    assert axes.get_xlabel() == "Multiplications left (%)"


def test_only_heads_have_scores_in_figures(journal):
    scores, sites = journal.steps[1].scores, sites_of(journal.header)
    assert [len(vector) for vector in scores_of_heads(scores, sites).vectors] == [4, 4, 4]
    assert scores_of_heads(scores, sites).vectors[1] is scores.vectors[2]


@pytest.fixture
def compared(tmp_path):
    return joint_comparison(tmp_path / "c", {"joint-rounds": 2, "joint-refit": 2, "joint-random": 6})


def test_the_page_of_a_joint_comparison(compared):
    path = gg.write_report([compared])
    page, text = content(path), words(path)
    chart = page["charts"]["comparison"]
    assert chart["layout"]["xaxis"]["autorange"] == "reversed"
    assert {trace["type"] for trace in chart["data"] if trace.get("meta") == "joint-random"} == {"box"}
    assert "drift" not in page["charts"]
    assert page["walks"][page["first"]]["label"] == "joint-refit, run 1"
    assert "3 methods, each taken down to 25 % of the multiplications" in text
    assert "Accuracy by share of the multiplications left" in text
    assert "At the knee" not in text


@pytest.mark.draws
def test_the_figures_and_tables_of_a_joint_comparison(compared):
    comparison = read_comparison(compared)
    outcome.write_comparison(comparison, compared, None)
    assert {path.stem for path in (compared / "figures").iterdir()} == {"curves", "against-random"}
    assert {path.stem for path in (compared / "tables").iterdir()} == {"comparison"}
    (axes,) = comparison_figures.curves(comparison).axes
    assert axes.get_xlabel() == "Multiplications left (%)"
    refit = axes.lines[0]
    walks = comparison.curves["joint-refit"]
    assert np.isclose(refit.get_ydata()[0], 0.8)
    assert np.allclose(
        refit.get_ydata(), np.mean([[step.quality["accuracy"] for step in walk] for walk in walks], axis=0)
    )


def test_the_terminal_draws_a_joint_comparison(compared, capsys):
    console.draw_comparison(read_comparison(compared))
    text = capsys.readouterr().out
    assert "knee" not in text
    assert "from 100 % to 25 % of the multiplications" in text


def test_the_terminal_draws_bars_for_layers(journal, capsys):
    console.draw_run(run_of(journal))
    text = capsys.readouterr().out
    heads, neurons = kept_units(journal.header, journal.steps)
    for place in range(3):
        assert f"{heads.left[4][place]} of 4 heads" in text
        assert f"{neurons.left[4][place]:2} of 20 neurons" in text
    assert "from 100 % to 50 % of the multiplications" in text
    lines = sketch.bars([heads, neurons], 0, plain=True)
    assert lines[0] == f"  0  {'#' * 16} 4 of 4 heads   {'#' * 16} 20 of 20 neurons"


def test_scores_of_neurons_have_no_heat_map(model_folder, data_file, tmp_path, capsys):
    command = ["score", str(model_folder), "--data", str(data_file), "--score", "fisher", "--units", "ffn"]
    assert main([*command, "--out", str(tmp_path / "s")]) == 0
    assert not (tmp_path / "s" / "scores.png").exists()
    assert "heat map" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "change", [{"choices": [{"name": 3}]}, {"test": {"rows": 5, "quality": [], "intervals": {}}}, {"choices": {}}]
)
def test_a_damaged_result_is_refused(change, journal):
    path = journal.folder / "run.json"
    head = json.loads(path.read_text("utf-8"))
    head["result"] |= change
    path.write_text(json.dumps(head), "utf-8")
    with pytest.raises(gg.RunFolderError):
        gg.write_report([journal.folder])
