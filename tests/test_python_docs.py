"""The examples of docs/python.md and docs/tracking.md run as they stand there."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import LABEL_NAMES, tiny_model, tiny_rows, tiny_tokenizer

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with the model and the data that the pages speak of, and stand-ins for two trackers."""
    monkeypatch.chdir(tmp_path)
    tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES).save_pretrained("my-model")
    tiny_tokenizer().save_pretrained("my-model")
    rows = "".join(f"{row['text']},{row['label']}\n" for row in tiny_rows(120))
    (tmp_path / "reviews.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    logged = []

    def log(numbers, step=None):
        logged.append((step, numbers))

    ignore = SimpleNamespace(log_params=lambda given: None, log_artifacts=lambda folder: None)
    start = contextlib.nullcontext
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(start_run=start, log_metrics=log, **vars(ignore)))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda project: start(), log=log))
    return logged


def run_examples(page):
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(code, page, "exec"), names)


@pytest.mark.draws
@pytest.mark.filterwarnings("ignore::UserWarning:greedy_gnorm.*")
def test_the_page_about_python(workplace, capsys):
    run_examples("python.md")
    assert Path("curve.png").read_bytes().startswith(b"\x89PNG")
    assert Path("small-model", "config.json").exists()
    assert "Run of joint-refit on my-model" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::UserWarning:greedy_gnorm.*")
def test_the_page_about_trackers(workplace):
    run_examples("tracking.md")
    assert list(Path("logs", "small").glob("events.out.*"))
    assert [step for step, _ in workplace].count(None) == 2, "each tracker has the test of its run"
    assert {name for _, numbers in workplace for name in numbers} >= {"quality/accuracy", "test/accuracy"}
    lines = [json.loads(line) for line in Path("steps.jsonl").read_text().splitlines()]
    assert [line.get("units_removed") for line in lines] == [None, 1, 2]
