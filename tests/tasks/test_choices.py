"""One of several choices for each row: how they are read, per-row gradients, and runs to the end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from conftest import WORDS, tiny_model, tiny_tokenizer

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.data.encoding import encode
from greedy_gnorm.data.loading import read_rows
from greedy_gnorm.data.rows import Row
from greedy_gnorm.data.sources import read_splits
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.calibration import Calibration
from greedy_gnorm.passes.evaluation import row_statistics
from greedy_gnorm.passes.gradients import gate_gradients, gradient_norms, row_norms
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.choices import MultipleChoice
from greedy_gnorm.tasks.intervals import resamples
from greedy_gnorm.tasks.objectives import OBJECTIVES
from greedy_gnorm.tasks.task import Task, task_of


def tiny_chooser(family="bert", **changes):
    return tiny_model(family, auto_class="AutoModelForMultipleChoice", **changes)


def choice_rows(count=60):
    """Prompts, no two alike, with two or three choices."""
    chance = np.random.default_rng(0)
    return [
        {
            "prompt": f"{' '.join(chance.choice(WORDS, size=2 + place % 3))} {place}",
            "choices": [" ".join(chance.choice(WORDS, size=1 + (place + each) % 4)) for each in range(2 + place % 2)],
            "label": int(chance.integers(2)),
        }
        for place in range(count)
    ]


def choice_batch(rows=4, choices=3, longest=9, seed=0):
    """Padded choices of unequal length."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.zeros(rows, choices, longest, dtype=torch.long)
    for place, row in enumerate(ids.view(-1, longest)):
        length = longest - place % 5
        row[:length] = torch.randint(3, 19, (length,), generator=chance)
    labels = torch.randint(0, choices, (rows,), generator=chance)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def row_logits(model, batch, row):
    """The logits of a row, (1, choices), from each of its choices alone and without padding."""
    found = []
    for ids, mask in zip(batch["input_ids"][row], batch["attention_mask"][row].bool(), strict=True):
        found.append(model(input_ids=ids[mask][None, None]).logits)
    return torch.cat(found, dim=1)


def row_value(logits, label, objective):
    loss = torch.nn.functional.cross_entropy(logits, label[None])
    return loss if objective == "loss" else logits.norm()


@pytest.mark.parametrize("objective", ["logit-norm", "loss"])
@pytest.mark.parametrize("family", ["bert", "roberta", "albert", "distilbert"])
def test_gradients_of_a_row_are_those_of_its_choices_together(family, objective):
    model = tiny_chooser(family, dtype=torch.float64)
    sites = find_sites(model, "heads")
    batches = [choice_batch(), choice_batch(rows=3, choices=2, longest=6, seed=2)]
    norms = gradient_norms(sites, ready_batches(batches), OBJECTIVES[objective])
    slow = {name: [np.zeros(site.total) for site in sites] for name in "qkv"}
    for batch in batches:
        for row in range(len(batch["labels"])):
            model.zero_grad()
            row_value(row_logits(model, batch, row), batch["labels"][row], objective).backward()
            for site in sites:
                for name in "qkv":
                    weight = site.inputs[site.parts[name]].weight.grad.view(site.total, site.sizes[name], -1)
                    slow[name][site.index] += weight.flatten(1).norm(dim=1).numpy() / 7
    for name in "qkv":
        for ours, theirs in zip(norms[name], slow[name], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9)


def test_neurons_and_gates_of_a_row():
    """A unit's gates and weights, against each row alone."""
    model = tiny_chooser(dtype=torch.float64)
    sites, batch = find_sites(model, "both"), choice_batch()
    rows = [{name: tensor[row : row + 1] for name, tensor in batch.items()} for row in range(4)]
    for compute in (gate_gradients, lambda *given: [norms[0] for norms in row_norms(*given)]):
        together = compute(sites, next(iter(ready_batches([batch]))), OBJECTIVES["loss"])
        alone = [compute(sites, next(iter(ready_batches([row]))), OBJECTIVES["loss"]) for row in rows]
        for site, found in enumerate(together):
            torch.testing.assert_close(found, torch.cat([each[site] for each in alone]), rtol=1e-9, atol=1e-12)
    neurons = [site for site in sites if site.kind == "ffn"]
    norms = row_norms(sites, next(iter(ready_batches([batch]))), OBJECTIVES["loss"])
    model.zero_grad()
    row_value(row_logits(model, batch, 0), batch["labels"][0], "loss").backward()
    for site in neurons:
        (path,) = site.inputs
        expected = site.inputs[path].weight.grad.norm(dim=1)
        torch.testing.assert_close(norms[site.index][0, 0], expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("score", ["entropy", "confidence", "tis", "attribution", "michel", "leave-one-out"])
def test_scores_do_not_depend_on_the_batch(score):
    model, batch = tiny_chooser(dtype=torch.float64), choice_batch()
    rows = [{name: tensor[row : row + 1] for name, tensor in batch.items()} for row in range(4)]
    options = {"steps": 2} if score == "attribution" else None
    together, alone = (
        gg.score(model, each, score=score, score_options=options, dtype="float64").values for each in ([batch], rows)
    )
    np.testing.assert_allclose(together, alone, rtol=1e-6)


def test_weights_of_tokens_are_those_of_a_row():
    model, batch = tiny_chooser(), choice_batch()
    calibration = Calibration(find_sites(model), ready_batches([batch]))
    real = batch["attention_mask"]
    for site in calibration.original:
        target = calibration.target(site, 0)
        assert len(target.weights) == int(real.sum())
        of_rows = target.weights.split(real.sum((1, 2)).tolist())
        for own in of_rows:
            assert float(own.mean()) == pytest.approx(1, rel=1e-5)


def test_loss_and_measures():
    model, batch = tiny_chooser(dtype=torch.float64), choice_batch()
    task = task_of(model)
    assert (task.name, task.quality) == ("multiple_choice", "accuracy")
    statistics = row_statistics(find_sites(model, "heads"), ready_batches([batch])).numpy()
    found = task.measures(statistics)
    with torch.no_grad():
        output = model(**batch)
    assert found["loss"] == pytest.approx(output.loss.item(), rel=1e-12)
    assert found["accuracy"] == float((output.logits.argmax(-1) == batch["labels"]).double().mean())
    weights = np.concatenate(list(resamples(4, 30)))
    many, single = task.resampled(statistics, weights), Task.resampled(task, statistics, weights)
    assert many.keys() == single.keys() == {"accuracy", "loss"}
    for name, values in single.items():
        np.testing.assert_allclose(many[name], values, atol=1e-12)


def test_rows_of_a_batch_have_as_many_choices():
    model = tiny_chooser()
    rows = [Row("good", ("a", "film", "bad book"), 2), Row("bad", ("a", "the"), 0), Row("fun", ("a", "b", "c"), 1)]
    batches = encode(rows, model, tiny_tokenizer(), task_of(model), Settings())
    assert [tuple(batch.inputs["input_ids"].shape) for batch in batches] == [(2, 3, 6), (1, 2, 5)]
    assert [batch.rows for batch in batches] == [(0, 2), (1,)]
    assert sorted(batches.lengths()) == [5, 5, 5, 5, 5, 5, 5, 6]
    first = batches.items[0]
    assert first.real_tokens().shape == (6, 6)
    assert first.inputs["token_type_ids"].tolist()[0][2] == [0, 0, 0, 1, 1, 1]


def read(rows, settings=None):
    splits = read_splits(rows)
    wanted = [(splits, split, True) for split in splits]
    (found,) = read_rows(wanted, MultipleChoice(tiny_chooser().config), None, settings or Settings())
    return found


def test_rows_as_people_have_them():
    expected = [Row("good", ("film", "book"), 1), Row("bad", ("plot", "end"), 0)]
    choices = [["film", "book"], ["plot", "end"]]

    def table(**columns):
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    prompts = ["good", "bad"]
    assert read(table(prompt=prompts, choices=choices, label=[1, 0])) == expected
    assert read(table(question=prompts, options=choices, answer=["B", "A"])) == expected
    arc = [{"text": texts, "label": ["A", "B"]} for texts in choices]
    assert read(table(question=prompts, choices=arc, answerKey=["B", "1"])) == expected, "1 is the first, as A is"
    named = [[{"text": text, "label": letter} for text, letter in zip(row, "AB", strict=True)] for row in choices]
    assert read(table(question=prompts, choices=named, answerKey=["B", "A"])) == expected
    two = {"ending0": ["film", "plot"], "ending1": ["book", "end"]}
    assert read(table(ctx=prompts, **two, label=["1", "0"])) == expected
    winogrande = {"option1": ["film", "plot"], "option2": ["book", "end"]}
    assert read(table(sentence=prompts, **winogrande, answer=["2", "1"])) == expected
    assert (
        read(
            table(prompt=prompts, choices=choices, label=["right", "left"]),
            Settings(label_map={"right": "1", "left": "A"}),
        )
        == expected
    )
    assert (
        read(table(mine=prompts, theirs=choices, label=[1, 0]), Settings(text="mine", text_pair="theirs")) == expected
    )
    swag = read(table(sent1=prompts, sent2=["the", "a"], **two, label=[1, 0]))
    assert swag == [Row("good", ("the film", "the book"), 1), Row("bad", ("a plot", "a end"), 0)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "good", "label": 0}, "Which column holds the choices"),
        ({"prompt": "good", "choices": ["a"], "label": 0}, "no list of two or more choices"),
        ({"prompt": "good", "choices": ["a", None], "label": 0}, "no list of two or more choices"),
        ({"prompt": "good", "choices": ["a", "b"], "label": "both"}, "number of a choice, or its letter, not 'both'"),
        ({"prompt": "good", "choices": ["a", "b"], "label": 0.5}, "number of a choice, or its letter, not 0.5"),
        ({"prompt": "", "choices": ["a", "b"], "label": 0}, "no text in 'prompt'"),
    ],
)
def test_bad_rows(row, message):
    with pytest.raises(gg.DataError, match=message):
        read([row])


def test_a_label_beyond_the_choices():
    model = tiny_chooser()
    with pytest.raises(gg.DataError, match="Label 2 is none of 2 choices, counted from 0: 'good'"):
        encode([Row("good", ("a", "film"), 2)], model, tiny_tokenizer(), task_of(model), Settings())


@pytest.mark.parametrize("objective", ["gold-probability", "margin"])
def test_objectives_of_one_class(objective):
    assert np.isfinite(gg.score(tiny_chooser(), [choice_batch()], objective=objective).values).all()


def test_a_run_and_what_it_writes(tmp_path):
    data, folder = choice_rows(130), tmp_path / "run"
    run = gg.compress(
        tiny_chooser(), data, tokenizer=tiny_tokenizer(), macs=0.6, rounds=2, calibration_tokens=512, out=folder,
        measure_speed=False,
    )  # fmt: skip
    assert run.measure.name == "accuracy"
    assert run.predictions is None
    model = transformers.AutoModelForMultipleChoice.from_pretrained(folder / "model", trust_remote_code=True)
    inputs = {name: tensor for name, tensor in choice_batch().items() if name != "labels"}
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, run.model(**inputs).logits)
    card = (folder / "model" / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: multiple-choice" in card
    assert "AutoModelForMultipleChoice" in card
    assert "pipeline(" not in card, "transformers has no pipeline for it"
    done = gg.evaluate(run, data)
    assert (done.leading, done.rows) == ("accuracy", 130)
    assert done.quality["agreement"][0] == 1
    own = gg.prune(tiny_chooser(), data, tokenizer=tiny_tokenizer(), labels="own", stop="heads=1")
    assert own.steps[0].quality["agreement"] == 1
