"""The example notebook runs from its first cell to its last, on a smaller model than the demo's."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "compress.ipynb"
SMALLER = """
import warnings
from pathlib import Path

from greedy_gnorm import demo as module

warnings.simplefilter("ignore")
recipe = module.Recipe(per_language=20, pieces=1500, layers=2, heads=4, hidden=32, feed_forward=64, epochs=1)
complete = module.prepare
module.prepare = lambda: complete(Path("cache"), say=lambda line: None, recipe=recipe)
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook with its outputs; an error in a cell is raised."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SMALLER))
    folder = tmp_path_factory.mktemp("notebook")
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
    return notebook


def output(notebook, source):
    """What the cell that ends so has shown, by type."""
    (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.endswith(source))
    (shown,) = (each["data"] for each in cell.outputs if each.output_type == "execute_result")
    return shown


def test_the_notebook_shows_its_results(executed):
    shown = output(executed, "run")
    assert shown["text/plain"].startswith("Run of joint-refit on XLMRobertaForSequenceClassification\n")
    assert shown["text/html"].count("<svg") == 3, "the curve, heads and neurons"
    for plot in ("run.plot()", "scores.plot()"):
        assert "image/png" in output(executed, plot)
    assert "multiplications" in output(executed, "run.to_pandas()")["text/html"]


def test_the_notebook_loads_what_it_saved(executed):
    (classified,) = (cell for cell in executed.cells if cell.source.startswith("classify"))
    assert classified.outputs[-1]["data"]["text/plain"].count("'label'") == 3


def test_the_notebook_shows_progress(executed):
    (compressed,) = (cell for cell in executed.cells if cell.source.startswith("run = gg.compress("))
    assert "Compressing" in str(compressed.outputs)


def test_the_notebook_is_stored_without_outputs():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
