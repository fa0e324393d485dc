"""gnorm bench: both models timed in turn, in the runtimes, shapes and threads that are asked for."""

from __future__ import annotations

import csv
import json
import logging

import pytest
import torch
from conftest import LABEL_NAMES, tiny_batch, tiny_model, tiny_tokenizer

import greedy_gnorm as gg
from greedy_gnorm.cli.app import main
from greedy_gnorm.deployment import bench as module
from greedy_gnorm.deployment import export
from greedy_gnorm.report.bench import bench_figure
from greedy_gnorm.units import Latency


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run on ready batches."""
    home = tmp_path_factory.mktemp("bench")
    tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES).save_pretrained(home / "classifier")
    tiny_tokenizer().save_pretrained(home / "classifier")
    batches = [tiny_batch(), tiny_batch(seed=1)]
    gg.prune(
        home / "classifier", batches[:1], eval_data=batches[1:], stop="heads=3", out=home / "run", latency=False
    )  # fmt: skip
    return home / "run"


@pytest.fixture
def fake_times(monkeypatch):
    """Nothing is timed; the calls are noted, with the threads that torch had."""
    calls = []

    def timed(runtime, before, after, inputs, shape, *, seconds, promised):
        rows, tokens = shape
        calls.append((runtime, rows, tokens, torch.get_num_threads(), seconds))
        before(inputs)
        after(inputs)
        return Latency(runtime, rows, tokens, torch.get_num_threads(), 5, 3.0, (2.0, 4.0), 2.0, (1.5, 2.5), promised)

    monkeypatch.setattr(module, "timed", timed)
    return calls


@pytest.mark.draws
def test_every_combination_is_timed_and_written(folder, fake_times, capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    threads = torch.get_num_threads()
    arguments = ["--batches", "1,2", "--tokens", "8,64", "--threads", "1,2", "--seconds", "0.5"]
    assert main(["bench", str(folder), *arguments]) == 0
    shapes = [(1, 8), (2, 8)]  # 64 tokens are more than the model's 48
    expected = [(name, *shape, count, 0.5) for count in (1, 2) for name in module.RUNTIMES for shape in shapes]
    assert fake_times == expected
    assert torch.get_num_threads() == threads
    assert logging.root.handlers == []  # the exporter adds one
    shown = capsys.readouterr().out
    assert "Left out: 64 tokens: the model accepts at most 48." in shown
    assert "1.50" in shown
    rows = list(csv.DictReader((folder / "bench" / "bench.csv").open()))
    assert [
        (row["runtime"], int(row["batch"]), int(row["tokens"]), int(row["threads"]), 0.5) for row in rows
    ] == expected
    assert float(rows[0]["speed_up"]) == 1.5
    assert float(rows[0]["promised"]) > 1
    assert "the model accepts at most 48" in (folder / "bench" / "bench.md").read_text()
    assert (folder / "bench" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((folder / "bench" / "bench.json").read_text())["latency"]) == 12


def test_times_are_measured_and_printed_as_json(folder, tmp_path, capsys):
    out = tmp_path / "times"
    arguments = ["--batches", "1", "--tokens", "8", "--runtimes", "torch", "--seconds", "0.01", "--out", str(out)]
    assert main(["bench", str(folder / "model"), *arguments, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    (latency,) = content["latency"]
    assert latency["before_ms"] > 0
    assert latency["repeats"] >= 5
    assert content["out"] == str(out)
    assert (out / "bench.md").exists()


def test_a_missing_runtime_is_an_error_if_named_and_a_note_if_not(folder, fake_times, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "missing_packages", lambda: ["onnxruntime"])
    monkeypatch.setattr(export, "missing_packages", lambda: ["onnxruntime"])
    result = gg.bench(folder, batches=[1], tokens=[8], out=tmp_path)
    assert {call[0] for call in fake_times} == {"torch"}
    assert result.left_out == ["onnxruntime and int8: pip install 'greedy-gnorm[onnx]' (onnxruntime)."]
    assert repr(result) == "Bench(1 measurement in torch: 1.50 to 1.50 times as fast)"
    with pytest.raises(gg.GnormError, match=r"needs onnxruntime: pip install 'greedy-gnorm\[onnx\]'"):
        gg.bench(folder, batches=[1], tokens=[8], runtimes=["int8"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtimes": ["tensorrt"]}, "Unknown runtime 'tensorrt'. Choose from: torch, onnxruntime, int8"),
        ({"batches": [0]}, r"batches must be a list of whole numbers above 0, such as \[1, 8\], not \[0\]"),
        ({"tokens": 8}, "tokens must be a list of whole numbers"),
        ({"tokens": [64]}, "The model accepts at most 48 tokens"),
        ({"seconds": 0}, "seconds must be a number above 0"),
    ],
)
def test_wrong_options(folder, options, message):
    with pytest.raises(gg.GnormError, match=message):
        gg.bench(folder, **{"runtimes": ["torch"], **options})


def test_wrong_numbers_in_the_terminal(folder, capsys):
    assert main(["bench", str(folder), "--batches", "1,x"]) == 2
    assert "'1,x' must be whole numbers above 0, separated by commas" in capsys.readouterr().err


def test_a_run_in_python_writes_nothing_by_default(fake_times, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    batches = [tiny_batch(), tiny_batch(seed=1)]
    run = gg.prune(tiny_model("bert"), batches[:1], eval_data=batches[1:], stop="heads=1")
    result = gg.bench(run, batches=[1], tokens=[8], runtimes=["torch"])
    assert result.folder is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(gg.GnormError, match="leave model out"):
        gg.bench(run, model="elsewhere", runtimes=["torch"])


def test_the_figure_has_a_bar_for_each_measurement():
    one = Latency("torch", 1, 32, 1, 5, 3.0, (2.0, 4.0), 2.0, (1.5, 2.5), 1.4)
    two = Latency("int8", 8, 32, 2, 5, 3.0, (2.0, 4.0), 1.0, (0.5, 1.5))
    (axes,) = bench_figure([one, two]).axes
    assert [bar.get_width() for bar in axes.patches] == [1.5, 3.0]
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "torch, 1 x 32, 1 thread",
        "int8, 8 x 32, 2 threads",
    ]
