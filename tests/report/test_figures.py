"""The figures by what they plot: lines, cells, labels."""

from __future__ import annotations

import struct
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import tiny_model
from journals import RAGGED, comparison, header, walk
from matplotlib.colors import to_hex

from greedy_gnorm.cli.app import main
from greedy_gnorm.comparison.analysis import drifts, read_comparison, solution
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.pruning.curves import curve
from greedy_gnorm.pruning.methods import METHODS
from greedy_gnorm.pruning.run import sites_of
from greedy_gnorm.report import charts, comparison_figures, figures
from greedy_gnorm.report.looks import DARK, LIGHT, colour_of, looks
from greedy_gnorm.report.names import about
from greedy_gnorm.report.outcome import redraw_figures
from greedy_gnorm.tasks.task import measure_of
from greedy_gnorm.units import Scores, Unit, as_matrix, removed_by

pytestmark = pytest.mark.draws

PERPLEXITY = {"quality": "perplexity", "higher_is_better": False}
KINDS = [{}, {"layout": RAGGED, **PERPLEXITY}]
"""Layers of one size with accuracy; layers of 4 and 6 heads, two modules in one, with perplexity."""


def points(line):
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def cells(axes):
    """The values of the mesh of an axes, NaN where it has no cell."""
    (mesh,) = axes.collections
    values = np.ma.filled(mesh.get_array().astype(float), np.nan)
    rows, columns = (count - 1 for count in mesh.get_coordinates().shape[:2])
    return values.reshape(rows, columns)


def names(axis):
    return [tick.get_text() for tick in axis.get_ticklabels()]


@pytest.fixture
def compared(tmp_path):
    folder = comparison(tmp_path / "c", {"greedy-gnorm": 2, "ae": 2, "random": 6}, layout=RAGGED, **PERPLEXITY)
    return read_comparison(folder)


def size_of(path):
    """Width and height of a PNG file."""
    return struct.unpack(">II", path.read_bytes()[16:24])


def test_pictures_are_png_svg_and_pdf_and_say_what_they_are_about(tmp_path):
    journal = walk(tmp_path / "run", header(model="/models/tiny", source="/data/reviews.csv"))
    figure = figures.curve(journal.steps, 3, measure_of(journal.header))
    figures.save(figure, tmp_path / "curve", about(journal.header), dpi=100)
    assert size_of(tmp_path / "curve.png") == (700, 420)
    assert ElementTree.parse(tmp_path / "curve.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "curve.pdf").read_bytes().startswith(b"%PDF")
    assert figure.get_supxlabel() == "tiny on reviews, quality on 50 rows"


def test_figures_are_drawn_again_in_another_resolution(tmp_path, capsys):
    run = walk(tmp_path / "run", header()).folder
    assert main(["report", str(run), "--dpi", "50"]) == 0
    assert size_of(run / "figures" / "curve.png") == (350, 210)
    assert {path.name for path in (run / "figures").iterdir()} == {
        f"{name}.{suffix}" for name in ("curve", "mask", "scores") for suffix in ("png", "svg", "pdf")
    }
    assert "Figures" in capsys.readouterr().out
    folder = comparison(tmp_path / "c", {"greedy-gnorm": 1, "ae": 1})
    (folder / "figures").mkdir()
    (folder / "figures" / "gradient-change.png").touch()
    assert main(["report", str(folder), "--dpi", "20"]) == 0
    assert size_of(folder / "figures" / "curves.png") == (160, 96)
    assert (folder / "figures" / "gradient-change.png").exists(), "what needs the model is left"
    (run / "figures" / "mask.png").unlink()
    (run / "figures" / "mask.png").symlink_to(tmp_path / "elsewhere")
    assert main(["report", str(run), "--dpi", "20"]) == 2
    assert "is a link to" in capsys.readouterr().err
    unfinished = walk(tmp_path / "half", header(), steps=3).folder
    assert main(["report", str(unfinished), "--dpi", "20"]) == 2
    assert "is not finished, so it has no figures" in capsys.readouterr().err


def test_a_line_through_two_points_is_no_figure(tmp_path):
    journal = walk(tmp_path / "run", header(1, 1))
    redraw_figures(journal.folder, 20)
    assert {path.stem for path in (journal.folder / "figures").iterdir()} == {"mask", "scores"}


def test_a_method_has_one_colour_in_every_figure_and_chart(tmp_path):
    """Whichever methods are shown with it."""
    journal = walk(tmp_path / "run", header(method="ae"))
    colour = colour_of("ae")
    alone = figures.curve(journal.steps, 3, measure_of(journal.header), colour_of("ae")).axes[0].lines[1]
    assert to_hex(alone.get_color()) == colour
    for methods in ({"ae": 1, "random": 6}, {"greedy-gnorm": 1, "michel": 1, "ae": 1}):
        folder = comparison(tmp_path / str(len(methods)), methods)
        compared = read_comparison(folder)
        lines = {line.get_label(): line for line in comparison_figures.curves(compared).axes[0].lines}
        assert to_hex(lines["ae (1)"].get_color()) == colour
        (shown,) = [
            trace
            for trace in charts.against_heads(compared.curves, compared.measure)["data"]
            if trace.get("meta") == "ae"
        ]
        assert shown["line"]["color"] == colour
        if "random" in methods:
            against = comparison_figures.against_random(compared).axes[0]
            assert colour in {to_hex(line.get_color()) for line in against.lines}
    every = looks(list(METHODS))
    assert len({(look.colour, look.dash) for look in every.values()}) == len(every) == len(METHODS)
    labels = looks(["ae (runs/a)", "ae (runs/b)", "ae"])
    assert len({(look.colour, look.dash) for look in labels.values()}) == 3


@pytest.mark.parametrize("options", KINDS)
def test_the_curve(options, tmp_path):
    journal = walk(tmp_path / "run", header(**options))
    measure = measure_of(journal.header)
    (axes,) = figures.curve(journal.steps, 7, measure).axes
    level, line, mark = axes.lines
    expected = curve(journal.steps, measure)
    assert points(line) == expected
    assert points(mark) == [expected[7]]
    assert set(level.get_ydata()) == {expected[0][1]}
    assert axes.get_xlabel() == "Heads removed"
    assert axes.get_ylabel() == ("Perplexity (lower is better)" if options else "Accuracy")
    low, high = axes.get_ylim()
    assert low < min(y for _, y in expected)
    assert high > max(y for _, y in expected)
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == [f"unpruned ({expected[0][1]:.3f})", f"solution: 7 heads removed ({expected[7][1]:.3f})"]


def test_the_mask_has_a_cell_for_every_head():
    model = header(layout=RAGGED, removed=(Unit(0, 3),))["model"]
    (axes,) = figures.mask([Unit(1, 2), Unit(2, 5)], model).axes
    nan = np.nan
    expected = [[1, 1, 1, 0, nan, nan], [1, 1, 0, 1, nan, nan], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    assert np.array_equal(cells(axes), expected, equal_nan=True)
    assert names(axes.yaxis) == ["0", "1a", "1b", "2"]
    assert names(axes.xaxis) == ["0", "1", "2", "3", "4", "5"]
    assert axes.get_title() == "17 of 20 heads kept (dark)"
    (mesh,) = axes.collections
    assert [to_hex(mesh.to_rgba(value)) for value in (0, 1)] == [LIGHT, DARK]
    low, high = axes.get_ylim()
    assert low > high, "the first layer is on top"


def test_the_mask_repeats_heads_that_layers_share():
    (axes,) = figures.mask([Unit(0, 1)], header(1, 4, layers=3)["model"]).axes
    assert cells(axes).tolist() == [[1, 0, 1, 1]] * 3
    assert names(axes.yaxis) == ["0", "1", "2"]


def test_the_heat_map_shows_the_logarithms_of_a_product(tmp_path):
    journal = walk(tmp_path / "run", header(layout=RAGGED))
    scores = journal.steps[3].scores
    axes, bar = figures.heat_map(scores, "a title", sites_of(journal.header)).axes
    assert np.allclose(cells(axes), as_matrix(scores.logs) / np.log(10), equal_nan=True)
    assert np.isnan(cells(axes)).sum() == 4 + 2, "two layers of 4 beside those of 6, and the heads of two steps"
    assert (axes.get_title(), names(axes.yaxis)) == ("a title", ["0", "1a", "1b", "2"])
    assert bar.get_ylabel() == "log10 of the score"


def test_the_heat_map_of_a_plain_score():
    sites = find_sites(tiny_model("bert", num_hidden_layers=2), "heads").infos
    scores = Scores([np.array([1.0, -2.0, np.nan, np.inf]), np.array([0.5, 3.0, 0.0, 0.0])])
    axes, bar = figures.heat_map(scores, "x", sites).axes
    assert np.array_equal(cells(axes), [[1, -2, np.nan, np.nan], [0.5, 3, 0, 0]], equal_nan=True)
    assert axes.collections[0].get_clim() == (-2, 3)
    assert bar.get_ylabel() == "score"


def test_the_curves_of_a_comparison_are_means_in_bands(compared):
    (axes,) = comparison_figures.curves(compared).axes
    lines = {line.get_label(): points(line) for line in axes.lines}
    assert list(lines) == ["greedy-gnorm (2)", "ae (2)", "random (6)"]
    for band, (label, line) in zip(axes.collections, lines.items(), strict=True):
        walks = np.array([curve(each, compared.measure) for each in compared.curves[label.split()[0]]])
        assert np.allclose(line, walks.mean(0))
        corners = band.get_paths()[0].vertices
        assert corners[:, 1].max() == pytest.approx(walks[:, :, 1].max())
        assert corners[:, 1].min() == pytest.approx(walks[:, :, 1].min())
    assert axes.get_xlim() == (0, 20)
    assert axes.get_ylabel() == "Perplexity (lower is better)"


def test_greedy_gnorm_against_random_trajectories(compared):
    (axes,) = comparison_figures.against_random(compared).axes
    ours = np.mean([curve(each, compared.measure) for each in compared.curves["greedy-gnorm"]], axis=0)
    theirs = np.array([curve(each, compared.measure) for each in compared.curves["random"]])
    assert any(line.get_xdata().shape == (21,) and np.allclose(points(line), ours) for line in axes.lines)
    medians = {
        round(float(np.mean(line.get_xdata())), 6): line.get_ydata()[0]
        for line in axes.lines
        if to_hex(line.get_color()) == DARK
    }
    assert medians == pytest.approx(dict(zip(theirs[0, :, 0], np.median(theirs[:, :, 1], axis=0), strict=True)))
    level = next(line for line in axes.lines if line.get_linestyle() == "--")
    assert set(level.get_ydata()) == {theirs[0, 0, 1]}
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["greedy-gnorm", "random (6 trajectories)", "unpruned"]


def test_the_masks_are_those_at_the_knees(compared):
    panels = comparison_figures.masks(compared).axes
    assert len(panels) == 3
    for axes, (method, walks) in zip(panels, compared.curves.items(), strict=True):
        removed = removed_by(walks[0][: solution(walks[0], compared.measure).step + 1])
        assert np.array_equal(cells(axes), figures.mask_cells(compared.header["model"], removed), equal_nan=True)
        assert axes.get_title() == f"{method}: {len(removed)} removed"
        assert names(axes.yaxis) == ["0", "1a", "1b", "2"]


def test_tied_heads_are_framed_in_their_layers():
    model = header(layout=[(4,), (6,)])["model"]
    model["sites"][1]["applications"] = 3
    (axes,) = comparison_figures.tied_heads(model).axes
    expected = [[1, 1, 1, 1, np.nan, np.nan], *[[1, 1, 0, 1, 1, 1]] * 3]
    assert np.array_equal(cells(axes), expected, equal_nan=True)
    (frame,) = axes.patches
    assert (frame.get_xy(), frame.get_width(), frame.get_height()) == ((2, 1), 1, 3)
    assert axes.get_title() == "One mask entry is head 2 in 3 layers at once"


def test_the_drift_of_scores(compared):
    (axes,) = comparison_figures.drift(compared).axes
    lines = {line.get_label(): line for line in axes.lines}
    assert {"greedy-gnorm", "random"} <= set(lines)
    assert "ae" not in lines, "scored once"
    walks = drifts(compared.curves["greedy-gnorm"])
    shortest = min(map(len, walks))
    expected = np.mean([walk[:shortest] for walk in walks], axis=0)
    assert np.allclose(points(lines["greedy-gnorm"]), expected)
    assert axes.get_ylim() == (-1.05, 1.05)


def test_the_change_of_gradients_has_a_panel_for_each_layer():
    changes = [np.array([[0.5, -1.0]]), np.zeros((0, 2)), np.array([[0.0, 0.25], [0.0, 0.0]])]
    sites = sites_of(header(layout=[(2,), (2, 2)]))
    figure = comparison_figures.gradient_change_figure(changes, Unit(0, 1), sites)
    *panels, _ = figure.axes
    assert {(axes.get_xlabel(), axes.get_ylabel()) for axes in panels} == {("columns of Q", "rows of Q")}
    assert [axes.get_title() for axes in panels] == ["layer 0 (head removed here)", "layer 1a (no head)", "layer 1b"]
    assert cells(panels[0]).tolist() == [[0.5, -1.0]]
    assert not panels[1].collections
    assert cells(panels[2]).tolist() == [[0.0, 0.25], [0.0, 0.0]]
    assert {axes.collections[0].get_clim() for axes in (panels[0], panels[2])} == {(-1, 1)}
    assert "when L0·H1 is removed" in figure.get_suptitle()
