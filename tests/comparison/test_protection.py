"""Heads that the user protects stay in every walk of a comparison."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from conftest import LABEL_NAMES, tiny_model, tiny_rows, tiny_tokenizer

import greedy_gnorm as gg
from greedy_gnorm.cli.app import main
from greedy_gnorm.comparison.analysis import read_comparison
from greedy_gnorm.units import Unit, removed_by


def compare(folder, **options):
    model = tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES)
    options = {"samples": 9, "eval_samples": 21, **options}
    return gg.compare(model, tiny_rows(60), tokenizer=tiny_tokenizer(), out=folder, **options)


def test_protected_heads_stay_and_layers_keep_their_minimum(tmp_path):
    options = {"methods": "paper", "runs": 1, "trajectories": 2, "protect": [(0, 1), (1, 0)], "min_heads": 2}
    comparison = compare(tmp_path / "c", **options)
    assert len(comparison.curves) == 5
    for walks in comparison.curves.values():
        for walk in walks:
            removed = removed_by(walk)
            assert not {Unit(0, 1), Unit(1, 0)} & set(removed)
            assert Counter(unit.site for unit in removed) == {0: 2, 1: 2}, "two of four heads are left in each layer"
    asked = json.loads((tmp_path / "c" / "experiment.json").read_text())["config"]
    assert (asked["protect"], asked["min_heads"]) == ([[0, 1], [1, 0]], 2)
    with pytest.raises(gg.RunFolderError, match="protect was"):
        compare(tmp_path / "c", **{**options, "protect": [(0, 2)]}, resume=True)


def test_the_command_protects_heads(tmp_path, model_folder, data_file, capsys):
    command = ["compare", str(model_folder), "--data", str(data_file), "--out", str(tmp_path / "c"), "--samples", "9"]
    command += ["--methods", "ae", "--runs", "1", "--protect", "L1", "--min-heads", "1", "--quiet"]
    assert main(command) == 0
    (walk,) = read_comparison(tmp_path / "c").curves["ae"]
    assert [unit.site for unit in removed_by(walk)] == [0, 0, 0]
    capsys.readouterr()
