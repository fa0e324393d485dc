"""A tag for every word: measures against seqeval, sub-words, files, bad input, and runs to the end."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
import torch
import transformers
from conftest import WORDS, tiny_config, tiny_model, tiny_tokenizer
from seqeval.metrics import classification_report, f1_score, precision_score, recall_score
from seqeval.scheme import IOB2
from tokenizers import Tokenizer, models, pre_tokenizers
from twins import unpadded

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.data.encoding import encode
from greedy_gnorm.data.loading import read_rows
from greedy_gnorm.data.rows import IGNORED, Row
from greedy_gnorm.data.sources import read_splits
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import evaluate, row_statistics
from greedy_gnorm.passes.gradients import gradient_norms
from greedy_gnorm.passes.predictions import compared_predictions
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.intervals import resamples
from greedy_gnorm.tasks.objectives import OBJECTIVES
from greedy_gnorm.tasks.task import Task, task_of
from greedy_gnorm.tasks.tokens import Entities, Tags, is_iob2

NAMES = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
TAGGER = {
    "num_labels": 5,
    "id2label": dict(enumerate(NAMES)),
    "label2id": {name: number for number, name in enumerate(NAMES)},
}


def tiny_tagger(family="bert", **changes):
    return tiny_model(family, auto_class="AutoModelForTokenClassification", **{**TAGGER, **changes})


def tagged_rows(count=60, names=NAMES):
    """Sentences of different lengths, no two alike, with random tags."""
    chance = np.random.default_rng(0)
    rows = []
    for place in range(count):
        words = [*chance.choice(WORDS, size=2 + place % 6).tolist(), str(place)]
        rows.append({"tokens": words, "ner_tags": chance.choice(names, size=len(words)).tolist()})
    return rows


def tagged_batch(rows=5, longest=9, labels=5, seed=0):
    chance = torch.Generator().manual_seed(seed)
    ids = torch.zeros(rows, longest, dtype=torch.long)
    for row in range(rows):
        ids[row, : longest - row] = torch.randint(3, 19, (longest - row,), generator=chance)
    tags = torch.randint(0, labels, ids.shape, generator=chance)
    tags[:, ::3] = IGNORED
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": tags.masked_fill(ids == 0, IGNORED)}


def statistics_of(task, gold, guesses):
    """A row for each pair of sequences of tags, by way of logits."""
    table = []
    for one, other in zip(gold, guesses, strict=True):
        logits = torch.nn.functional.one_hot(torch.tensor([other]), 5).double()
        (batch,) = ready_batches([{"input_ids": [[1] * len(one)], "labels": [one]}])
        table.append(task.row_statistics(logits, batch.labels, batch))
    return torch.cat(table).numpy()


@pytest.fixture(scope="module")
def sequences():
    """Random tags, so that many an inside has no beginning."""
    chance = np.random.default_rng(1)
    lengths = chance.integers(1, 12, size=40)
    return [[chance.integers(0, 5, size=length).tolist() for length in lengths] for _ in range(2)]


def test_measures_are_those_of_seqeval(sequences):
    task = Entities(tiny_config("bert", **TAGGER))
    statistics = statistics_of(task, *sequences)
    gold, guesses = ([[NAMES[tag] for tag in tags] for tags in side] for side in sequences)
    found = task.measures(statistics)
    for name, function in (("f1", f1_score), ("precision", precision_score), ("recall", recall_score)):
        assert found[name] == pytest.approx(function(gold, guesses, mode="strict", scheme=IOB2), abs=1e-12)
    assert found["accuracy"] == np.mean(
        [a == b for one, two in zip(gold, guesses, strict=True) for a, b in zip(one, two, strict=True)]
    )
    assert task.quality == "f1"
    report = classification_report(gold, guesses, mode="strict", scheme=IOB2, output_dict=True)
    per_class = compared_predictions(task, ready_batches([tagged_batch()]), [statistics, statistics])["per_class"]
    for row in per_class:
        theirs = report[row["class"]]
        assert row["rows"] == theirs["support"]
        assert row["after"] == pytest.approx(
            {"precision": theirs["precision"], "recall": theirs["recall"], "f1": theirs["f1-score"]}
        )


@pytest.mark.parametrize("kind", [Entities, Tags])
def test_measures_of_samples_are_those_of_each_sample(kind, sequences):
    task = kind(tiny_config("bert", **TAGGER))
    statistics, weights = statistics_of(task, *sequences), np.concatenate(list(resamples(40, 20)))
    many, single = task.resampled(statistics, weights), Task.resampled(task, statistics, weights)
    assert many.keys() == single.keys() == {each.name for each in task.metrics}
    for name, values in single.items():
        np.testing.assert_allclose(many[name], values, atol=1e-12, err_msg=name)


def test_which_tags_are_iob2():
    assert is_iob2(NAMES)
    assert is_iob2(["B", "I", "O"])
    assert is_iob2(["O", "B-PER"])
    assert not is_iob2(["O", "I-PER", "B-LOC"]), "IOB1, where most entities begin with an inside"
    assert not is_iob2(["O", "B-PER", "I-PER", "E-PER", "S-PER"])
    assert not is_iob2(["NOUN", "VERB"])
    assert not is_iob2(["LABEL_0", "LABEL_1"])
    assert not is_iob2(["O"])


def test_tags_that_stand_for_themselves():
    names = {"id2label": {0: "NOUN", 1: "VERB"}, "label2id": {"NOUN": 0, "VERB": 1}, "num_labels": 2}
    model = tiny_tagger(**names)
    task = task_of(model)
    assert (task.name, task.quality) == ("token_classification", "accuracy")
    batch = tagged_batch(labels=2)
    measured = evaluate(find_sites(model, "heads"), ready_batches([batch]))
    with torch.no_grad():
        guesses = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.argmax(-1)
    counted = batch["labels"] != IGNORED
    assert measured["accuracy"] == pytest.approx(float((guesses == batch["labels"])[counted].double().mean()))


def test_the_loss_is_that_of_transformers():
    model = tiny_tagger(dtype=torch.float64)
    (batch,) = ready_batches([tagged_batch()])
    task = task_of(model)
    losses = task.row_losses(task.outputs(model, batch), batch.labels)
    for row, loss in zip(unpadded_rows(tagged_batch()), losses.tolist(), strict=True):
        assert loss == pytest.approx(model(**row).loss.item(), rel=1e-12)


def unpadded_rows(batch):
    rows = unpadded(batch)
    return [{**row, "labels": row["labels"][:, : row["input_ids"].shape[1]]} for row in rows]


@pytest.mark.parametrize("objective", ["logit-norm", "loss"])
@pytest.mark.parametrize("family", ["bert", "roberta", "albert", "distilbert"])
def test_gradients_of_a_row_are_those_of_the_row_alone(family, objective):
    model = tiny_tagger(family, dtype=torch.float64)
    sites = find_sites(model, "heads")
    batches = [tagged_batch(), tagged_batch(rows=3, seed=2, longest=7)]
    norms = gradient_norms(sites, ready_batches(batches), OBJECTIVES[objective])
    rows = [row for batch in batches for row in unpadded_rows(batch)]
    slow = {name: [np.zeros(site.total) for site in sites] for name in "qkv"}
    for row in rows:
        model.zero_grad()
        output = model(**row)
        outputs = output.logits[row["labels"] != IGNORED]
        value = output.loss if objective == "loss" else outputs.norm() / len(outputs) ** 0.5
        value.backward()
        for site in sites:
            for name in "qkv":
                weight = site.inputs[site.parts[name]].weight.grad.view(site.total, site.sizes[name], -1)
                slow[name][site.index] += weight.flatten(1).norm(dim=1).numpy() / len(rows)
    for name in "qkv":
        for ours, theirs in zip(norms[name], slow[name], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9)


def pieces_tokenizer():
    """Words of three letters and more are two tokens: the first two letters, and the rest."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "go", "##od", "fi", "##lm", "a"]
    backend = Tokenizer(models.WordPiece({name: place for place, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = tiny_tokenizer().backend_tokenizer.post_processor
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def test_a_tag_is_at_the_first_sub_word():
    model = tiny_tagger()
    rows = [Row(("good", "a", "film"), None, (1, 0, 3)), Row(("a", "good"), None, (IGNORED, 2))]
    (batch,) = encode(rows, model, pieces_tokenizer(), task_of(model), Settings())
    assert batch.inputs["input_ids"].tolist() == [[2, 4, 5, 8, 6, 7, 3], [2, 8, 4, 5, 3, 0, 0]]
    none = IGNORED
    assert batch.labels.tolist() == [[none, 1, none, 0, 3, none, none], [none, none, 2, none, none, none, none]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0]]
    (unlabelled,) = encode(
        [row._replace(label=None) for row in rows], model, pieces_tokenizer(), task_of(model), Settings()
    )
    assert unlabelled.labels is None
    assert unlabelled.positions.tolist() == [[0, 1, 0, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0]]


def test_a_long_row_is_cut_and_only_what_is_left_counts(caplog):
    model, long = tiny_tagger(), ("good",) * 30
    with caplog.at_level("INFO", logger="greedy_gnorm"):
        (batch,) = encode([Row(long, None, (1,) * 30)], model, pieces_tokenizer(), task_of(model), Settings())
    assert "1 of 1 scoring rows are longer than the model's 48 tokens and were truncated" in caplog.text
    assert batch.inputs["input_ids"].shape == (1, 48)
    assert int(batch.positions.sum()) == int((batch.labels == 1).sum()) == 23


def test_words_keep_the_space_before_them_where_tokens_have_one():
    """As a byte-level tokenizer reads a text, whatever its setting for words."""
    model = tiny_tagger("roberta")
    names = ["<pad>", "<unk>", "a", "Ġa", "<s>", "</s>"]
    for prefix in (True, False):
        backend = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")
        (batch,) = encode([Row(("a", "a"), None, (1, 2))], model, tokenizer, task_of(model), Settings())
        assert batch.inputs["input_ids"].tolist() == [tokenizer("a a")["input_ids"]] == [[3 if prefix else 2, 3]]
        assert batch.labels.tolist() == [[1, 2]]


def read(data, settings=None, model=None, labelled=True):
    splits = read_splits(data)
    wanted = [(splits, split, labelled) for split in splits]
    return read_rows(wanted, task_of(model or tiny_tagger()), tiny_tokenizer(), settings or Settings())


def test_rows_as_people_have_them():
    words, tags = ["good", "film", "a"], ["B-PER", "I-PER", "O"]
    expected = [[Row(("good", "film", "a"), None, (1, 2, 0))]]
    assert read([{"tokens": words, "ner_tags": tags}]) == expected
    assert read([{"words": words, "labels": [1, 2, 0]}]) == expected
    assert read([{"text": " ".join(words), "tags": " ".join(tags)}]) == expected
    assert (
        read([{"tokens": words, "tags": ["per", "more", "O"]}], Settings(label_map={"per": "B-PER", "more": "I-PER"}))
        == expected
    )
    classes = datasets.ClassLabel(names=["B-PER", "I-PER", "O"])
    features = datasets.Features(
        {"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(classes)}
    )
    assert read(datasets.Dataset.from_dict({"tokens": [words], "ner_tags": [[0, 1, 2]]}, features=features)) == expected
    assert read([{"tokens": words, "ner_tags": [1, IGNORED, 0]}]) == [[Row(tuple(words), None, (1, IGNORED, 0))]]
    assert read([{"text": "good film"}], labelled=False) == [[Row(("good", "film"), None, None)]]


def test_conll_files(tmp_path):
    path = tmp_path / "rows.conll"
    path.write_text(
        "-DOCSTART- -X- O O\n\ngood NN I-NP B-PER\nfilm NN I-NP I-PER\n\n# id 3\tdomain=x\na\tDT\tO\tO\n\n\n",
        encoding="utf-8",
    )
    rows = [Row(("good", "film"), None, (1, 2)), Row(("a",), None, (0,))]
    assert read(path) == [rows]
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("train.iob", "test.bio"):
        (folder / name).write_text("good B-PER\nfilm I-PER\n\na O\n", encoding="utf-8")
    assert read(folder) == [rows, rows]
    path.write_text("good\nfilm\n\na\n", encoding="utf-8")
    assert read(path, labelled=False) == [[row._replace(label=None) for row in rows]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a"], "ner_tags": ["B-ORG"]}, "does not know the label 'B-ORG'.*--label-map B-ORG="),
        ({"tokens": ["a"], "ner_tags": [7]}, "does not know the label '7'"),
        ({"tokens": ["a"], "ner_tags": 1}, "must hold a list in each row"),
        ({"tokens": [], "ner_tags": []}, "1 row has no words in 'tokens'"),
        ({"tokens": [1, 2], "ner_tags": [0, 0]}, "holds no list of words"),
        ({"tokens": ["a"]}, "Which column is the label"),
        ({"words of it": ["a"], "tags": ["O"]}, "Which column is the text"),
    ],
)
def test_bad_rows(row, message):
    with pytest.raises(gg.DataError, match=message):
        read([row])


def test_bad_files(tmp_path):
    path = tmp_path / "rows.conll"
    for text, message in (("good B-PER\nfilm\n", "a tag in line 1, but none in line 2"), ("\n\n", "no sentences")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(gg.DataError, match=message):
            read(path)
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(gg.DataError, match="Can't read"):
        read(path)


def test_bad_rows_that_only_words_show():
    model = tiny_tagger()
    with pytest.raises(gg.DataError, match="2 words and 1 tags: 'good film'"):
        encode([Row(("good", "film"), None, (1,))], model, tiny_tokenizer(), task_of(model), Settings())
    with pytest.raises(gg.DataError, match="only by a fast tokenizer"):
        encode(
            [Row(("good",), None, (1,))],
            model,
            transformers.ByT5Tokenizer(model_max_length=9),
            task_of(model),
            Settings(),
        )
    with pytest.raises(gg.DataError, match="has an entity, so quality can't be measured"):
        task_of(model).check_labels([(0, IGNORED), (2, 4)])
    with pytest.raises(gg.DataError, match="leave out --text-pair"):
        read([{"tokens": ["a"], "tags": ["O"], "more": ["a"]}], Settings(text="tokens", text_pair="more"))


def test_objectives_of_one_class_are_refused():
    with pytest.raises(gg.UnsupportedModel, match="one correct class per row, but the task is entity_recognition"):
        gg.score(tiny_tagger(), [tagged_batch()], objective="margin")


def test_doubts():
    task = Entities(tiny_config("bert", **TAGGER))
    assert task.doubts([[0, 1, 3, IGNORED]], {"f1": 0.5}) == []
    missing, nothing = task.doubts([[0, 1], [2, 4]], {"f1": 0.0})
    assert "No evaluation row has an entity of the type LOC" in missing
    assert "finds no entity" in nothing


def test_a_run_of_a_tagger_and_what_it_writes(tmp_path):
    data, folder = tagged_rows(130), tmp_path / "run"
    run = gg.compress(
        tiny_tagger(), data, tokenizer=tiny_tokenizer(), macs=0.6, rounds=2, calibration_tokens=256, out=folder,
        measure_speed=False,
    )  # fmt: skip
    assert run.measure.name == "f1"
    assert set(run.steps[0].quality) == {"f1", "precision", "recall", "accuracy", "loss"}
    assert [row["class"] for row in run.predictions["per_class"]] == ["PER", "LOC"]
    assert "entities" in (folder / "report.html").read_text(encoding="utf-8")
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder / "model", trust_remote_code=True)
    tagger = transformers.pipeline(
        "token-classification", model=model, tokenizer=transformers.AutoTokenizer.from_pretrained(folder / "model")
    )
    assert {entity["entity"] for entity in tagger("good film a bad book")} <= set(NAMES)
    batch = tagged_batch()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, run.model(**inputs).logits)
    card = (folder / "model" / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: token-classification" in card
    assert "AutoModelForTokenClassification" in card
    done = gg.evaluate(run, data, out=tmp_path / "eval")
    assert done.leading == "f1"
    assert 0 <= done.agreement <= 1
    assert done.quality["agreement"][0] == 1
    assert "entities" in (tmp_path / "eval" / "eval.md").read_text(encoding="utf-8")


def test_own_labels_and_ready_batches():
    rows = [{"text": " ".join(row["tokens"])} for row in tagged_rows()]
    run = gg.prune(tiny_tagger(), rows, tokenizer=tiny_tokenizer(), labels="own", stop="heads=1")
    assert run.measure.name == "agreement"
    assert run.steps[0].quality == {"agreement": 1.0}
    ready = gg.prune(tiny_tagger(), [tagged_batch(rows=8)], eval_data=[tagged_batch(rows=8, seed=5)], stop="heads=1")
    assert ready.steps[0].quality["accuracy"] < 1
    assert gg.score(tiny_tagger(), [tagged_batch()], score="fisher").values.shape == (3, 4)


def test_padding_and_other_sub_words_change_nothing():
    """The statistics of a row are the same alone and beside longer rows."""
    model = tiny_tagger(dtype=torch.float64)
    sites, batch = find_sites(model, "heads"), tagged_batch()
    together = row_statistics(sites, ready_batches([batch]))
    alone = torch.cat([row_statistics(sites, ready_batches([row])) for row in unpadded_rows(batch)])
    torch.testing.assert_close(together, alone)
