"""The experiments in the repository fit the commands they are written for."""

from __future__ import annotations

import json
from pathlib import Path

import defaults
import pytest
import rankings
import typer.main

from greedy_gnorm.cli.app import app
from greedy_gnorm.cli.options import read_yaml, typed_names
from greedy_gnorm.pruning.methods import methods_named
from greedy_gnorm.settings import COMPARING, COMPRESSING, Settings

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
FILES = sorted((EXPERIMENTS / "paper").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_comparison_file(path):
    content = read_yaml(path)
    assert set(content) <= set(typed_names(typer.main.get_command(app).commands["compare"]))
    assert {"model", "data", "out"} <= set(content)
    assert methods_named(content["methods"])


def test_there_is_one_for_each_of_the_papers_models():
    assert {path.stem for path in FILES} >= {"bert", "albert", "roberta", "xlm-roberta"}


@pytest.mark.parametrize("path", sorted((EXPERIMENTS / "offline").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_offline_file(path):
    plan = read_yaml(path)
    trained = {"base", "epochs", "learning-rate", "seed"}
    compared = {"data", "compare", "joint"}
    optional = {"class", "longest", "task", "divided", "compress"}
    assert set(plan) - optional in ({*compared, *trained}, {*compared, "classifier"})
    for name, trajectories in (("compare", 25), ("joint", 3)):
        assert methods_named(plan[name].pop("methods"))
        assert plan[name].pop("runs") == 3
        assert plan[name].pop("trajectories") >= trajectories
        assert set(plan[name]) <= set(COMPARING)
        Settings.of(plan[name])
    if "compress" in plan:
        assert plan["compress"].pop("shares") == [0.5, 0.33]
        assert set(plan["compress"]) <= set(COMPRESSING)
        Settings.of(plan["compress"])


def test_ranks_are_those_of_the_tables():
    means = rankings.tables((rankings.DOCS / rankings.PAGE).read_text(encoding="utf-8"))
    assert len(means) == 6
    assert means["MiniLM on tweets (BERT class, 6 x 12 heads)"]["greedy-gnorm"] == 0.776
    assert rankings.critical_difference(5, 6) == pytest.approx(2.728 * (30 / 36) ** 0.5, abs=1e-3)  # Demsar 2006


def test_the_defaults_have_a_place_in_the_results(tmp_path, monkeypatch):
    path, measured = tmp_path / "tweets-labels.json", {"rows": 200, "accuracy": [0.8, 0.79]}
    path.write_text(json.dumps({"50%": {**measured, "change": [-0.02, 0.005]}}), encoding="utf-8")
    monkeypatch.setattr(defaults, "MEASURED", tmp_path)
    assert "| tweets | 200 | 80.00 | -1.00 (-2.00 to +0.50) |" in defaults._table("labels")
    assert defaults._table("own") == ""
    assert "<!-- defaults -->" in (rankings.DOCS / "results.md").read_text(encoding="utf-8")
