"""A long score that is interrupted in the middle: what was computed is used again, and the result is the same."""

from __future__ import annotations

import json

import pytest
from conftest import LABEL_NAMES, tiny_model, tiny_rows, tiny_tokenizer

import greedy_gnorm as gg
from greedy_gnorm.records.kept import KEPT_FILE, KeptScoring

LONG = {"shapley": {"permutations": 3, "tolerance": -1.0}, "leave-one-out": None, "attribution": {"steps": 2}}


@pytest.fixture(scope="module")
def model():
    return tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES)


@pytest.fixture
def prune(model, tmp_path):
    def call(name, method, **more):
        return gg.prune(
            model, tiny_rows(), tokenizer=tiny_tokenizer(), method=method, score_options=LONG[method], samples=12,
            tokens_per_batch=64, stop="heads=1", latency=False, out=tmp_path / name, **more,
        )  # fmt: skip

    return call


def journal(folder):
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@pytest.mark.parametrize("method", LONG)
def test_an_interrupted_score_goes_on_where_it_was(prune, method, tmp_path, monkeypatch):
    prune("whole", method)
    kept, computed, append = tmp_path / "run" / KEPT_FILE, [], KeptScoring._append

    def interrupted(self, line):
        append(self, line)
        computed.append(line)
        if len(computed) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(KeptScoring, "_append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prune("run", method)
    assert len(kept.read_text().splitlines()) == 4
    assert len(journal(tmp_path / "run")) == 1, "no step but that of the unpruned model is recorded"
    with kept.open("a") as file:
        file.write('{"name": "torn')
    prune("run", method, resume=True)
    assert not kept.exists()
    assert journal(tmp_path / "run") == journal(tmp_path / "whole")
    names = [line["name"] for line in computed if "name" in line]
    assert len(set(names)) == len(names) > 3, "nothing is computed again"


def test_an_interrupted_score_outside_of_a_run(model, tmp_path, monkeypatch):
    append, computed = KeptScoring._append, []

    def score(**more):
        given = {"score": "leave-one-out", "samples": 12, "tokenizer": tiny_tokenizer(), "out": tmp_path / "scores"}
        return gg.score(model, tiny_rows(), **{**given, **more})

    def interrupted(self, line):
        append(self, line)
        computed.append(line.get("name"))
        if len(computed) == 4:
            raise KeyboardInterrupt

    whole = score(out=None)
    monkeypatch.setattr(KeptScoring, "_append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        score()
    assert (tmp_path / "scores" / KEPT_FILE).exists()
    assert score(resume=True).values.tolist() == whole.values.tolist()
    assert len(set(computed)) == len(computed) == 1 + 1 + 8
    assert not list((tmp_path / "scores").iterdir())


def test_results_of_another_model_are_not_used(tmp_path):
    kept = KeptScoring(tmp_path)
    kept.begin({})
    assert kept.result("a", lambda: 0.1 + 0.2) == 0.1 + 0.2
    again = KeptScoring(tmp_path)
    again.begin({})
    assert again.result("a", lambda: pytest.fail("it is known")) == 0.1 + 0.2
    again.begin({"removed": [[0, 1]]})
    assert again.result("a", lambda: 2.0) == 2.0


@pytest.mark.parametrize("content", ["[1\n", "{}\n3\n", '{"removed": []}\n{"name": 3, "result": 1}\n', '"\udcff"\n'])
def test_a_damaged_file_says_what_to_do(content, tmp_path):
    (tmp_path / KEPT_FILE).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(gg.RunFolderError, match="delete it; that step is scored again"):
        KeptScoring(tmp_path).begin({})
