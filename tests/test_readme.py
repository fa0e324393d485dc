"""The README's examples run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from conftest import LABEL_NAMES, tiny_model, tiny_rows, tiny_tokenizer

from greedy_gnorm.cli.app import main

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [
    line
    for language, code in BLOCKS
    if language == "sh"
    for line in code.replace("\\\n", " ").splitlines()
    if line.startswith("gnorm ")
]


@pytest.fixture
def workplace(tmp_path, monkeypatch, write_rows):
    """A folder with the model and the data that the README speaks of."""
    monkeypatch.chdir(tmp_path)
    tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES).save_pretrained("my-model")
    tiny_tokenizer().save_pretrained("my-model")
    write_rows(tiny_rows(120), "reviews.jsonl")
    (tmp_path / "reviews.csv").write_text(
        "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in tiny_rows(120)), encoding="utf-8"
    )
    return tmp_path


@pytest.mark.filterwarnings("ignore:The calibration rows have")
def test_the_python_examples(workplace):
    assert PYTHON
    names: dict[str, object] = {}
    for code in PYTHON:
        exec(compile(code, "README.md", "exec"), names)
    assert (workplace / "runs").exists()


@pytest.mark.filterwarnings("ignore:All runs score")
@pytest.mark.filterwarnings("ignore:The calibration rows have")
def test_the_commands(workplace, capsys):
    assert len(COMMANDS) >= 4
    for command in COMMANDS:
        arguments = shlex.split(command, comments=True)[1:]
        if arguments[0] == "demo":
            continue  # has tests of its own
        code, shown = main(arguments), capsys.readouterr()
        assert code == 0, f"{command}\n{shown.err}"
