"""Following a run: lists of callbacks, and the progress bar."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from conftest import LABEL_NAMES, tiny_model, tiny_rows, tiny_tokenizer

import greedy_gnorm as gg
from greedy_gnorm.progress import followed, in_notebook
from greedy_gnorm.units import Cost, Step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:greedy_gnorm.*")


def prune(**options):
    model = tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES)
    options = {"samples": 9, "eval_samples": 15, "stop": "heads=2", **options}
    return gg.prune(model, tiny_rows(60), tokenizer=tiny_tokenizer(), **options)


def step(number, stop=None):
    return Step(number, (), None, {"accuracy": 0.5}, Cost(10, 40), {}, stop)


@pytest.fixture
def notebook(monkeypatch):
    """As inside the kernel of a notebook."""
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    return shell


def test_several_callbacks_see_every_step(capsys):
    first, second = [], []
    prune(on_step=[lambda *call: first.append(call), lambda *call: second.append(call)])
    assert [(each.step, gone, limit) for each, gone, limit in first] == [(0, 0, 2), (1, 1, 2), (2, 2, 2)]
    assert second == first
    assert capsys.readouterr().err == "", "no progress bar in a script"


def test_a_progress_bar_if_asked_for(capsys):
    prune(progress=True)
    text = capsys.readouterr().err
    assert "Pruning" in text
    assert "2/2" in text
    assert "accuracy=" in text


def test_a_progress_bar_in_notebooks(notebook, capsys):
    assert in_notebook()
    with followed(None, None, "Pruning") as report:
        report(step(0), 0, 4)
        report(step(1, stop="drop=0.01"), 1, 4)
        assert "measuring the result" in capsys.readouterr().err
    assert "1/1" in capsys.readouterr().err, "a run that stopped early is at its end"
    with followed(None, False, "Pruning") as report:
        assert report is None
    notebook.config.clear()
    assert not in_notebook(), "IPython in a terminal"


def test_a_bar_for_each_walk_of_a_comparison(capsys):
    with followed((), True, "Comparing") as report:
        report("ae-0", step(0), 0, 3)
        report("ae-0", step(1, stop="all"), 3, 3)
        report("random-0", step(0), 0, 3)
        text = capsys.readouterr().err
    assert "Comparing ae-0" in text
    assert "3/3" in text
    assert "Comparing random-0" in text
    assert "0/3" in text.rpartition("random-0")[2]


def test_the_bar_is_closed_when_a_callback_fails(capsys):
    def fail(*call):
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        prune(progress=True, on_step=fail)
    assert capsys.readouterr().err.endswith("\n")
