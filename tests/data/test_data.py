"""Reading, dividing, sampling and batching rows."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections import Counter
from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import LABEL_NAMES, both_batches, shared, tiny_batch, tiny_model, tiny_rows, tiny_tokenizer
from datasets import arrow_dataset
from twins import predictions

import greedy_gnorm as gg
from greedy_gnorm.data import loading, sources
from greedy_gnorm.data.columns import cells
from greedy_gnorm.data.encoding import encode, fingerprint, tokenised
from greedy_gnorm.data.rows import Encoded, Row
from greedy_gnorm.data.splits import stratified
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import evaluate
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import task_of

MODEL = tiny_model("bert", **LABEL_NAMES)
TOKENIZER = tiny_tokenizer()


def scoring_batches(model, tokenizer, data, settings):
    return loading.scoring_batches(model, tokenizer, task_of(model), data, settings)


def both(data, eval_data=None, model=MODEL, **settings):
    return both_batches(model, TOKENIZER, data, eval_data, Settings(**settings))


def labels(batches):
    return Counter(int(label) for batch in batches for label in batch.labels)


def texts_of(batches):
    """Token rows as tuples, to tell rows apart."""
    rows = []
    for batch in batches:
        for ids, mask in zip(batch.inputs["input_ids"], batch.inputs["attention_mask"], strict=True):
            rows.append(tuple(ids[mask.bool()].tolist()))
    return rows


def write(path, rows):
    """Write rows in the form that the file's ending says."""
    table = datasets.Dataset.from_list(rows)
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        table.to_csv(path, sep="\t" if path.suffix == ".tsv" else ",", index=False)
    return path


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_every_kind_of_file_gives_the_same_rows(ending, tmp_path):
    rows = tiny_rows(30)
    expected = [batches.fingerprint for batches in both(rows)]
    assert [batches.fingerprint for batches in both(write(tmp_path / f"rows.{ending}", rows))] == expected
    assert [batches.fingerprint for batches in both(datasets.Dataset.from_list(rows))] == expected


def test_a_data_set_that_was_saved_to_disk(tmp_path):
    rows = tiny_rows(30)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert both(tmp_path / "saved")[0].fingerprint == both(rows)[0].fingerprint


def test_a_folder_of_split_files(tmp_path):
    for name, count in (("train", 30), ("dev", 12), ("test", 9)):
        write(tmp_path / f"{name}.csv", tiny_rows(count))
    with pytest.warns(UserWarning, match="9 of 12 scoring rows are also evaluation rows"):
        scoring, evaluation = both(tmp_path)
    assert (scoring.rows, evaluation.rows) == (12, 9)


@pytest.mark.parametrize(
    ("splits", "scoring", "evaluation"),
    [
        ({"train": 20, "val": 10, "test": 7}, 10, 7),
        ({"train": 20, "test": 7}, 20, 7),
        ({"train": 20, "validation": 10}, 20, 10),
        ({"validation": 10, "test": 7}, 10, 7),
        ({"test": 8}, 4, 4),
    ],
)
def test_a_split_column(splits, scoring, evaluation, write_rows):
    names = [name for name, count in splits.items() for _ in range(count)]
    rows = [{**row, "split": name} for row, name in zip(tiny_rows(len(names)), names, strict=True)]
    batches = both(write_rows(rows))
    assert [part.rows for part in batches] == [scoring, evaluation]
    assert not set(texts_of(batches[0])) & set(texts_of(batches[1])) or len(splits) > 1


def test_the_default_division_is_disjoint_seeded_and_stratified():
    rows = [
        {"text": f"{'good ' * (place // 3 + 1)}", "label": ("neg", "neutral", "pos")[place % 3]} for place in range(60)
    ]
    model = MODEL
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scoring, evaluation = both(rows, model=model, samples=6, seed=3)
    assert not set(texts_of(scoring)) & set(texts_of(evaluation))
    again, _ = both(rows, samples=6, seed=3)
    other, _ = both(rows, samples=6, seed=4)
    assert scoring.fingerprint == again.fingerprint != other.fingerprint
    assert scoring.rows == 6


def test_overlap_is_counted(data_file):
    with pytest.warns(UserWarning, match="60 of 60 scoring rows"):
        both(data_file, data_file)


def test_samples_are_stratified_and_exact():
    labels_given = ["a"] * 70 + ["b"] * 20 + ["c"] * 10
    chosen = Counter(labels_given[place] for place in stratified(labels_given, 10, seed=0))
    assert chosen == {"a": 7, "b": 2, "c": 1}
    assert len(stratified(labels_given, 7, seed=0)) == 7
    assert (
        stratified(labels_given, 10, seed=0)
        == stratified(labels_given, 10, seed=0)
        != stratified(labels_given, 10, seed=1)
    )
    scoring, evaluation = both(tiny_rows(60), samples=12, eval_samples=9)
    assert labels(scoring) == {0: 4, 1: 4, 2: 4}
    assert evaluation.rows == 9


def test_rows_of_like_length_share_a_batch_within_the_budget():
    batches = scoring_batches(MODEL, TOKENIZER, tiny_rows(60), Settings(tokens_per_batch=40))
    widths = [batch.inputs["input_ids"].shape for batch in batches]
    assert all(rows * width <= 40 for rows, width in widths)
    assert [width for _, width in widths] == sorted((width for _, width in widths), reverse=True)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(60))


def test_results_do_not_depend_on_the_batching():
    small = scoring_batches(MODEL, TOKENIZER, tiny_rows(40), Settings(tokens_per_batch=10))
    large = scoring_batches(MODEL, TOKENIZER, tiny_rows(40), Settings(tokens_per_batch=4000))
    (ours, our_labels), (theirs, their_labels) = (
        predictions(find_sites(MODEL, "heads"), small),
        predictions(find_sites(MODEL, "heads"), large),
    )
    assert torch.equal(our_labels, their_labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert small.fingerprint == large.fingerprint


@pytest.mark.parametrize("names", [("text", "text2"), ("premise", "hypothesis"), ("sentence1", "sentence2")])
def test_pairs_are_found_by_name(names):
    rows = [{names[0]: row["text"], names[1]: "it was fun", "label": row["label"]} for row in tiny_rows(12)]
    batches = scoring_batches(MODEL, TOKENIZER, rows, Settings())
    assert all((batch.inputs["token_type_ids"].max(1).values == 1).all() for batch in batches)
    alone = scoring_batches(MODEL, TOKENIZER, rows, Settings(text=names[0]))
    assert all((batch.inputs["token_type_ids"] == 0).all() for batch in alone)


def test_columns_can_be_named():
    rows = [{"words": row["text"], "kind": row["label"], "text": "wrong"} for row in tiny_rows(12)]
    scoring = scoring_batches(MODEL, TOKENIZER, rows, Settings(text="words", label="kind"))
    assert labels(scoring) == {0: 4, 1: 4, 2: 4}


@pytest.mark.parametrize(
    "written", [("neg", "neutral", "pos"), ("NEG", "Neutral", "POS"), (0, 1, 2), ("0", "1", "2"), (0.0, 1.0, 2.0)]
)
def test_labels_as_names_or_numbers(written):
    assert labels(scoring_batches(MODEL, TOKENIZER, tiny_rows(9, labels=written), Settings())) == {0: 3, 1: 3, 2: 3}


def test_class_labels_go_by_their_names_not_their_numbers():
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["pos", "neg", "neutral"])}
    )
    table = datasets.Dataset.from_dict({"text": ["good", "bad", "dull"], "label": [0, 0, 1]}, features=features)
    batches = scoring_batches(MODEL, TOKENIZER, table, Settings())
    assert labels(batches) == {2: 2, 0: 1}
    unnamed = scoring_batches(tiny_model("bert"), TOKENIZER, table, Settings())
    assert labels(unnamed) == {0: 2, 1: 1}


def test_an_unknown_label_lists_both_sides():
    with pytest.raises(gg.DataError, match=r"'bad'.*in the data: bad, good, so-so.*of the model: neg, neutral, pos"):
        both(tiny_rows(9, labels=("bad", "so-so", "good")))
    mapped = scoring_batches(
        MODEL,
        TOKENIZER,
        tiny_rows(9, labels=("bad", "so-so", "good")),
        Settings(label_map={"bad": "neg", "so-so": "neutral", "good": "pos"}),
    )
    assert labels(mapped) == {0: 3, 1: 3, 2: 3}
    with pytest.raises(gg.GnormError, match="label_map must be a dict"):
        both(tiny_rows(9), label_map="bad")


def test_long_texts_are_cut_counted_and_told(caplog):
    rows = [*tiny_rows(10), {"text": "good " * 300, "label": "pos"}]
    with caplog.at_level(logging.INFO, logger="greedy_gnorm"):
        batches = scoring_batches(MODEL, TOKENIZER, rows, Settings())
    assert batches.truncated == 1
    assert "1 of 11 scoring rows are longer than the model's 48 tokens and were truncated" in caplog.text
    assert max(batch.inputs["input_ids"].shape[1] for batch in batches) == 48


@pytest.mark.parametrize("family", ["roberta", "distilbert", "deberta-v2", "mpnet"])
def test_the_longest_input_runs_through_the_model(family):
    model = tiny_model(family, **LABEL_NAMES)
    batches = scoring_batches(model, TOKENIZER, [{"text": "good " * 300, "label": "pos"}, *tiny_rows(3)], Settings())
    assert evaluate(find_sites(model, "heads"), batches)["accuracy"] >= 0


def test_hub_names_are_taken_apart(monkeypatch):
    calls = []

    def load_dataset(name, config=None, split=None):
        calls.append((name, config, split))
        table = datasets.Dataset.from_list(tiny_rows(12))
        return table if split else datasets.DatasetDict(train=table, validation_matched=table)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert set(sources.read_splits("hub:a/b")) == {"train", "validation"}
    for name in ("hub:a/b:c", "hub:a/b:c:test", "hub:a/b:test", "hub:a/b::test"):
        sources.read_splits(name)
    assert calls == [
        ("a/b", None, None),
        ("a/b", "c", None),
        ("a/b", "c", "test"),
        ("a/b", None, "test"),
        ("a/b", None, "test"),
    ]


def test_hidden_test_labels_are_passed_over(caplog):
    table = datasets.Dataset.from_list([{**row, "label": place % 3} for place, row in enumerate(tiny_rows(12))])
    hidden = datasets.Dataset.from_list([{**row, "label": -1} for row in tiny_rows(6)])
    parts = datasets.DatasetDict(train=table.select(range(6)), validation=table.select(range(6, 12)), test=hidden)
    with caplog.at_level(logging.INFO, logger="greedy_gnorm"):
        _, evaluation = both(parts)
    assert "test split has no labels" in caplog.text
    assert evaluation.rows == 6


def test_regression():
    model = tiny_model("bert", num_labels=1)
    rows = [{"text": row["text"], "score": place / 10} for place, row in enumerate(tiny_rows(20))]
    _, evaluation = both(rows, model=model)
    quality = evaluate(find_sites(model, "heads"), evaluation)
    assert list(quality) == ["r2", "pearson", "spearman", "mean_absolute_error", "loss"]
    logits, truth = predictions(find_sites(model, "heads"), evaluation)
    assert quality["loss"] == pytest.approx(float((logits[:, 0].double() - truth).square().mean()), rel=1e-6)
    assert gg.score(model, rows, tokenizer=TOKENIZER, objective="loss").values.shape == (3, 4)
    with pytest.raises(gg.DataError, match="regression: labels must be numbers"):
        both(tiny_rows(9), model=model)


def test_several_labels_a_row():
    model = tiny_model("bert", problem_type="multi_label_classification", **LABEL_NAMES)
    rows = [
        {"text": row["text"], "labels": [["neg"], ["neg", "pos"], []][place % 3]}
        for place, row in enumerate(tiny_rows(20))
    ]
    _, evaluation = both(rows, model=model)
    assert list(evaluate(find_sites(model, "heads"), evaluation)) == ["micro_f1", "macro_f1", "accuracy", "loss"]
    hot = [
        {"text": row["text"], "labels": [[1, 0, 0], [1, 0, 1], [0, 0, 0]][place % 3]}
        for place, row in enumerate(tiny_rows(20))
    ]
    assert torch.equal(
        predictions(find_sites(model, "heads"), both(hot, model=model)[1])[1],
        predictions(find_sites(model, "heads"), evaluation)[1],
    )
    with pytest.raises(gg.DataError, match="several labels per row"):
        both(tiny_rows(9), model=model)


def test_another_problem_is_refused_by_name():
    model = tiny_model("bert")
    model.config.problem_type = "ranking"
    with pytest.raises(gg.UnsupportedModel, match="'ranking'"):
        both(tiny_rows(9), model=model)


def test_ready_batches():
    scoring, evaluation = both([tiny_batch(seed=1)], [tiny_batch(seed=2)])
    assert (scoring.rows, evaluation.rows) == (5, 5)
    assert scoring.fingerprint != evaluation.fingerprint
    with pytest.raises(gg.DataError, match="can't be split"):
        both([tiny_batch()])
    with pytest.raises(gg.DataError, match="input_ids of shape"):
        gg.score(MODEL, [{"input_ids": torch.zeros(3)}])


def nan_text(rows):
    rows[3]["text"] = None
    return rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", "", "is empty"),
        ("rows.csv", "text,label\n", "no rows"),
        ("rows.jsonl", "{broken", "Can't read"),
        ("rows.xml", "good", "not a supported kind"),
        ("rows.csv", "words,label\ngood,pos\n", "Which column is the text"),
        ("rows.csv", "text,kind\ngood,pos\nbad,neg\n", "Which column is the label"),
        ("rows.csv", "text,label\ngood,pos\n,neg\nbad,neg\n", "1 row has no text in 'text' .*row 1"),
        ("rows.jsonl", '{"text": "a", "label": "pos"}\n{"text": NaN, "label": "neg"}\n', "Can't read|no text"),
        ("rows.jsonl", '{"text": null, "label": "pos"}\n{"text": "b", "label": "neg"}\n', "no text in 'text'.*row 0"),
        ("rows.csv", "text,label\ngood,pos\nbad,\n", "1 row has no 'label'.*row 1"),
        ("rows.csv", "text,label\n1,pos\n2,neg\n", "holds int, not text"),
        ("rows.csv", "text,label\ngood,pos\nbad,pos\nfun,pos\ndull,pos\n", "same label"),
        ("rows.csv", "text,label\ngood,pos\n", "can't be split"),
        ("rows.csv", "text,label,split\ngood,pos,train\nbad,neg,fold1\n", "unknown values: fold1"),
    ],
)
def test_bad_files(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(gg.DataError, match=message):
        both(path)


def test_bad_places(tmp_path):
    with pytest.raises(gg.DataError, match="no file or folder"):
        both(tmp_path / "nothing.csv")
    with pytest.raises(gg.DataError, match="has no file of a supported kind"):
        both(tmp_path)
    with pytest.raises(gg.DataError, match="Can't read hub:no/such"):
        both("hub:no/such")
    with pytest.raises(gg.DataError, match="as hub:NAME"):
        both("hub:a:b:c:d")
    with pytest.raises(gg.DataError, match="not int"):
        both(3)
    for option in ("text", "text_pair", "label"):
        with pytest.raises(gg.DataError, match=r"no column 'x'.*Columns: text, label"):
            both(tiny_rows(9), **{option: "x"})


def test_words_that_look_like_missing_values_are_text(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,label\nNA,pos\nnull,neg\nnan,pos\nNone,neg\n")
    scoring, evaluation = both(path)
    assert scoring.rows + evaluation.rows == 4


def test_real_rows(minilm):
    from transformers import AutoTokenizer

    model = gg.load(minilm)
    scoring, evaluation = both_batches(
        model, AutoTokenizer.from_pretrained(minilm), shared("data/tweets.jsonl"), None, Settings()
    )
    assert (scoring.rows, evaluation.rows) == (374, 1421)


def test_labels_are_all_names_or_all_numbers_never_mixed():
    stars = {"id2label": {n: str(n + 1) for n in range(5)}, "label2id": {str(n + 1): n for n in range(5)}}
    model = tiny_model("bert", num_labels=5, **stars)
    for written, expected in (((0, 1, 2, 3, 4), [0, 1, 2, 3, 4]), ((1, 2, 3, 4, 5), [0, 1, 2, 3, 4])):
        batches = scoring_batches(model, TOKENIZER, tiny_rows(5, labels=written), Settings())
        rows = sorted((row, int(label)) for b in batches for row, label in zip(b.rows, b.labels, strict=True))
        assert [label for _, label in rows] == expected
    with pytest.raises(gg.DataError, match="does not know the label '0'"):
        both(tiny_rows(12, labels=(0, 5)), model=model)


def test_lists_of_class_labels_go_by_their_names():
    model = tiny_model("bert", problem_type="multi_label_classification", **LABEL_NAMES)
    names = datasets.Sequence(datasets.ClassLabel(names=["pos", "neg", "neutral"]))
    table = datasets.Dataset.from_dict(
        {"text": ["good", "bad"], "labels": [[0], [1, 2]]},
        features=datasets.Features({"text": datasets.Value("string"), "labels": names}),
    )
    _, truth = predictions(find_sites(model, "heads"), scoring_batches(model, TOKENIZER, table, Settings()))
    assert truth.tolist() == [[0, 0, 1], [1, 1, 0]]


@pytest.mark.parametrize("label", [["pos"], {"a": 1}])
def test_labels_that_are_no_names_or_numbers(label):
    rows = [{**row, "label": label} for row in tiny_rows(6)]
    with pytest.raises(gg.DataError, match="must be a name or a number"):
        both(rows)


def test_a_wrong_target_of_the_label_map_is_named():
    with pytest.raises(gg.DataError, match="does not know the label 'nope'"):
        both(tiny_rows(9), label_map={"pos": "nope"})


def test_a_test_split_without_labels_is_left_out_of_the_evaluation(tmp_path, caplog):
    write(tmp_path / "train.csv", tiny_rows(12))
    (tmp_path / "test.csv").write_text("text\ngood film\nbad film\n")
    with caplog.at_level(logging.INFO, logger="greedy_gnorm"):
        _, evaluation = both_batches(MODEL, TOKENIZER, tmp_path, None, Settings())
    assert "test split has no labels" in caplog.text
    assert evaluation.rows == 6


def test_scores_that_need_no_labels_take_rows_whose_labels_the_model_does_not_know():
    rows = tiny_rows(9, labels=("x", "y"))
    assert gg.score(MODEL, rows, tokenizer=TOKENIZER).values.shape == (3, 4)
    with pytest.raises(gg.DataError, match="does not know"):
        gg.score(MODEL, rows, tokenizer=TOKENIZER, objective="loss")


def test_ready_batches_that_overlap_or_have_one_class():
    with pytest.warns(UserWarning, match="5 of 5 scoring rows"):
        both([tiny_batch()], [tiny_batch()])
    with pytest.raises(gg.DataError, match="same label"):
        both([tiny_batch()], [{**tiny_batch(seed=4), "labels": torch.ones(5, dtype=torch.long)}])
    batch = tiny_batch(seed=4)
    batch.pop("labels")
    with pytest.raises(gg.DataError, match="requires labels"):
        both([tiny_batch()], [batch])


def test_a_tokenizer_that_is_not_the_models():
    model = tiny_model("bert", vocab_size=8, **LABEL_NAMES)
    with pytest.raises(gg.DataError, match="the model has 8 embeddings"):
        both(tiny_rows(9), model=model)


def test_pairs_for_a_model_with_one_kind_of_segment():
    model = tiny_model("roberta", type_vocab_size=1, **LABEL_NAMES)
    rows = [{**row, "text2": "it was fun"} for row in tiny_rows(9)]
    assert evaluate(find_sites(model, "heads"), scoring_batches(model, TOKENIZER, rows, Settings()))["accuracy"] >= 0


def test_a_change_of_tokens_changes_the_fingerprint():
    shorter = tiny_tokenizer()
    shorter.model_max_length = 5
    one, other = (scoring_batches(MODEL, tokenizer, tiny_rows(9), Settings()) for tokenizer in (TOKENIZER, shorter))
    assert one.fingerprint != other.fingerprint


def test_a_file_name_with_brackets(tmp_path):
    path = write(tmp_path / "rows[1].csv", tiny_rows(12))
    assert sum(batches.rows for batches in both(path)) == 12


def test_regression_wants_two_targets_and_one_output():
    with pytest.raises(gg.DataError, match="same label"):
        both([{"text": row["text"], "label": 0.5} for row in tiny_rows(9)], model=tiny_model("bert", num_labels=1))
    with pytest.raises(gg.UnsupportedModel, match="regression with 2 outputs"):
        both(tiny_rows(9), model=tiny_model("bert", num_labels=2, problem_type="regression"))


def test_columns_are_read_at_once_and_a_users_own_format_is_kept():
    rows = [{"text": f"text {row}", "label": row % 2} for row in range(20)]
    table = datasets.Dataset.from_list(rows).cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    chosen = table.select(range(1, 20, 2))
    assert cells(chosen, "text") == [row["text"] for row in rows[1::2]] == list(chosen["text"])
    assert cells(chosen, "label") == [1] * 10
    formatted = chosen.with_transform(lambda part: {"text": [text.upper() for text in part["text"]]})
    assert cells(formatted, "text") == [row["text"].upper() for row in rows[1::2]]
    assert all(torch.is_tensor(cell) for cell in cells(chosen.with_format("torch"), "label"))


def test_a_column_takes_few_looks_into_the_table(monkeypatch):
    """Row by row, there would be one for each cell."""
    table, looks = datasets.Dataset.from_list(tiny_rows(50)), []
    extract = arrow_dataset.format_table
    monkeypatch.setattr(arrow_dataset, "format_table", lambda *a, **k: looks.append(1) or extract(*a, **k))
    assert len(cells(table, "text")) == 50
    assert len(looks) == 1


@pytest.mark.parametrize("count", [0, 1, 30])
def test_the_fingerprint_is_that_of_all_rows_in_json(count):
    rows = [Row(row["text"], None, place) for place, row in enumerate(tiny_rows(30))][:count]
    items = tokenised(rows, TOKENIZER, 20)[0] if rows else []
    content = json.dumps([[list(row) for row in rows], [item.inputs for item in items]])
    assert fingerprint(rows, items) == hashlib.sha256(content.encode()).hexdigest()[:16]


def test_labels_are_looked_at_once_however_many_batches_there_are():
    looks = []

    class Watched(Encoded):
        @property
        def label(self):
            looks.append(self.row)
            return 0

    rows = [Row(row["text"], None, 0) for row in tiny_rows(40)]
    items = [Watched(*item) for item in tokenised(rows, TOKENIZER, 20)[0]]
    task = SimpleNamespace(encode=lambda *_: (items, 0), padding=lambda *_: {"input_ids": 0})
    assert len(encode(rows, MODEL, TOKENIZER, task, Settings(tokens_per_batch=40))) > 4
    assert len(looks) == 2 * len(rows)
