"""Question answering: windows, spans and measures against slow twins, and runs from SQuAD's json to a saved model."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
import transformers
from conftest import WORDS, shared, tiny_config, tiny_tokenizer
from twins import rows_of

import greedy_gnorm as gg
from greedy_gnorm.data.batches import Batch, ready_batches
from greedy_gnorm.data.encoding import encode
from greedy_gnorm.data.loading import evaluation_batches, read_rows
from greedy_gnorm.data.sets import divided_rows
from greedy_gnorm.data.sources import WHOLE, read_splits
from greedy_gnorm.deployment.export import largest_difference, onnx_runner, to_onnx
from greedy_gnorm.errors import DataError, UnsupportedModel
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import evaluate, with_drawn_labels, with_predictions
from greedy_gnorm.passes.gradients import gradient_norms
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.answers import FAR, LONGEST_ANSWER, Window, best_spans, exact_match, text_f1
from greedy_gnorm.tasks.objectives import OBJECTIVES
from greedy_gnorm.tasks.task import task_of
from greedy_gnorm.units import as_matrix

OPTIONS = {"samples": 24, "calibration_tokens": 600, "measure_speed": False, "rounds": 2}
pytestmark = pytest.mark.filterwarnings(
    "ignore:The calibration rows have", "ignore:Only", "ignore:The unpruned model's"
)


def answerer(family="bert", seed=0, dtype=torch.float32, **changes):
    """A random model that gives a start and an end logit for every token."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = tiny_config(family, num_labels=2, num_hidden_layers=2, **changes)
        model = transformers.AutoModelForQuestionAnswering.from_config(config)
        for parameter in model.parameters():
            parameter.data += 0.25 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def articles(count=8, unanswered=(), words=30):
    """SQuAD's json: articles of two paragraphs with three questions each; every fourth context needs two windows."""
    chance = random.Random(0)
    made, number = [], 0
    for article in range(count):
        paragraphs = []
        for part in range(2):
            length = 2 * words if (2 * article + part) % 4 == 3 else words // 2
            context = " ".join(f"{chance.choice(WORDS)}" for _ in range(length)) + f" x{article} y{part}"
            questions = []
            for _ in range(3):
                start = chance.choice([0, *(place + 1 for place, letter in enumerate(context) if letter == " ")])
                text = " ".join(context[start:].split(" ")[: chance.choice([1, 2, 3])])
                answers = [] if number in unanswered else [{"text": text, "answer_start": start}]
                question = f"was the {chance.choice(WORDS)} {number}"
                questions.append({"id": f"q{number}", "question": question, "answers": answers})
                questions[-1] |= {"is_impossible": True} if number in unanswered else {}
                number += 1
            paragraphs.append({"context": context, "qas": questions})
        made.append({"title": f"Article {article}", "paragraphs": paragraphs})
    return {"version": "1", "data": made}


def flat(content):
    """The questions as rows."""
    return [
        {"question": each["question"], "context": paragraph["context"], "answers": each["answers"]}
        for article in content["data"]
        for paragraph in article["paragraphs"]
        for each in paragraph["qas"]
    ]


@pytest.fixture
def squad(tmp_path):
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(articles()), encoding="utf-8")
    return path


def batches_of(model, rows, **settings):
    return evaluation_batches(model, tiny_tokenizer(), task_of(model), rows, Settings(**settings))


@pytest.mark.parametrize(
    ("given", "right", "f1", "exact"),
    [
        ("the Denver Broncos", "Denver Broncos!", 1, 1),  # articles, case and punctuation do not count
        ("Denver", "the Denver Broncos", 2 / 3, 0),  # precision 1, recall 1/2
        ("a b b", "b c", 2 * (1 / 2) * (1 / 2) / 1, 0),  # "a" is an article; b counts once
        ("b b", "b b c", 2 * 1 * (2 / 3) / (5 / 3), 0),
        ("Carolina", "Denver", 0, 0),
        ("", "", 1, 1),
        ("Denver", "", 0, 0),
        ("another man", "other man", 1 / 2, 0),  # "an" is an article only as a word
        ("U.S. 1,000", "us 1000", 1, 1),
    ],
)
def test_f1_and_exact_match_by_hand(given, right, f1, exact):
    assert text_f1(given, right) == pytest.approx(f1)
    assert exact_match(given, right) == exact


def test_squads_json_is_read_by_its_shape(tmp_path):
    content = articles(2, unanswered={1})
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    table = read_splits(path)[WHOLE]
    assert table.column_names == ["id", "title", "context", "question", "answers"]
    assert table["answers"][1] == {"text": [], "answer_start": []}
    given = flat(content)[2]
    assert table["context"][2] == given["context"]
    assert table["answers"][2] == {key: [given["answers"][0][key]] for key in ("text", "answer_start")}
    assert set(table["title"]) == {"Article 0", "Article 1"}

    del content["data"][0]["paragraphs"][0]["qas"][0]["answers"]
    path.write_text(json.dumps(content), encoding="utf-8")
    assert read_splits(path)[WHOLE]["answers"][0] is None
    del content["data"][1]["paragraphs"][0]["context"]
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match=r"Can't read .*questions.json: .*context"):
        read_splits(path)


def test_both_ways_to_write_answers_and_other_columns():
    model = answerer()
    as_dicts = flat(articles(2))
    as_lists = [
        row | {"answers": {key: [each[key] for each in row["answers"]] for key in ("text", "answer_start")}}
        for row in as_dicts
    ]
    renamed = [{"q": row["question"], "c": row["context"], "a": row["answers"]} for row in as_dicts]
    first = batches_of(model, as_dicts)
    assert batches_of(model, as_lists).fingerprint == first.fingerprint
    assert batches_of(model, renamed, text="q", text_pair="c", label="a").fingerprint == first.fingerprint


def test_windows_cover_the_context_and_hold_the_answer():
    model, rows = answerer(), flat(articles(4))
    batches = batches_of(model, rows, stride=8)
    assert batches.rows > batches.data_rows == len(rows)
    covered = {number: set() for number in range(len(rows))}
    held = set()
    for batch in batches:
        for place, window in enumerate(batch.notes):
            row, label = rows[window.question], batch.labels[place].tolist()
            for start, end in window.offsets:
                covered[window.question] |= set(range(start, end))
            ids = batch.inputs["input_ids"][place]
            assert batch.positions[place].sum() == 1 + len(window.offsets)
            assert batch.positions[place, 0] == 1
            assert batch.positions[place, window.begin] == 1
            assert ids[window.begin - 1] == tiny_tokenizer().sep_token_id
            if label != [0, 0]:
                held.add(window.question)
                start, end = window.characters(*label)
                assert row["context"][start:end] == row["answers"][0]["text"]
    for number, row in enumerate(rows):
        assert covered[number] >= {place for place, letter in enumerate(row["context"]) if letter != " "}
    assert held == set(range(len(rows)))
    assert any(batch.labels.sum(1).eq(0).any() for batch in batches)  # some window does not hold the answer
    apart = batches_of(model, rows, stride=0)
    assert sum(apart.lengths()) < sum(batches.lengths())


def test_a_windows_label_is_the_first_answer_in_it():
    window = Window(0, "a bb ccc dd", ((9, "dd"), (2, "bb ccc"), (5, "ccc")), 4, ((2, 4), (5, 8)), False)
    assert window.label() == (4, 5)
    assert window.tokens(5, 8) == (5, 5)
    assert window.tokens(0, 1) == window.tokens(2, 11) == (0, 0)
    assert Window(0, "a bb", (), 4, ((0, 1), (2, 4)), True).label() == (0, 0)


def slow_best(start, end, context):
    """The best span by trying all of them."""
    tried = [(start[i] + end[j], i, j) for i in context for j in context if i <= j < i + LONGEST_ANSWER]
    return max(tried)


def test_the_best_span_is_that_of_trying_all():
    chance = torch.Generator().manual_seed(0)
    outputs = torch.randn(20, 45, 2, generator=chance, dtype=torch.float64)
    positions = torch.zeros(20, 45, dtype=torch.long)
    positions[:, 0] = 1
    for row in range(20):
        positions[row, 5 : 7 + 2 * row] = 1
    outputs[:, 0] = 50  # the first token is no part of an answer
    outputs[19, 6, 0] = outputs[19, 44, 1] = 9  # too far apart
    first, last, score = best_spans(outputs, Batch({}, None, tuple(range(20)), positions=positions))
    for row in range(20):
        context = [place for place in range(1, 45) if positions[row, place]]
        best = slow_best(*outputs[row].T.tolist(), context)
        assert (score[row], first[row], last[row]) == pytest.approx(best)


def slow_measures(model, rows, optional):
    """Each question alone: every window without padding, the best answer of all, then SQuAD's rules."""
    task, exact, f1 = task_of(model), [], []
    for row in rows:
        batches = encode(read_rows([({WHOLE: as_table([row])}, WHOLE, True)], task, None, Settings())[0], model,
                         tiny_tokenizer(), task, Settings())  # fmt: skip
        found, none = [], []
        for batch in batches:
            for place, window in enumerate(batch.notes):
                length = int(batch.inputs["attention_mask"][place].sum())
                with torch.no_grad():
                    out = model(**{name: each[place : place + 1, :length] for name, each in batch.inputs.items()})
                start, end = (each[0].double().tolist() for each in (out.start_logits, out.end_logits))
                score, i, j = slow_best(start, end, range(window.begin, window.begin + len(window.offsets)))
                first, last = window.offsets[i - window.begin][0], window.offsets[j - window.begin][1]
                found.append((score, row["context"][first:last]))
                none.append(start[0] + end[0])
        score, text = max(found)
        text = "" if optional and min(none) > score else text
        golds = [each["text"] for each in row["answers"]] or [""]
        exact.append(max(exact_match(text, gold) for gold in golds))
        f1.append(max(text_f1(text, gold) for gold in golds))
    return {"f1": np.mean(f1), "exact_match": np.mean(exact)}


def as_table(rows):
    return read_splits(rows)[WHOLE]


@pytest.mark.parametrize("unanswered", [(), (0, 3, 5, 8, 9, 17)])
def test_measures_are_those_of_each_question_alone(unanswered):
    model, rows = answerer(dtype=torch.float64), flat(articles(3, unanswered))
    with torch.no_grad():  # some questions are left unanswered, if they can be
        model.qa_outputs.weight *= 0.2
    ours = evaluate(find_sites(model), batches_of(model, rows))
    slow = slow_measures(model, rows, bool(unanswered))
    assert {name: ours[name] for name in slow} == pytest.approx(slow)


def test_only_data_with_unanswerable_questions_can_go_unanswered():
    for unanswered in ((), (3,)):
        batches = batches_of(answerer(), flat(articles(2, unanswered)))
        assert {window.optional for batch in batches for window in batch.notes} == {bool(unanswered)}


def test_the_loss_is_transformers_own_without_padding(family):
    model, rows = answerer(family, dtype=torch.float64), flat(articles(2))
    task = task_of(model)
    for batch in batches_of(model, rows):
        ours = task.row_losses(task.outputs(model, batch), batch.labels)
        for place, (start, end) in enumerate(batch.labels.tolist()):
            length = int(batch.inputs["attention_mask"][place].sum())
            alone = {name: each[place : place + 1, :length] for name, each in batch.inputs.items()}
            theirs = model(**alone, start_positions=torch.tensor([start]), end_positions=torch.tensor([end])).loss
            assert float(ours[place].detach()) == pytest.approx(float(theirs.detach()), rel=1e-12)


@pytest.mark.parametrize("objective", ["logit-norm", "loss"])
def test_gnorm_is_that_of_a_backward_pass_per_window(family, objective):
    model, rows = answerer(family, dtype=torch.float64), flat(articles(2))
    sites, batches = find_sites(model, "heads"), batches_of(model, rows)
    fast = gradient_norms(sites, batches, OBJECTIVES[objective])
    slow = {name: np.zeros((len(sites), 4)) for name in fast}
    for batch in batches:
        for place, window in enumerate(batch.notes):
            model.zero_grad()
            length = int(batch.inputs["attention_mask"][place].sum())
            out = model(**{name: each[place : place + 1, :length] for name, each in batch.inputs.items()})
            both = torch.stack([out.start_logits[0], out.end_logits[0]])
            kept = torch.cat([both[:, :1], both[:, window.begin : window.begin + len(window.offsets)]], dim=1)
            value = kept.norm() if objective == "logit-norm" else torch.nn.functional.cross_entropy(
                both, batch.labels[place]
            )  # fmt: skip
            value.backward()
            for site in sites:
                for name in slow:
                    norms = [float(rows.norm()) for rows in rows_of(site, name, gradient=True)]
                    slow[name][site.index] += np.array(norms) / batches.rows
    for name in slow:
        assert np.abs(as_matrix(fast[name]) / slow[name] - 1).max() <= 1e-9


def test_samples_are_measured_as_the_rows_they_draw():
    task, chance = task_of(answerer()), np.random.default_rng(0)
    table = chance.random((30, 8))
    weights = chance.multinomial(30, np.full(30, 1 / 30), size=5)
    found = task.resampled(table, weights)
    for sample, times in enumerate(weights):
        drawn = task.measures(np.repeat(table, times, axis=0))
        assert {name: found[name][sample] for name in drawn} == pytest.approx(drawn)


def test_windows_are_put_together():
    task = task_of(answerer())
    #         question, score, none, f1, exact, unanswered, optional, loss
    table = np.array([
        [1, 3.0, 1.0, 0.5, 0, 0, 1, 2.0],
        [0, 2.0, 9.0, 0.0, 0, 0, 1, 1.0],
        [0, 4.0, 3.0, 1.0, 1, 0, 1, 3.0],  # the better window; no answer scores 3 at the least
        [2, 1.0, 5.0, 0.0, 0, 1, 1, 1.0],  # rightly unanswered
        [3, 1.0, 5.0, 1.0, 1, 0, 1, 1.0],  # wrongly unanswered
        [4, 1.0, 5.0, 1.0, 1, 0, 0, 1.0],  # can't be left unanswered
    ])  # fmt: skip
    found = task.combined(table)
    assert found[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert found[:, 3].tolist() == [1, 0.5, 1, 0, 1]
    assert found[:, 4].tolist() == [1, 0, 1, 0, 1]
    assert found[0, 7] == 2.0
    assert task.right_rows(found, "exact_match").tolist() == [True, False, True, False, True]
    assert task.right_rows(found, "f1") is None


def test_a_model_agrees_with_itself_and_less_with_another():
    model, rows = answerer(), flat(articles(4))
    batches = with_predictions(model, batches_of(model, rows))
    assert evaluate(find_sites(model), batches)["agreement"] == 1
    other = answerer(seed=1)
    ours, theirs = (answers_by(each, batches) for each in (other, model))
    wanted = np.mean([text_f1(ours[number], theirs[number]) for number in ours])
    assert evaluate(find_sites(other), batches)["agreement"] == pytest.approx(wanted)
    assert 0 < wanted < 1
    unlabelled = batches_of(model, [{key: row[key] for key in ("question", "context")} for row in rows], labels="own")
    assert set(evaluate(find_sites(other), with_predictions(model, unlabelled))) == {"agreement"}


def answers_by(model, batches):
    """The text of each question's best answer."""
    best = {}
    for batch in batches:
        with torch.no_grad():
            spans = zip(
                *(each.tolist() for each in best_spans(task_of(model).outputs(model, batch), batch)), strict=True
            )
        for window, (first, last, score) in zip(batch.notes, spans, strict=True):
            start, end = window.characters(first, last)
            best[window.question] = max(best.get(window.question, (-np.inf, "")), (score, window.context[start:end]))
    return {number: text for number, (_, text) in best.items()}


def test_labels_are_drawn_from_the_context_and_the_first_token():
    model = answerer()
    batches = batches_of(model, flat(articles(4)))
    drawn = with_drawn_labels(model, batches)
    assert [batch.labels.tolist() for batch in drawn] != [batch.labels.tolist() for batch in batches]
    for batch in drawn:
        assert batch.labels.shape == (len(batch), 4)
        assert batch.positions.gather(1, batch.labels[:, :2]).all()
        for window, (first, last, start, end) in zip(batch.notes, batch.labels.tolist(), strict=True):
            answered = window.begin <= first <= last
            assert (start, end) == (window.characters(first, last) if answered else (-1, -1))
    task, rows = task_of(model), 4000
    outputs = torch.tensor([[1.0, 0.0], [5.0, 5.0], [0.0, 2.0]]).expand(rows, 3, 2)
    windows = (Window(0, "a", (), 2, ((0, 1),), False),) * rows
    batch = Batch({}, None, tuple(range(rows)), positions=torch.tensor([[1, 0, 1]]).expand(rows, 3), notes=windows)
    labels = task.drawn_labels(outputs, batch, torch.Generator().manual_seed(0))
    shares = [(labels[:, side] == 2).double().mean().item() for side in (0, 1)]
    assert shares == pytest.approx([1 / (1 + np.e), 1 / (1 + np.exp(-2))], abs=0.03)


def test_removals_are_judged_by_drawn_answers():
    rows = [{key: row[key] for key in ("question", "context")} for row in flat(articles(4))]
    found = gg.score(answerer(), rows, tokenizer=tiny_tokenizer(), score="leave-one-out", labels="own")
    assert len(set(found.values.flatten().tolist())) > 1


def test_no_article_has_two_uses(squad):
    task = task_of(answerer())
    parts = divided_rows(task, None, squad, None, Settings(), needs_labels=True)
    sources = [{row.source for row in part} for part in parts if part is not None]
    assert sum(map(len, sources)) == len(set().union(*sources)) == 8
    rows = [{key: row[key] for key in ("question", "context", "answers")} for row in flat(articles(20))]
    parts = divided_rows(task, None, rows, None, Settings(), needs_labels=True)
    contexts = [{row.context for row in part} for part in parts]
    assert len(parts) == 3
    assert sum(map(len, contexts)) == len(set().union(*contexts)) == 40
    assert all(len(part) == 3 * len(some) for part, some in zip(parts, contexts, strict=True))  # whole contexts


BAD = {
    "off by one": (lambda row: row["answers"][0].update(answer_start=row["answers"][0]["answer_start"] + 1),
                   r"row 2 \(counted from 0\).* should begin at character \d+, but it begins at \d+"),
    "not there": (lambda row: row["answers"][0].update(text="nowhere"), "but the context does not have it"),
    "negative": (lambda row: row["answers"][0].update(answer_start=-3), "should begin at character -3"),
    "empty": (lambda row: row["answers"][0].update(text=" "), "row 2"),
    "no start": (lambda row: row.update(answers=[{"text": "good"}]), "Answers must be written as"),
    "no list": (lambda row: row.update(answers="good"), "Answers must be written as"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_bad_answers_are_refused(fault, tmp_path):
    rows = flat(articles(2))
    change, message = BAD[fault]
    if fault in ("no start", "no list"):
        for row in rows:
            change(row)
    else:
        change(rows[2])
    with pytest.raises(DataError, match=message):
        batches_of(answerer(), rows)


def test_what_can_not_be_answered_is_refused():
    model, rows = answerer(), flat(articles(2))
    with pytest.raises(DataError, match="Which column is the context"):
        batches_of(model, [{"question": row["question"], "answers": row["answers"]} for row in rows])
    with pytest.raises(DataError, match="None of the 12 evaluation rows has an answer"):
        batches_of(model, [row | {"answers": {"text": [], "answer_start": []}} for row in rows])
    with pytest.raises(DataError, match="--labels own"):
        batches_of(model, [{key: row[key] for key in ("question", "context")} for row in rows])
    with pytest.raises(DataError, match="requires a fast tokenizer"):
        evaluation_batches(model, slow_tokenizer(), task_of(model), rows, Settings())
    ready = ready_batches([{"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": torch.ones(2, 2)}])
    with pytest.raises(DataError, match="give questions and contexts as rows"):
        evaluate(find_sites(model), ready)
    with pytest.raises(UnsupportedModel, match="one correct class per row, but the task is question_answering"):
        gg.score(model, rows, tokenizer=tiny_tokenizer(), objective="margin")


def slow_tokenizer():
    class Slow:
        is_fast, model_max_length = False, 512

    return Slow()


def test_long_questions_are_cut_and_counted():
    rows = flat(articles(1))
    rows[1]["question"] = " ".join(WORDS * 4)
    batches = batches_of(answerer(), rows)
    assert batches.truncated == 1
    assert max(max(batch.inputs["input_ids"].shape) for batch in batches) <= 48


def test_padding_is_far_below_all_other_outputs():
    model = answerer()
    batch = batches_of(model, flat(articles(2))).items[-1]
    batch = Batch(
        {name: torch.nn.functional.pad(each, (0, 3)) for name, each in batch.inputs.items()}, None, batch.rows
    )
    with torch.no_grad():
        outputs = task_of(model).outputs(model, batch)
    assert (outputs[:, -3:] == FAR).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "answerer"
    answerer().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "questions.json"
    path.write_text(json.dumps(articles(20)), encoding="utf-8")
    return path


def test_compressing_and_loading_with_plain_transformers(folder, questions, tmp_path):
    run = gg.compress(folder, questions, macs=0.6, out=tmp_path / "run", **OPTIONS)
    assert set(run.solution.quality) == {"f1", "exact_match", "loss"}
    assert run.measure.name == "f1"
    plain = transformers.AutoModelForQuestionAnswering.from_pretrained(
        tmp_path / "run" / "model", trust_remote_code=True
    )
    given = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    inputs = given("was the film good", "the film was very good", return_tensors="pt")
    with torch.no_grad():
        ours, theirs = run.model(**inputs), plain(**inputs)
    assert torch.allclose(ours.start_logits, theirs.start_logits)
    assert torch.allclose(ours.end_logits, theirs.end_logits)
    card = (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: question-answering" in card
    assert "AutoModelForQuestionAnswering" in card
    assert "pipeline(" not in card  # transformers 5 has none for this task
    data = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))["data"]
    assert sum(data[use]["rows"] for use in ("evaluation", "test")) < 120  # questions, not windows

    evaluation = gg.evaluate(tmp_path / "run", questions)
    assert evaluation.rows == 120
    assert 0 <= evaluation.agreement <= 1
    assert evaluation.quality["agreement"][0] == 1


def test_onnx_has_start_and_end_logits(folder, tmp_path):
    pytest.importorskip("onnxruntime")
    model = gg.load(folder)
    gg.remove_heads(model, {0: [1], 1: [0, 2]})
    to_onnx(model, tmp_path / "model.onnx")
    assert largest_difference(model, onnx_runner(tmp_path / "model.onnx")) < 1e-5


def test_pruning_without_labels_follows_the_agreement(folder, questions, tmp_path):
    rows = [{key: row[key] for key in ("question", "context")} for row in flat(json.loads(questions.read_text()))]
    run = gg.prune(folder, rows, labels="own", stop="heads=3", samples=24, latency=False, out=tmp_path / "run")
    assert run.measure.name == "agreement"
    assert run.steps[0].quality == {"agreement": 1.0}
    assert run.steps[-1].quality["agreement"] < 1
    scores = gg.score(folder, rows, labels="own", objective="loss")
    assert np.isfinite(scores.values).all()


@pytest.mark.slow
def test_the_shared_questions_are_read_whole():
    path = shared("data/squad-xquad-en.json")
    table = read_splits(path)[WHOLE]
    assert len(table) == 1190
    assert len(set(table["context"])) == 240
    assert len(set(table["title"])) == 48
    task = task_of(answerer())
    rows, *_ = read_rows([({WHOLE: table}, WHOLE, True)], task, None, Settings())
    assert all(row.label for row in rows)
