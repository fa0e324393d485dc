"""Comparisons in which every method recovers quality in the same way."""

from __future__ import annotations

import pytest
from comparison.test_compare import ROWS, compare, essence
from conftest import LABEL_NAMES, tiny_model, tiny_tokenizer

import greedy_gnorm as gg
from greedy_gnorm.data.encoding import encode
from greedy_gnorm.data.loading import both_rows
from greedy_gnorm.data.sets import calibration_batches
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.passes.calibration import Calibration
from greedy_gnorm.passes.evaluation import judge
from greedy_gnorm.recovery.least_squares import SOLVERS, Recovery
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import task_of
from greedy_gnorm.units import removed_by

FITTED = {"methods": "ae,random", "runs": 1, "trajectories": 1, "calibration_tokens": 400}


def model():
    return tiny_model("bert", **LABEL_NAMES, num_hidden_layers=2)


def fitted_quality(removed):
    """The quality of a model that these heads are removed from, fitted on the rows of the first run."""
    given, task = Settings(samples=9, eval_samples=21, calibration_tokens=400), task_of(model())
    pool, rows = both_rows(task, tiny_tokenizer(), ROWS, None, given, needs_labels=False, draws=1)
    calibration = Calibration(find_sites(model()), calibration_batches(pool, model(), tiny_tokenizer(), task, given))
    sites = find_sites(model(), "heads")
    remove(sites, removed)
    Recovery("least-squares", SOLVERS["least-squares"], calibration)(sites)
    return judge(sites, encode(rows, sites.model, tiny_tokenizer(), task, given, "evaluation"), "accuracy").quality


def test_every_method_is_fitted_after_each_step_and_scored_as_it_is(tmp_path):
    fitted = compare(tmp_path / "fitted", recover="least-squares", **FITTED)
    plain = compare(tmp_path / "plain", **FITTED)
    for method in ("ae", "random"):
        walk = fitted.curves[method][0]
        assert removed_by(walk) == removed_by(plain.curves[method][0]), "these scores do not depend on fitting"
        assert walk[3].quality == pytest.approx(fitted_quality(removed_by(walk[:4])), abs=1e-6)
        assert walk[3].quality["loss"] != pytest.approx(plain.curves[method][0][3].quality["loss"], abs=1e-3)


def test_it_is_resumed_and_not_mixed_with_another_way(tmp_path):
    whole = compare(tmp_path / "c", recover="least-squares", **FITTED)
    again = compare(tmp_path / "c", recover="least-squares", resume=True, **FITTED)
    assert essence(again) == essence(whole)
    with pytest.raises(gg.GnormError, match="recover"):
        compare(tmp_path / "c", resume=True, **FITTED)


def test_distillation_is_refused(tmp_path):
    with pytest.raises(gg.GnormError, match="a comparison measures every step"):
        compare(tmp_path / "c", recover="distill", **FITTED)
