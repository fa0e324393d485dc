"""Results in Python and in notebooks: what they print, draw and hand to pandas."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from journals import comparison, header, joint_comparison, joint_header, joint_walk, walk
from matplotlib.figure import Figure

from greedy_gnorm.comparison.analysis import read_comparison
from greedy_gnorm.pruning.choices import Choice
from greedy_gnorm.pruning.curves import knee_of
from greedy_gnorm.pruning.methods import HEADS_ONLY
from greedy_gnorm.pruning.run import Run
from greedy_gnorm.records.journal import Journal
from greedy_gnorm.report.picture import Figure as Picture
from greedy_gnorm.report.svg import BLUE, Line, line_chart
from greedy_gnorm.units import ATTENTION, FFN, Latency, Scores, SiteInfo, Unit, removed_by


class NoModel:
    """Stands for the models of a run, which may be large: showing a run must not look at them."""

    def __repr__(self):
        raise AssertionError("a model was printed")


def run_of(journal):
    """The journal's run as a Python object, its steps as they are read from the folder."""
    journal = Journal.read(journal.folder)
    result = journal.header["result"]
    return Run(
        journal.steps, journal.steps[result["solution"]], NoModel(), NoModel(), journal.header, NoModel(),
        [Latency.from_json(latency) for latency in result["latency"]], test=result.get("test"),
        offered=[Choice.from_json(choice) for choice in result.get("choices", [])],
    )  # fmt: skip


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """144 heads, all removed one by one."""
    return run_of(walk(tmp_path_factory.mktemp("runs") / "heads", header(12, 12), latency=True))


@pytest.fixture(scope="module")
def joint(tmp_path_factory):
    """144 heads and 9,216 neurons."""
    return run_of(joint_walk(tmp_path_factory.mktemp("runs") / "joint", joint_header(6, 12, 1536)))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    methods = {name: 1 if name != "random" else 2 for name in HEADS_ONLY}
    return read_comparison(comparison(tmp_path_factory.mktemp("runs") / "compared", methods))


@pytest.fixture(scope="module")
def jointly(tmp_path_factory):
    return read_comparison(joint_comparison(tmp_path_factory.mktemp("runs") / "jointly", {"joint-refit": 2}))


@pytest.fixture(params=["heads", "joint", "compared", "jointly", "scores", "joint scores"])
def result(request):
    name, *scores = request.param.split()[::-1]
    if name != "scores":
        return request.getfixturevalue(name)
    return request.getfixturevalue(scores[0] if scores else "heads").steps[1].scores


def test_results_print_a_few_lines(result):
    text = repr(result)
    assert 1 < len(text.splitlines()) <= 10
    assert len(text) <= 800


def test_steps_print_one_line(heads, joint):
    for step in (*heads.steps, *joint.steps):
        assert "\n" not in repr(step)
        assert len(repr(step)) < 250
    (unit,) = heads.steps[5].removed
    assert repr(heads.steps[5]).startswith("Step 5: accuracy ")
    assert f"removed L{unit.site}·H{unit.index};" in repr(heads.steps[5])
    assert re.search(r"removed \d+ heads, [\d,]+ neurons;", repr(joint.steps[1]))
    assert "stopped: --macs 0.5 is reached" in repr(joint.steps[-1])


def test_a_run_prints_its_outcome(heads, joint):
    text = repr(joint)
    assert text.startswith("Run of joint-refit on my-model\n")
    gone = [unit.site % 2 for unit in removed_by(joint.steps)]
    assert f"{gone.count(0)} of 72 heads, {gone.count(1):,} of 9,216 neurons" in text
    assert "accuracy 0.8037 -> 0.8001 (-0.0036) on 1,421 test rows, 95 % interval -0.0106 to +0.0035" in text
    assert f"accuracy 0.8000 -> {joint.solution.quality['accuracy']:.4f}" in text
    assert "50.0% of the multiplications" in text
    assert "speed     1.25 times as fast (measured, 8 x 128 tokens)" in text
    assert "test" not in repr(heads)


def test_scores_print_both_ends_by_name():
    sites = [SiteInfo("a", ATTENTION, 0, 2), SiteInfo("f", FFN, 0, 3)]
    scores = Scores([np.array([0.5, np.nan]), np.array([3.0, 1.0, 2.0])], sites=sites)
    assert repr(scores) == (
        "Scores of 1 head, 3 neurons in 1 layers\n"
        "  lowest   L0·H0 0.5, L0·N1 1, L0·N2 2, L0·N0 3\n"
        "  highest  L0·N0 3, L0·N2 2, L0·N1 1, L0·H0 0.5"
    )
    assert repr(scores.without(scores.units())) == "Scores of no units in 1 layers"


def test_a_comparison_prints_the_best_methods_first(compared, jointly):
    title, *lines, rest = repr(compared).splitlines()
    assert f"Comparison of {len(HEADS_ONLY)} methods on my-model: accuracy, mean over the curve" in title
    means = [float(line.split()[1]) for line in lines]
    assert means == sorted(means, reverse=True)
    assert rest == f"  and {len(HEADS_ONLY) - len(lines)} more"
    assert "at 50% of the multiplications" in repr(jointly)
    assert re.search(r"joint-refit +0\.\d{4}  \(2 runs\)", repr(jointly))


def test_showing_a_comparison_takes_no_bootstrap(compared, monkeypatch):
    """Which takes half a minute for the paper's methods and runs."""
    monkeypatch.setattr("greedy_gnorm.comparison.analysis.sampled_means", lambda *_: pytest.fail("drew samples"))
    assert ">greedy-gnorm</td>" in compared._repr_html_()
    assert repr(compared)


def test_drawings_are_small_and_well_formed(result):
    text = result._repr_html_()
    assert len(text) < 40_000
    tree = ElementTree.fromstring(text.replace("<br>", "<br/>"))
    assert "script" not in {node.tag for node in tree.iter()}
    assert not re.search(r"https?://|@import|<style|NaN|nan\b", text)


def test_the_drawing_of_a_run_has_its_curve_mask_and_choices(heads, joint):
    text = heads._repr_html_()
    (points,) = re.findall(r'<polyline points="([^"]*)"', text)
    assert len(points.split()) == len(heads.steps)
    cells = re.findall(r'<path d="((?:M\d+ \d+h13v13h-13z)+)" fill="(.*?)"', text)
    counts = {fill: shapes.count("M") for shapes, fill in cells}
    gone = len(heads.removed)
    assert counts == {"#2f86c8": 144 - gone, "currentColor": gone}
    text = joint._repr_html_()
    for choice in joint.choices():
        assert f">{choice.name}</td>" in text
    assert "run.at(" in text
    assert f"Neurons: {6 * 1536 - sum(unit.site % 2 for unit in joint.removed):,} of 9,216 kept" in text


def test_lines_have_the_style_of_figures():
    points = [(0.0, 1.0), (1.0, 0.5)]
    text = line_chart([Line("a", points, BLUE, "--"), Line("b", points, "#000000", (0, (8, 3)))], "Heads", "Accuracy")
    looks = re.findall(r'<polyline .*?stroke="(.*?)".*?stroke-dasharray="(.*?)"', text)
    assert looks == [(BLUE, "6 3"), ("currentColor", "8 3")], "black would not be seen on dark"


def test_names_are_escaped(tmp_path):
    run = run_of(walk(tmp_path / "run", header(model="<script>alert(1)</script>")))
    assert "<script>" not in run._repr_html_()


def test_a_flat_curve_is_drawn_flat(tmp_path):
    """Differences of a rounding must not fill the chart."""
    journal = joint_walk(tmp_path / "run", joint_header(), rounds=1)
    (points,) = re.findall(r'<polyline points="([^"]*)"', run_of(journal)._repr_html_())
    first, last = (float(point.split(",")[1]) for point in points.split())
    assert abs(last - first) < 40


def test_results_can_be_plotted(result):
    figure = result.plot()
    assert isinstance(figure, Figure)
    assert isinstance(figure, Picture)
    assert figure.axes


def test_the_plot_of_a_run_marks_the_solution(heads, joint):
    for run in (heads, joint):
        marked = run.plot().axes[0].lines[-1]
        assert marked.get_ydata() == [run.measure.of(run.solution)]


def test_a_notebook_shows_a_figure(heads):
    assert heads.steps[1].scores.plot()._repr_png_().startswith(b"\x89PNG")


def test_runs_as_tables(heads, joint):
    table = heads.to_pandas()
    assert list(table.columns) == [
        "step", "removed", "heads_removed", "accuracy", "macro_f1", "loss", "parameters", "bytes", "seconds",
    ]  # fmt: skip
    assert table["removed"].tolist() == list(range(145))
    assert table["accuracy"].tolist() == [step.quality["accuracy"] for step in heads.steps]
    assert table["seconds"].iloc[1] == pytest.approx(0.76)
    table = joint.to_pandas()
    last = table.iloc[-1]
    gone = [unit.site % 2 for unit in removed_by(joint.steps)]
    assert (last["heads_removed"], last["neurons_removed"], last["removed"]) == (
        gone.count(0), gone.count(1), len(gone),
    )  # fmt: skip
    assert table["multiplications"].tolist() == [step.cost.multiplications for step in joint.steps]


def test_comparisons_as_tables(compared):
    table = compared.to_pandas()
    assert list(table.columns[:4]) == ["method", "run", "step", "removed"]
    assert len(table) == sum(len(walk) for walks in compared.curves.values() for walk in walks)
    walked = table[(table["method"] == "random") & (table["run"] == 1)]
    assert walked["accuracy"].tolist() == [step.quality["accuracy"] for step in compared.curves["random"][1]]
    best = {method: knee_of(walks[0], compared.measure) for method, walks in compared.curves.items()}
    assert set(table["method"]) == set(best)


def test_scores_as_tables(joint):
    scores = joint.steps[2].scores
    table = scores.to_pandas()
    assert list(table.columns) == ["layer", "kind", "index", "score"]
    unit = Unit(3, 7)
    row = table.loc["L1·N7"]
    assert (row["layer"], row["kind"], row["index"]) == (1, "neuron", 7)
    assert row["score"] == scores.vectors[unit.site][unit.index] or np.isnan(row["score"])
    assert table["score"].notna().sum() == len(scores.units())
    parts = Scores([np.ones(2)], [np.zeros(2)], {"q": [np.array([4.0, 5.0])]}).to_pandas()
    assert list(parts.columns) == ["layer", "kind", "index", "score", "log_score", "q"]
    assert parts.loc["L0·H1", "q"] == 5
