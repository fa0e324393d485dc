"""The experiments in the repository fit the commands they are written for."""

from __future__ import annotations

import json
from pathlib import Path

import defaults
import heads
import joint_tables
import pytest
import rankings
import typer.main
from journals import comparison, joint_comparison

from greedy_gnorm.cli.app import app
from greedy_gnorm.cli.options import read_yaml, typed_names
from greedy_gnorm.comparison.analysis import read_comparison
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


def test_ranks_are_by_the_means_of_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr(rankings, "MEASURED", tmp_path)
    written = {}
    monkeypatch.setattr(rankings, "write", lambda page, place, text: written.update({place: text}))
    monkeypatch.setattr(rankings, "draw", lambda ranks, difference: None)
    for name, means in (("tweets", (0.5, 0.7, 0.6)), ("financial", (0.5, 0.6, 0.6)), ("demo", (0.4, 0.7, 0.5))):
        found = {"means": dict(zip(("random", "greedy-gnorm", "ae"), means, strict=True))}
        (tmp_path / f"heads-{name}.json").write_text(json.dumps(found), encoding="utf-8")
    rankings.main()
    assert "| greedy-gnorm | 1 | 1.5 | 1 | 1.17 |" in written["ranks"]


def test_the_critical_difference_is_that_of_the_literature():
    assert rankings.critical_difference(5, 6) == pytest.approx(2.728 * (30 / 36) ** 0.5, abs=1e-3)  # Demsar 2006


def test_bars_join_ranks_within_the_critical_difference():
    assert rankings.joined_ranks([1.0, 2.0, 2.5, 4.0], 1.6) == [(1.0, 2.5), (2.5, 4.0)]
    assert rankings.joined_ranks([1.0, 3.0], 1.6) == []


def test_the_defaults_have_a_place_in_the_results(tmp_path, monkeypatch):
    path, measured = tmp_path / "tweets-labels.json", {"rows": 200, "accuracy": [0.8, 0.79]}
    path.write_text(json.dumps({"50%": {**measured, "change": [-0.02, 0.005]}}), encoding="utf-8")
    monkeypatch.setattr(defaults, "MEASURED", tmp_path)
    assert "| tweets | 200 | 80.00 | -1.00 (-2.00 to +0.50) |" in defaults._table("labels")
    assert defaults._table("own") == ""
    assert "<!-- defaults -->" in (rankings.DOCS / "results.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("name", heads.NAMES)
def test_the_record_of_heads_can_be_made(name, fitted):
    given = heads.settings(name, fitted)
    assert len(methods_named(given.pop("methods"))) >= 4
    assert given.pop("runs") == given.pop("trajectories") == 5
    assert set(given) <= set(COMPARING)
    Settings.of(given)


def test_the_record_of_heads_has_a_place_in_the_results(tmp_path, monkeypatch):
    found = heads.summary(read_comparison(comparison(tmp_path / "run", {"greedy-gnorm": 2, "random": 3})))
    assert found["rows"] == 50
    assert [row[:2] for row in found["cells"]] == [["greedy-gnorm", "2"], ["random", "3"]]
    assert set(found["means"]) == {"greedy-gnorm", "random"}
    monkeypatch.setattr(heads, "MEASURED", tmp_path)
    (tmp_path / "heads-tweets.json").write_text(json.dumps(found), encoding="utf-8")
    assert "#### Tweets" in heads.tables(fitted=False)
    assert "| greedy-gnorm | 2 | 0.960 |" in heads.tables(fitted=False)
    assert heads.tables(fitted=True) == ""
    for place in ("<!-- heads -->", "<!-- heads-fitted -->"):
        assert place in (rankings.DOCS / "results.md").read_text(encoding="utf-8")


def test_joint_walks_are_added_to_those_that_were_measured_before(tmp_path, monkeypatch):
    monkeypatch.setattr(joint_tables, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(joint_tables, "MEASURED", tmp_path / "measured")
    earlier = {"method": "joint-rounds", "runs": [7, 8], "unpruned": 0.9, "quality": [0.5] * 6}
    replaced = {"method": "joint-refit", "runs": [0], "unpruned": 0.9, "quality": [0.0] * 6}
    (tmp_path / "measured").mkdir()
    kept = tmp_path / "measured" / "joint-films.json"
    kept.write_text(json.dumps({"rows": 5, "walks": [replaced, earlier]}))
    (tmp_path / "runs" / "films").mkdir(parents=True)
    joint_comparison(tmp_path / "runs" / "films" / "joint-from-1", {"joint-refit": 2, "joint-rounds": 1})
    joint_tables.collect("films")
    found = json.loads(kept.read_text())
    walks = {(walk["method"], *walk["runs"]): walk for walk in found["walks"]}
    assert set(walks) == {("joint-refit", 0), ("joint-refit", 1), ("joint-rounds", 7, 8), ("joint-rounds", 10)}
    assert walks["joint-refit", 0]["unpruned"] == 0.8
    assert walks["joint-refit", 0]["quality"] == sorted(walks["joint-refit", 0]["quality"], reverse=True)
    text = joint_tables.table(found["rows"], found["walks"])
    assert "Unpruned 80.00 and 90.00" in text
    mean = (2 * 0.5 + walks["joint-rounds", 10]["quality"][0]) / 3
    assert f"| joint-rounds | 3 | {100 * mean:.1f} (" in text
