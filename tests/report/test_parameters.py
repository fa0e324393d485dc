"""The paper's parameter tables to the last digit."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import LABEL_NAMES, tiny_batch, tiny_model, tiny_rows, tiny_tokenizer
from journals import header, walk

import greedy_gnorm as gg
from greedy_gnorm.cli.app import main
from greedy_gnorm.model.sites import Site, find_sites
from greedy_gnorm.records.journal import Journal
from greedy_gnorm.units import Cost

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments" / "paper"

PAPER = {
    ("bert", 117): """
        Model 102269955 100.00 390.13 79244355 100.00 302.29
        BERT 102267648 100.00 390.12 79242048 100.00 302.28
        Embeddings 16622592 16.25 63.41 16622592 20.98 63.41
        Encoder 85054464 83.17 324.46 62028864 78.28 236.62
        Pooler 590592 0.58 2.25 590592 0.75 2.25
        Classifier 2307 0.00 0.01 2307 0.00 0.01
        Weight 2304 0.00 0.01 2304 0.00 0.01
        Bias 3 0.00 0.00 3 0.00 0.00""",
    ("albert", 3): """
        Model 11685891 100.00 44.58 11095491 100.00 42.33
        ALBERT 11683584 99.98 44.57 11093184 99.98 42.32
        Embeddings 3906048 33.43 14.90 3906048 35.20 14.90
        Encoder 7186944 61.50 27.42 6596544 59.45 25.16
        Pooler 590592 5.05 2.25 590592 5.32 2.25
        Classifier 2307 0.02 0.01 2307 0.02 0.01
        Weight 2304 0.02 0.01 2304 0.02 0.01
        Bias 3 0.00 0.00 3 0.00 0.00""",
    ("roberta", 245): """
        Model 355361794 100.00 1355.60 291089474 100.00 1110.42
        RoBERTa 354310144 99.70 1351.59 290037824 99.64 1106.41
        Embeddings 52000768 14.63 198.37 52000768 17.86 198.37
        Encoder 302309376 85.07 1153.22 238037056 81.77 908.04
        Classifier 1051650 0.30 4.01 1051650 0.36 4.01
        Dense 1049600 0.30 4.00 1049600 0.36 4.00
        Out_proj 2050 0.00 0.01 2050 0.00 0.01""",
    ("xlm-roberta", 105): """
        Model 278059028 100.00 1060.71 257395028 100.00 981.88
        RoBERTa 277453056 99.78 1058.40 256789056 99.76 979.57
        Embeddings 192398592 69.19 733.94 192398592 74.75 733.94
        Encoder 85054464 30.59 324.46 64390464 25.02 245.63
        Classifier 605972 0.22 2.31 605972 0.24 2.31
        Dense 590592 0.21 2.25 590592 0.23 2.25
        Out_proj 15380 0.01 0.06 15380 0.01 0.06""",
}


@pytest.mark.parametrize(("name", "removed"), PAPER)
def test_the_papers_tables(name, removed, capsys):
    assert main(["table", str(EXPERIMENTS / f"{name}.json"), "--removed", str(removed), "--format", "csv"]) == 0
    columns, *rows = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    assert [columns[3], columns[6]] == ["MB before (float32)", "MB after (float32)"]
    assert rows == [line.split() for line in PAPER[name, removed].strip().splitlines()]


def test_the_same_table_as_markdown_and_in_the_terminal(capsys):
    for form in ("md", "table"):
        assert main(["table", str(EXPERIMENTS / "bert.json"), "--removed", "117", "--format", form]) == 0
        shown = capsys.readouterr()
        assert "102,269,955" in shown.out
        assert "302.29" in shown.out
        assert not shown.err, "no quality, so nothing about rows"


def test_a_pruned_folder_shows_what_is_gone(tmp_path, capsys):
    model = tiny_model("albert")
    gg.remove_heads(model, {0: [1, 2]})
    model.save_pretrained(tmp_path)
    assert main(["table", str(tmp_path), "--format", "csv"]) == 0
    row = capsys.readouterr().out.splitlines()[1].split(",")
    per_head = 4 * 16 * 4 + 3 * 4
    assert int(row[1]) - int(row[4]) == 2 * per_head
    assert int(row[4]) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", ["modernbert", "gpt2", "llama"])
def test_the_parts_of_other_families_have_names(family, tmp_path, capsys):
    tiny_model(family).config.save_pretrained(tmp_path)
    assert main(["table", str(tmp_path), "--removed", "5", "--format", "csv"]) == 0
    rows = {line.split(",")[0]: line.split(",") for line in capsys.readouterr().out.splitlines()}
    assert {"Model", "Embeddings", "Layers", "Norm"} <= set(rows)
    unit = find_sites(tiny_model(family), "heads")[0].unit_cost().parameters
    assert int(rows["Layers"][1]) - int(rows["Layers"][4]) == 5 * unit


@pytest.mark.parametrize(("removed", "message"), [("145", "144 heads"), ("-1", "144 heads")])
def test_too_many_heads(removed, message, capsys):
    assert main(["table", str(EXPERIMENTS / "bert.json"), "--removed", removed]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"model_type": "openai-gpt"}', '{"model_type": "bert", "hidden_size": "x"}']
)
def test_a_bad_configuration(content, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(content)
    assert main(["table", str(path)]) == 2
    assert "Error: " in capsys.readouterr().err


def test_the_configurations_are_those_of_the_notes():
    sizes = {name: json.loads((EXPERIMENTS / f"{name}.json").read_text()) for name, _ in PAPER}
    assert sizes["bert"]["vocab_size"] == 21128
    assert sizes["roberta"]["num_hidden_layers"] * sizes["roberta"]["num_attention_heads"] == 384


def test_parts_of_the_same_name_stand_under_their_own_module(tmp_path, capsys):
    tiny_model("distilbert").config.save_pretrained(tmp_path)
    assert main(["table", str(tmp_path), "--removed", "0", "--format", "csv"]) == 0
    rows = [line.split(",")[:2] for line in capsys.readouterr().out.splitlines()]
    assert rows[-6:] == [
        ["Pre_classifier", "272"], ["Weight", "256"], ["Bias", "16"],
        ["Classifier", "51"], ["Weight", "48"], ["Bias", "3"],
    ]  # fmt: skip


def test_the_table_of_a_run_on_a_pruned_model_starts_where_the_run_did(tmp_path, capsys):
    model = tiny_model("bert")
    gg.remove_heads(model, {0: [1, 2]})
    options = {"eval_data": [tiny_batch(seed=2)], "stop": "heads=3", "out": tmp_path / "run"}
    run = gg.prune(model, [tiny_batch(seed=1)], **options)
    assert main(["table", str(tmp_path / "run"), "--format", "csv"]) == 0
    assert capsys.readouterr().out == (tmp_path / "run" / "tables" / "parameters.csv").read_text()
    assert run.steps[0].parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("size", [{"num_attention_heads": 3}, {"num_attention_heads": 0}, {"hidden_size": -1}])
def test_a_configuration_that_builds_no_model(size, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bert", "hidden_size": 16, **size}))
    assert main(["table", str(path), "--removed", "1"]) == 2
    assert "Error: " in capsys.readouterr().err


@pytest.mark.parametrize("form", ["pruned", "dense"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_terminal_the_tables_the_card_and_the_page_show_one_size(dtype, form, tmp_path, write_rows, capsys):
    name = str(dtype).removeprefix("torch.")
    tiny_model("bert", dtype=dtype, vocab_size=20_000, **LABEL_NAMES).save_pretrained(tmp_path / "half")
    tiny_tokenizer().save_pretrained(tmp_path / "half")
    run, data = str(tmp_path / "run"), str(write_rows(tiny_rows()))
    command = ["prune", str(tmp_path / "half"), "--data", data, "--out", run, "--stop", "heads=9", "--no-latency"]
    assert main([*command, "--samples", "9", "--format", form]) == 0
    (size,) = re.findall(rf"MB \({name}\) +(\S+) +(\S+)", capsys.readouterr().out)
    assert main(["table", run, "--format", "csv"]) == 0
    table = capsys.readouterr().out
    assert table == (tmp_path / "run" / "tables" / "parameters.csv").read_text()
    (whole,) = (row for row in csv.DictReader(table.splitlines()) if row["Layer"] == "Model")
    assert (whole[f"MB before ({name})"], whole[f"MB after ({name})"]) == size
    steps = Journal.read(Path(run)).steps
    assert size == tuple(f"{step.bytes / 2**20:.2f}" for step in (steps[0], steps[9]))
    assert f"| MB ({name}) | {size[0]} | {size[1]} |" in (tmp_path / "run" / "model" / "README.md").read_text()
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert f"<dt>Size ({name})</dt><dd>{size[1]}<small> MB</small>" in page
    stored = (tmp_path / "run" / "model" / "model.safetensors").stat().st_size
    kept = steps[9 if form == "pruned" else 0].bytes
    assert kept < stored < kept + 20_000, "the size of the file, but for its header"


def test_a_run_that_is_not_finished_has_no_table(tmp_path, capsys):
    journal = walk(tmp_path / "run", header(), steps=2)
    assert main(["table", str(journal.folder)]) == 2
    assert "is not finished: continue it with --resume" in capsys.readouterr().err


def test_a_number_of_heads_gives_no_table_where_they_differ_in_size(tmp_path, monkeypatch, capsys):
    tiny_model("bert").config.save_pretrained(tmp_path)
    monkeypatch.setattr(Site, "unit_cost", lambda site: Cost(100 + site.index))
    assert main(["table", str(tmp_path), "--removed", "2"]) == 2
    assert "differ in size" in capsys.readouterr().err
