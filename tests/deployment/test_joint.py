"""Compressed models outside of a run: plain transformers, ONNX, 8 bits."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from conftest import tiny_batch, tiny_model, tiny_rows

import greedy_gnorm as gg
from greedy_gnorm.cli.app import main
from greedy_gnorm.deployment.export import largest_difference, onnx_runner, to_onnx
from greedy_gnorm.model.checkpoint import save
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.units import Unit


def compressed(family):
    """Uneven layers, and one feed-forward without neurons."""
    model = tiny_model(family, num_hidden_layers=2)
    sites = find_sites(model)
    units = [Unit(0, 2), *(Unit(1, index) for index in range(24))]
    if len(sites) > 2:
        units += [Unit(2, 0), Unit(2, 1), *(Unit(3, index) for index in range(7))]
    remove(sites, units)
    return model


def test_plain_transformers_loads_it(family, tmp_path):
    model = compressed(family)
    save(model, None, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert len(config["pruned_neurons"]["0"]) == 24
    auto = transformers.AutoModelForSequenceClassification
    loaded = auto.from_pretrained(tmp_path / "model", trust_remote_code=True)
    batch = {key: tensor for key, tensor in tiny_batch().items() if key != "labels"}
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch).logits, model(**batch).logits)
    loaded.save_pretrained(tmp_path / "again")
    assert find_sites(gg.load(tmp_path / "again")).removed() == find_sites(model).removed()
    with pytest.raises(RuntimeError, match=r"size mismatch|ignore_mismatched_sizes"):
        auto.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_onnx_agrees_with_torch(family, tmp_path):
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    model = compressed(family)
    to_onnx(model, tmp_path / "model.onnx")
    assert largest_difference(model, onnx_runner(tmp_path / "model.onnx")) < 1e-5
    assert not find_sites(model)[1].survivors, "the model itself was left alone"


@pytest.mark.filterwarnings("ignore:The calibration rows have")
def test_a_compression_is_exported_with_8_bits(model_folder, tmp_path, capsys):
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    data, run = tmp_path / "rows.jsonl", tmp_path / "run"
    data.write_text("\n".join(map(json.dumps, tiny_rows(120))))
    options = {"macs": 0.6, "rounds": 2, "samples": 20, "calibration_tokens": 300, "measure_speed": False}
    done = gg.compress(str(model_folder), str(data), out=run, **options)
    assert main(["export", str(run), "--int8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["largest difference to torch"] < 1e-5
    assert report["int8"]["rows"] == done.test["rows"]
    assert report["int8"]["quality"]["torch"] == pytest.approx(done.test["quality"]["accuracy"][1])
