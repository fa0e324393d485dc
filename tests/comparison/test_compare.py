"""Comparisons: what is shared, what is resumed, and the numbers of the tables."""

from __future__ import annotations

import copy
import csv
import json
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml
from conftest import LABEL_NAMES, shared, tiny_batch, tiny_model, tiny_rows, tiny_tokenizer
from twins import unpadded

import greedy_gnorm as gg
from greedy_gnorm.cli.app import main
from greedy_gnorm.comparison.analysis import Comparison, read_comparison, staleness
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.model.sites import find_sites, weight_of
from greedy_gnorm.passes.gradients import gradient_change
from greedy_gnorm.pruning import loop
from greedy_gnorm.pruning.curves import at_share, curve, mean_over_curve, units_before_drop
from greedy_gnorm.pruning.methods import ALL_JOINTS, HEADS_ONLY, JOINTS, PAPER, methods_named
from greedy_gnorm.report import charts
from greedy_gnorm.report import comparison_figures as paper_figures
from greedy_gnorm.report.tables import as_csv, as_markdown
from greedy_gnorm.scores import Score
from greedy_gnorm.tasks.objectives import OBJECTIVES
from greedy_gnorm.units import Cost, Measure, Step, Unit, removed_by

ROWS = tiny_rows(60)


def compare(folder, family="bert", **options):
    model = tiny_model(family, **LABEL_NAMES, **({"num_hidden_layers": 2} if family == "bert" else {}))
    options = {"methods": "paper", "runs": 2, "trajectories": 3, "samples": 9, "eval_samples": 21, **options}
    return gg.compare(model, ROWS, tokenizer=tiny_tokenizer(), out=folder, **options)


def essence(comparison):
    return {
        method: [[(step.removed, step.quality) for step in walk] for walk in walks]
        for method, walks in comparison.curves.items()
    }


@pytest.mark.draws
def test_every_method_walks_on_the_same_evaluation_rows(tmp_path):
    comparison = compare(tmp_path / "c")
    assert {method: len(walks) for method, walks in comparison.curves.items()} == {
        "greedy-gnorm": 2, "inverse-gnorm": 2, "ae": 2, "inverse-ae": 2, "random": 3,
    }  # fmt: skip
    headers = [json.loads(path.read_text()) for path in sorted((tmp_path / "c" / "parts").glob("*/run.json"))]
    assert len({header["data"]["evaluation"]["fingerprint"] for header in headers}) == 1
    samples = {(header["seed"], header["data"]["scoring"]["fingerprint"]) for header in headers}
    assert len(samples) == 3, "one scoring sample a run, whatever the method"
    for walks in comparison.curves.values():
        for walk in walks:
            assert len(set(removed_by(walk))) == 8
            assert walk[0].quality == comparison.curves["ae"][0][0].quality
    figures = {"curves", "against-random", "masks", "staleness", "gradient-change"}
    figures |= {f"scores-{method}" for method in PAPER if method != "random"}
    assert {path.name for path in (tmp_path / "c" / "figures").iterdir()} == {
        f"{name}.{kind}" for name in figures for kind in ("png", "svg", "pdf")
    }
    for name in figures:
        assert (tmp_path / "c" / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        ElementTree.parse(tmp_path / "c" / "figures" / f"{name}.svg")
    assert essence(read_comparison(tmp_path / "c")) == essence(comparison)


def test_the_figure_of_curves_shows_the_mean_of_each_methods_runs(tmp_path):
    comparison = compare(tmp_path / "c", methods="greedy-gnorm,ae")
    (axes,) = paper_figures.curves(comparison).axes
    lines = {line.get_label(): line.get_xydata() for line in axes.get_lines()}
    assert set(lines) == {"greedy-gnorm (2)", "ae (2)"}
    for method, walks in comparison.curves.items():
        points = np.mean([curve(walk, comparison.measure) for walk in walks], axis=0)
        np.testing.assert_allclose(lines[f"{method} (2)"], points)


def test_a_part_is_the_run_that_prune_makes(tmp_path):
    comparison = compare(tmp_path / "c", methods="greedy-gnorm,michel", runs=1)
    model = tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES)
    for method in ("greedy-gnorm", "michel"):
        alone = gg.prune(model, ROWS, tokenizer=tiny_tokenizer(), method=method, stop="all", samples=9, eval_samples=21)
        assert [step.removed for step in alone.steps] == [step.removed for step in comparison.curves[method][0]]


def test_what_methods_share_is_computed_once(tmp_path, monkeypatch):
    evaluated, scored = [], []
    judge, score = loop.judge, Score.__call__

    def counted(sites, batches, measure):
        evaluated.append(frozenset(sites.removed()))
        return judge(sites, batches, measure)

    def counted_score(self, sites, batches, objective):
        scored.append(self.name)
        return score(self, sites, batches, objective)

    monkeypatch.setattr(loop, "judge", counted)
    monkeypatch.setattr(Score, "__call__", counted_score)
    comparison = compare(tmp_path / "c", methods="ae,inverse-ae,gnorm-static,greedy-gnorm", runs=1)
    masks = {
        frozenset(removed_by(walk[: place + 1]))
        for walks in comparison.curves.values()
        for walk in walks
        for place in range(len(walk))
    }
    assert len(evaluated) == len(masks) < 4 * 9
    assert Counter(scored) == {"entropy": 1, "gnorm": 8}, "static methods score once, with whoever scores the same"


def test_a_comparison_is_resumed_and_a_finished_part_is_not_computed_again(tmp_path, monkeypatch):
    whole = compare(tmp_path / "whole")

    class Stop(Exception):
        pass

    def on_step(part, step, gone, limit):
        if (str(part), step.step) == ("inverse-ae-0", 4):
            raise Stop

    with pytest.raises(Stop):
        compare(tmp_path / "parts", on_step=on_step)
    steps = []
    resumed = compare(
        tmp_path / "parts", resume=True, on_step=lambda part, step, *rest: steps.append((str(part), step.step))
    )
    assert essence(resumed) == essence(whole)
    assert ("greedy-gnorm-0", 1) not in steps
    assert ("inverse-ae-0", 4) not in steps
    assert ("inverse-ae-0", 5) in steps
    more = compare(tmp_path / "parts", methods="paper,magnitude", resume=True)
    assert set(more.curves) == {*PAPER, "magnitude"}


def test_folders_and_names_are_checked(tmp_path):
    compare(tmp_path / "c", methods="random", trajectories=1)
    with pytest.raises(gg.RunFolderError, match="already holds a comparison"):
        compare(tmp_path / "c", methods="random", trajectories=1)
    with pytest.raises(gg.RunFolderError, match="holds another comparison: seed was"):
        compare(tmp_path / "c", methods="random", trajectories=1, resume=True, seed=7)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(gg.RunFolderError, match="holds no comparison"):
        compare(tmp_path / "other")
    for wrong, message in (
        ({"methods": "x"}, "Unknown method 'x'"),
        ({"methods": ","}, "Name the methods"),
        ({"runs": 0}, "at least 1 run"),
        ({"samples": -1}, "samples"),
    ):
        with pytest.raises(gg.GnormError, match=message):
            compare(tmp_path / "new", **wrong)
    assert not (tmp_path / "new").exists()


def plain_query_gradients(model, batches):
    """The gradient of the mean norm of the logits by each query weight, by autograd alone."""
    rows = [row for batch in batches for row in unpadded(batch)]
    weights = [weight_of(site.inputs[site.parts["q"]]) for site in find_sites(model, "heads")]
    norms = [model(**{name: row[name] for name in ("input_ids", "attention_mask")}).logits.norm() for row in rows]
    return torch.autograd.grad(sum(norms) / len(rows), weights)


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_the_change_of_gradients_is_that_of_plain_autograd(family):
    """A closed gate must be what weights of zero are: the head's columns of the output projection."""
    model, batches = tiny_model(family, dtype=torch.float64), [tiny_batch(seed=1), tiny_batch(rows=3, longest=7)]
    gg.remove_heads(model, {0: [1]})
    head = Unit(0, 2)
    changes = gradient_change(find_sites(model, "heads"), ready_batches(batches), OBJECTIVES["logit-norm"], head)
    before = plain_query_gradients(model, batches)
    closed = copy.deepcopy(model)
    with torch.no_grad():
        find_sites(closed, "heads")[0].output.weight[:, 4:8] = 0  # heads 0, 2, 3 are left, each of size 4
    after = plain_query_gradients(closed, batches)
    assert changes[0].shape == (3, 4)
    for ours, old, new in zip(changes, before, after, strict=True):
        difference = (new - old).numpy()
        for row, column in np.ndindex(*ours.shape):
            block = difference[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            assert ours[row, column] == pytest.approx(block.mean(), rel=1e-9, abs=1e-15)
        assert np.abs(ours).max() > 1e-4, "no gradient moves: the test would prove nothing"


def test_albert_has_its_picture_of_tied_heads(tmp_path):
    compare(tmp_path / "c", family="albert", methods="greedy-gnorm", runs=1)
    assert (tmp_path / "c" / "figures" / "tied-heads.png").exists()


@pytest.mark.draws
def test_a_pruned_model_is_compared_though_a_site_has_no_head(tmp_path):
    model = tiny_model("bert", **LABEL_NAMES)
    gg.remove_heads(model, {1: [0, 1, 2, 3]})
    options = {"methods": "greedy-gnorm", "runs": 1, "samples": 9, "eval_samples": 21}
    gg.compare(model, ROWS, tokenizer=tiny_tokenizer(), out=tmp_path / "c", **options)
    picture = (tmp_path / "c" / "figures" / "gradient-change.svg").read_text()
    assert picture.count("layer 1 (no head)") == 1
    assert picture.count("(no head)") == 1


def test_the_command(tmp_path, model_folder, data_file, capsys):
    command = ["compare", str(model_folder), "--data", str(data_file), "--out", str(tmp_path / "c"), "--samples", "9"]
    command += ["--methods", "greedy-gnorm,random", "--runs", "2", "--trajectories", "2"]
    assert main(command) == 0
    text = capsys.readouterr()
    assert "greedy-gnorm" in text.out
    assert "*" in text.out
    assert "greedy-gnorm-1  step 8" in text.err
    with (tmp_path / "c" / "tables" / "comparison.csv").open() as file:
        (first, second) = csv.DictReader(file)
    assert (first["method"], first["runs"], second["method"]) == ("greedy-gnorm", "2", "random")
    assert " to " in first["at 50%"]
    assert "| greedy-gnorm |" in (tmp_path / "c" / "tables" / "solutions.md").read_text()
    assert main(command) == 2
    capsys.readouterr()
    assert main([*command, "--resume", "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in result["comparison"]] == ["greedy-gnorm", "random"]


@pytest.mark.parametrize("methods", ["greedy-gnorm,random", ["greedy-gnorm", "random"]])
def test_the_command_reads_a_file(methods, tmp_path, model_folder, data_file, capsys):
    wanted = {"model": str(model_folder), "data": str(data_file), "methods": methods, "runs": 1, "trajectories": 2}
    wanted |= {"out": str(tmp_path / "c"), "samples": 9, "eval-samples": 21, "seed": 3}
    (tmp_path / "compare.yaml").write_text(yaml.safe_dump(wanted))
    assert main(["compare", "--config", str(tmp_path / "compare.yaml"), "--runs", "2", "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(row["method"], row["runs"]) for row in result["comparison"]] == [("greedy-gnorm", "2"), ("random", "2")]
    asked = json.loads((tmp_path / "c" / "experiment.json").read_text())
    assert (asked["config"]["samples"], asked["config"]["eval_samples"], asked["config"]["seed"]) == (9, 21, 3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("data: [a.csv, b.csv]", "data must be one value, not ['a.csv', 'b.csv']"),
        ("score-options: [variant=A, eps=1]", "score_options must be a dict of names and values"),
        ("methods: [ae, 3]", "methods must be a name or a list of names, not ['ae', 3]"),
        ("methods: {ae: 1}", "methods must be a name or a list of names, not {'ae': 1}"),
        ("stop: [knee, 3]", "stop must be a name or a list of names, not ['knee', 3]"),
    ],
)
def test_a_list_where_none_belongs_is_refused(line, message, tmp_path, model_folder, data_file, capsys):
    name = line.split(":")[0]
    (tmp_path / "compare.yaml").write_text(line)
    command = ["prune" if name == "stop" else "compare", str(model_folder), "--out", str(tmp_path / "c")]
    command += [] if name == "data" else ["--data", str(data_file)]
    assert main([*command, "--config", str(tmp_path / "compare.yaml")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "c").exists()


SLOW = ("attribution-greedy", "leave-one-out-greedy", "shapley-greedy", "gnorm-look-ahead", "fisher-look-ahead")
"""The methods that take many passes at every step."""


def test_names_of_methods():
    assert methods_named("paper") == ["greedy-gnorm", "inverse-gnorm", "ae", "inverse-ae", "random"]
    every = methods_named("all")
    assert set(PAPER) < set(every)
    assert set(HEADS_ONLY) - set(every) == set(SLOW)
    assert methods_named("joint") == list(JOINTS)
    assert methods_named("all-joint") == list(ALL_JOINTS)
    assert set(JOINTS) < set(ALL_JOINTS)
    with pytest.raises(gg.GnormError, match="can't be compared at once"):
        methods_named("paper,joint-refit")
    assert methods_named("ae,paper")[0] == "ae"
    assert len(methods_named("ae,paper")) == 5


def test_no_two_methods_look_alike():
    methods = [*methods_named("all"), *SLOW]
    for looks in (
        [(look["color"], look["linestyle"]) for look in paper_figures.styles(methods).values()],
        [(look["color"], look["dash"]) for look in charts.line_styles(methods).values()],
    ):
        assert len(set(looks)) == len(looks) == len(HEADS_ONLY)
        assert looks[0][1] in ("-", "solid"), "Greedy-Gnorm"


PAPERS_NUMBERS = {
    "bert": ([0.967, 0.957, 0.924, 0.904], 0.920),
    "albert": ([0.778, 0.484, 0.334, 0.339], 0.554),
    "roberta": ([0.756, 0.842, 0.808, 0.643], 0.778),
    "xlm-roberta": ([0.995, 0.989, 0.855, 0.790], 0.878),
}


@pytest.mark.parametrize("model", PAPERS_NUMBERS)
def test_the_measures_on_the_authors_curves(model):
    with shared(f"paper/results/{model}-greedygnorm.csv").open() as file:
        points = [(float(row["Pruned_Heads"]), float(row["Accuracy"])) for row in csv.DictReader(file)]
    shares, mean = PAPERS_NUMBERS[model]
    assert mean_over_curve(points) == pytest.approx(mean, abs=6e-4)
    assert [at_share(points, share) for share in (0.25, 0.5, 0.75, 0.81)] == pytest.approx(shares, abs=6e-4)


def made_up(qualities):
    """A walk with these accuracies: a head is a megabyte of twelve."""
    return [
        Step(place, (Unit(0, place),) if place else (), None, {"accuracy": quality}, Cost((12 - place) * 2**18), {})
        for place, quality in enumerate(qualities)
    ]


HEADER = {"quality": "accuracy", "data": {"evaluation": {"rows": 10}}}
MADE_UP = Comparison(
    HEADER,
    {"twice": [made_up([0.8, 0.8, 0.8, 0.2]), made_up([0.8, 0.8, 0.4, 0.2])], "once": [made_up([0.8, 0.7, 0.6, 0.2])]},
)


def rows(header, cells):
    return [dict(zip(header, row, strict=True)) for row in cells]


def test_the_table_of_solutions():
    twice, once = rows(*MADE_UP.solutions)
    assert twice == {
        "method": "twice", "runs": "2",
        "before": "80.00", "after": "80.00", "decrease %": "0.00", "MB before": "12.00", "MB after": "10.50",
        "reduction %": "12.50", "heads gone": "1.5", "parameters before": "3,145,728", "parameters after": "2,752,512",
    }  # fmt: skip
    assert once == {
        "method": "once", "runs": "1", "before": "80.00", "after": "60.00", "decrease %": "25.00",
        "MB before": "12.00", "MB after": "10.00", "reduction %": "16.67",
        "heads gone": "2.0", "parameters before": "3,145,728", "parameters after": "2,621,440",
    }  # fmt: skip
    header, cells = MADE_UP.solutions
    (first, _) = csv.DictReader(as_csv(header, cells).splitlines())
    assert first["parameters after"] == "2752512"
    assert len({line.count("|") for line in as_markdown(header, cells).splitlines()}) == 1


def test_what_starts_at_nothing_has_no_decrease():
    (row,) = rows(*Comparison(HEADER, {"a": [made_up([0.0, 0.0]), made_up([0.0, 0.0])]}).solutions)
    assert row["decrease %"] == "-"
    (row,) = rows(*Comparison(HEADER, {"a": [made_up([-0.5, -0.2, -1.0])]}).solutions)
    assert row["decrease %"] == "-60.00", "a quality below zero (r2) that has grown"


def test_runs_are_resampled_where_rows_are_not_known():
    """Without the rows that are right, intervals come from runs; a method with one run has none, nor any mark."""
    twice, once = rows(*MADE_UP.summary)
    assert (twice["mean"], once["mean"]) == ("0.633", "0.600")
    good, bad = MADE_UP.curves["twice"], [made_up([0.8, 0.3, 0.2, 0.2]), made_up([0.8, 0.3, 0.3, 0.2])]
    first, second = rows(*Comparison(HEADER, {"good": good, "bad": bad}).summary)
    assert (first["before"], second["before"]) == ("0.800", "0.800")
    assert (first["mean"], second["mean"]) == ("0.633 (0.567 to 0.700)*", "0.350 (0.333 to 0.367)")
    alike = rows(*Comparison(HEADER, {"a": good, "b": good}).summary)
    assert [row["mean"] for row in alike] == ["0.633 (0.567 to 0.700)="] * 2


def test_heads_before_a_drop():
    points = [(0, 0.9), (1, 0.9), (2, 0.895), (3, 0.88), (4, 0.9), (5, 0.5)]
    assert units_before_drop(points, 0.01, Measure("accuracy", largest=1.0)) == 2
    assert units_before_drop(points, 0.05, Measure("accuracy", largest=1.0)) == 4
    assert units_before_drop(points, 0.5, Measure("accuracy", largest=1.0)) == 5
    rising = [(0, 40.0), (1, 40.3), (2, 41.0)]
    assert units_before_drop(rising, 0.01, Measure("perplexity", higher_is_better=False)) == 1


def test_staleness_starts_at_one(tmp_path):
    comparison = compare(tmp_path / "c", methods="greedy-gnorm,ae", runs=1)
    taus = staleness(comparison.curves["greedy-gnorm"][0])
    assert taus[0] == (0, pytest.approx(1.0))
    assert all(-1 <= tau <= 1 for _, tau in taus)
    assert np.allclose([tau for _, tau in staleness(comparison.curves["ae"][0])], 1)


def test_scores_that_change_later_than_at_the_second_step_get_stale_too(tmp_path):
    comparison = compare(tmp_path / "c", methods="greedy-gnorm", runs=1, recompute=3)
    taus = [tau for _, tau in staleness(comparison.curves["greedy-gnorm"][0])]
    assert taus[:3] == pytest.approx([1, 1, 1])
    assert min(taus) < 1, "the scores do not change: the test would prove nothing"
    assert (tmp_path / "c" / "figures" / "staleness.png").exists()
    assert charts.drift(comparison.curves) is not None


def test_scores_that_never_change_have_no_picture_of_their_staleness(tmp_path):
    comparison = compare(tmp_path / "c", methods="ae,random", runs=1, trajectories=1)
    assert (tmp_path / "c" / "figures" / "curves.png").exists()
    assert not (tmp_path / "c" / "figures" / "staleness.png").exists()
    assert charts.drift(comparison.curves) is None
