"""Logging the steps of a run to trackers: TensorBoard for real, the others with a stand-in for the package."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import LABEL_NAMES, tiny_model, tiny_rows, tiny_tokenizer

import greedy_gnorm as gg
from greedy_gnorm import trackers
from greedy_gnorm.units import Cost, Scores, Step, Unit

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:greedy_gnorm.*")
STEP = Step(
    3, (Unit(0, 1),), Scores([np.array([1.0, 2.0, np.nan])]), {"accuracy": 0.5}, Cost(10, 40, 7), {"score": 1.5}
)
NUMBERS = {
    "quality/accuracy": 0.5, "cost/parameters": 10, "cost/bytes": 40, "cost/multiplications": 7, "units_removed": 2,
    "seconds": 1.5,
}  # fmt: skip


def test_what_is_logged_of_a_step():
    assert trackers.numbers_of(STEP) == NUMBERS


def test_tensorboard_has_every_step_of_a_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES)
    run = gg.prune(
        model, tiny_rows(60), tokenizer=tiny_tokenizer(), samples=9, eval_samples=15, stop="heads=3",
        on_step=[trackers.tensorboard(tmp_path)],
    )  # fmt: skip
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for name in ("accuracy", "loss"):
        logged = [(event.step, event.value) for event in events.Scalars(f"quality/{name}")]
        assert logged == [(step.step, pytest.approx(step.quality[name])) for step in run.steps]
    assert [event.value for event in events.Scalars("cost/parameters")] == [step.parameters for step in run.steps]
    assert [(event.step, event.value) for event in events.Scalars("units_removed")] == [(1, 1), (2, 2), (3, 3)]


def test_a_run_that_is_resumed_counts_the_units_that_went_before(tmp_path):
    logged = []

    def log(step, done, limit):
        logged.append((step.step, trackers.numbers_of(step).get("units_removed")))
        if len(logged) == 2:
            raise KeyboardInterrupt

    options = {"samples": 9, "eval_samples": 15, "stop": "heads=3", "out": tmp_path / "run", "latency": False}
    model = tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES)
    with pytest.raises(KeyboardInterrupt):
        gg.prune(model, tiny_rows(60), tokenizer=tiny_tokenizer(), on_step=log, **options)
    run = gg.prune(model, tiny_rows(60), tokenizer=tiny_tokenizer(), on_step=log, resume=True, **options)
    assert logged == [(0, None), (1, 1), (2, 2), (3, 3)]
    assert {step.scores.sites[1].name for step in run.steps[1:]} == {run.header["model"]["sites"][1]["name"]}


@pytest.mark.parametrize(("name", "function"), [("mlflow", "log_metrics"), ("wandb", "log")])
def test_other_trackers_are_called(name, function, monkeypatch):
    calls = []
    package = SimpleNamespace(**{function: lambda numbers, step: calls.append((numbers, step))})
    monkeypatch.setitem(sys.modules, name, package)
    on_step = getattr(trackers, name)()
    on_step(STEP, 1, 5)
    on_step("ae-0", STEP, 1, 5)
    assert calls == [(NUMBERS, 3), ({f"ae-0/{key}": value for key, value in NUMBERS.items()}, 3)]


@pytest.mark.parametrize(("name", "options"), [("tensorboard", ["logs"]), ("mlflow", []), ("wandb", [])])
def test_a_missing_package_is_named(name, options, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(gg.GnormError, match=f"requires the package {name}: pip install {name}"):
        getattr(trackers, name)(*options)
