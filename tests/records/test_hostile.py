"""Malformed and hostile input to the command line: never a traceback, never a file outside the output folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from conftest import LABEL_NAMES, tiny_model, tiny_rows, tiny_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greedy_gnorm.cli.app import main

EXAMPLES = int(os.environ.get("GNORM_FUZZ", "25"))
FUZZ = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
TEXT = st.text(max_size=20)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(["text", "label", "sentence", "labels", "split", "text2", "x", ""])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "m"
    tiny_model("bert", num_hidden_layers=1, **LABEL_NAMES).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """A finished run to damage copies of."""
    folder = tmp_path_factory.mktemp("run")
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, tiny_rows(30))))
    out = folder / "run"
    call = ["prune", str(model), "--data", str(data), "--out", str(out), "--stop", "all", "--no-latency", "--quiet"]
    assert main(call) == 0
    return call, out


def run(arguments: list[str], folder: Path, out: Path, capsys) -> int:
    """Call the command line; nothing but `out` may appear in the folder, and a failure says why in a line."""
    before = set(folder.iterdir())
    code = main(arguments)
    err = capsys.readouterr().err
    assert code in (0, 2), err
    assert "Traceback" not in err
    assert code == 0 or "Error" in err
    assert {path for path in set(folder.iterdir()) - before if path != out} == set()
    if code != 0:
        assert not (out / "model").exists()
    return code


def prune(model, data, folder, capsys, *options) -> int:
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    call = ["prune", str(model), "--data", str(data), "--out", str(out), "--stop", "heads=1", "--no-latency", *options]
    return run([*call, "--quiet"], folder, out, capsys)


@FUZZ
@given(content=st.binary(max_size=300), ending=st.sampled_from(["csv", "tsv", "jsonl", "parquet", "txt", "json"]))
def test_bytes_as_data(content, ending, model, tmp_path, capsys):
    data = tmp_path / f"rows.{ending}"
    data.write_bytes(content)
    assert prune(model, data, tmp_path, capsys) == 2


@FUZZ
@given(rows=st.lists(st.dictionaries(NAMES, PLAIN, max_size=3), max_size=6))
def test_odd_columns_and_values(rows, model, tmp_path, capsys):
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    assert prune(model, data, tmp_path, capsys) in (0, 2)


@FUZZ
@given(texts=st.lists(TEXT, min_size=6, max_size=12, unique=True))
def test_odd_texts(texts, model, tmp_path, capsys):
    data = tmp_path / "rows.jsonl"
    labels = ["neg", "neutral", "pos"]
    data.write_text(
        "\n".join(json.dumps({"text": text, "label": labels[place % 3]}) for place, text in enumerate(texts))
    )
    assert prune(model, data, tmp_path, capsys) in (0, 2)


@FUZZ
@given(content=st.dictionaries(st.sampled_from(["stop", "samples", "seed", "dtype", "savings", "protect", "x"]), PLAIN))
def test_odd_settings(content, model, tmp_path, capsys):
    data, config = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    data.write_text("\n".join(map(json.dumps, tiny_rows(12))))
    config.write_text(yaml.safe_dump(content))
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    call = ["prune", str(model), "--data", str(data), "--out", str(out), "--config", str(config), "--no-latency"]
    assert run([*call, "--quiet"], tmp_path, out, capsys) in (0, 2)


def test_yaml_runs_nothing(model, tmp_path, capsys):
    config, ran = tmp_path / "run.yaml", tmp_path / "ran"
    config.write_text(f"stop: !!python/object/apply:os.system ['touch {ran}']\n")
    call = ["prune", str(model), "--data", "x.csv", "--out", str(tmp_path / "out"), "--config", str(config)]
    assert run(call, tmp_path, tmp_path / "out", capsys) == 2
    assert not ran.exists()


@FUZZ
@given(
    name=st.sampled_from(
        ["pruned_heads", "model_type", "hidden_size", "num_attention_heads", "id2label", "vocab_size"]
    ),
    value=PLAIN,
)
def test_odd_model_configurations(name, value, model, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: value}))
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, tiny_rows(12))))
    assert prune(folder, data, tmp_path, capsys) in (0, 2)


@pytest.mark.filterwarnings("ignore:.*torn")
@FUZZ
@given(file=st.sampled_from(["run.json", "journal.jsonl"]), cut=st.floats(0, 1), more=st.binary(max_size=20))
def test_damaged_journals(file, cut, more, finished, tmp_path, capsys):
    call, whole = finished
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(whole, out)
    shutil.rmtree(out / "model")
    content = (out / file).read_bytes()
    (out / file).write_bytes(content[: int(cut * len(content))] + more)
    place = call.index("--out") + 1
    arguments = [*call[:place], str(out), *call[place + 1 :], "--resume"]
    code = main(arguments)
    err = capsys.readouterr().err
    assert code in (0, 2), err
    assert "Traceback" not in err
    if code == 0:
        ours, theirs = ([json.loads(line)["removed"] for line in (each / "journal.jsonl").read_text().splitlines()]
                        for each in (out, whole))  # fmt: skip
        assert ours == theirs


@FUZZ
@given(
    file=st.sampled_from(["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]),
    cut=st.floats(0, 1),
    more=st.binary(max_size=30),
)
def test_damaged_checkpoints(file, cut, more, model, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder)
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: int(cut * len(content))] + more)
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, tiny_rows(12))))
    assert prune(folder, data, tmp_path, capsys) in (0, 2)


def replaced(content, place, value):
    """A copy of JSON content in which one value, chosen by a number, is another."""
    paths = list(_paths(content))
    path = paths[place % len(paths)]
    copied = json.loads(json.dumps(content))
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copied


def _paths(content, above=()):
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from _paths(value, (*above, key))


@pytest.mark.filterwarnings("ignore")
@FUZZ
@given(in_header=st.booleans(), place=st.integers(0, 10_000), value=PLAIN, line=st.integers(0, 100))
def test_a_strangers_run(in_header, place, value, line, finished, tmp_path, capsys):
    """A run folder with a value that is something else: shown, gone on with, or taken a model from, or refused."""
    call, whole = finished
    given = tmp_path / "given"
    shutil.rmtree(given, ignore_errors=True)
    shutil.copytree(whole, given)
    if in_header:
        header = json.loads((given / "run.json").read_text())
        (given / "run.json").write_text(json.dumps(replaced(header, place, value)))
    else:
        lines = [json.loads(each) for each in (given / "journal.jsonl").read_text().splitlines()]
        lines = [{name: value for name, value in each.items() if name != "seal"} for each in lines]
        lines[line % len(lines)] = replaced(lines[line % len(lines)], place, value)
        (given / "journal.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    for arguments in (
        ["report", str(given)],
        ["prune", "--from-run", str(given), "--at-step", "1", "--out", str(out), "--no-latency", "--quiet"],
        [*call[: call.index("--out") + 1], str(given), *call[call.index("--out") + 2 :], "--resume"],
    ):
        before = {path for path in tmp_path.rglob("*") if given not in path.parents and out not in path.parents}
        code = main(arguments)
        err = capsys.readouterr().err
        assert code in (0, 2), err
        assert "Traceback" not in err
        after = {path for path in tmp_path.rglob("*") if given not in path.parents and out not in path.parents}
        assert after - before <= {out}


@pytest.mark.parametrize("name", ["journal.jsonl", "run.json", "report.html", ".report.html.partial", ".lock", "model",
                                  ".model.partial", ".run.json.partial", "tables", "figures/curve.png"])  # fmt: skip
def test_a_strangers_link_is_not_written_through(name, finished, tmp_path, capsys):
    call, whole = finished
    given, elsewhere = tmp_path / "given", tmp_path / "elsewhere"
    shutil.copytree(whole, given)
    place = given / name
    if place.is_dir():
        shutil.rmtree(place)
        elsewhere.mkdir()
        (elsewhere / "precious").write_text("mine")
    else:
        elsewhere.write_bytes(place.read_bytes() if place.exists() else b"mine")
        place.unlink(missing_ok=True)
    place.symlink_to(elsewhere)
    before = {path: path.read_bytes() for path in (elsewhere, *elsewhere.rglob("*")) if path.is_file()}
    assert main([*call[: call.index("--out") + 1], str(given), *call[call.index("--out") + 2 :], "--resume"]) == 2
    assert f"{name} is a link to" in capsys.readouterr().err
    main(["report", str(given)])
    assert {path: path.read_bytes() for path in (elsewhere, *elsewhere.rglob("*")) if path.is_file()} == before


def test_a_models_own_code_runs_only_when_asked_for(model, tmp_path, capsys):
    folder, ran, data = tmp_path / "model", tmp_path / "ran", tmp_path / "rows.jsonl"
    shutil.copytree(model, folder)
    (folder / "evil.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import BertConfig as Config, BertForSequenceClassification as Model\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    data.write_text("\n".join(map(json.dumps, tiny_rows(12))))
    assert prune(folder, data, tmp_path, capsys) == 0
    assert not ran.exists()
    saved = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert saved["auto_map"] == {"AutoModelForSequenceClassification": f"modeling_pruned.{saved['architectures'][0]}"}
