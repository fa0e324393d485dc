"""Causal language models: blocks of text, perplexity, row objectives, and whole runs."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack

import numpy as np
import pytest
import torch
import transformers
from conftest import shared, tiny_config, tiny_rows
from tokenizers import Tokenizer, models, pre_tokenizers
from twins import rows_of, unpadded

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.data.encoding import IGNORED
from greedy_gnorm.data.loading import scoring_batches
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes import layers
from greedy_gnorm.passes.evaluation import evaluate, row_statistics, with_drawn_labels, with_predictions
from greedy_gnorm.passes.gradients import gradient_norms
from greedy_gnorm.scores import SCORES
from greedy_gnorm.settings import Savings, Settings
from greedy_gnorm.tasks import vocabulary
from greedy_gnorm.tasks.intervals import resamples
from greedy_gnorm.tasks.language import blocks
from greedy_gnorm.tasks.objectives import OBJECTIVES
from greedy_gnorm.tasks.task import task_of
from greedy_gnorm.units import as_matrix

WORDS = ("\n", "good", "bad", "film", "book", "very", "not", "the", "a", "was", "it", "plot", "actor", "dull", "fun")
END = 16
SPLIT = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
         "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
OPTIONS = {"block_length": 12, "samples": 8}
FAMILIES = ("gpt2", "llama", "qwen3")


pytestmark = pytest.mark.filterwarnings("ignore:The unpruned model's perplexity is:UserWarning")


def language_model(family="llama", dtype=torch.float32, **changes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = tiny_config(family, **{"pad_token_id": None, "num_labels": 2, "num_hidden_layers": 2, **changes})
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data = (parameter.data + 0.25 * torch.randn_like(parameter)).to(dtype)
    return model.eval()


def text_tokenizer():
    """Words and newlines; it has an end-of-text token and none for padding."""
    names = ["<unk>", *WORDS, "<end>"]
    tokenizer = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")


def lines(count=80, seed=0):
    chance = np.random.default_rng(seed)
    return [" ".join(chance.choice(WORDS[1:], size=5)) for _ in range(count)]


@pytest.fixture
def folder(tmp_path):
    language_model().save_pretrained(tmp_path / "model")
    text_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def texts(tmp_path):
    """A folder of two text files."""
    (tmp_path / "texts").mkdir()
    for seed, name in enumerate(("train", "test")):
        (tmp_path / "texts" / f"{name}.txt").write_text("\n".join(lines(seed=seed)) + "\n", encoding="utf-8")
    return tmp_path / "texts"


def token_batch(rows=5, seed=0, longest=12):
    """Padded rows of unequal length, without labels."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.zeros(rows, longest, dtype=torch.long)
    for row in range(rows):
        length = longest - (row * 3) % (longest - 3)
        ids[row, :length] = torch.randint(3, 40, (length,), generator=chance)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def complete(model, batches):
    task, ready = task_of(model), ready_batches(batches)
    return type(ready)(tuple(map(task.completed, ready)), ready.fingerprint)


# Text to rows


def test_lines_of_a_file_are_joined_and_cut_into_blocks(texts, caplog):
    model, tokenizer = language_model(), text_tokenizer()
    tokenizer.pad_token = "<end>"
    with caplog.at_level(logging.INFO, logger="greedy_gnorm"):
        batches = scoring_batches(
            model, tokenizer, task_of(model), texts / "train.txt", Settings(samples=0, block_length=12)
        )
    text = "\n".join(lines())
    wanted = tokenizer(text)["input_ids"]
    rows = sorted(
        (row, ids.tolist()) for each in batches for row, ids in zip(each.rows, each.inputs["input_ids"], strict=True)
    )
    assert [token for _, ids in rows for token in ids] == wanted[: len(wanted) // 12 * 12]
    assert tokenizer.decode(rows[0][1]).count("\n") == 2
    assert f"{len(wanted) % 12} tokens at the end of the text are left out: rows have 12 tokens" in caplog.text
    assert all(torch.equal(batch.labels, batch.inputs["input_ids"]) for batch in batches)


def test_other_rows_are_documents_that_end_with_a_token():
    model, tokenizer = language_model(), text_tokenizer()
    rows = [{"text": "good film"}, {"text": "the plot was dull"}]
    batches = scoring_batches(model, tokenizer, task_of(model), rows, Settings(block_length=4))
    ids = [*tokenizer("good film")["input_ids"], END, *tokenizer("the plot was dull")["input_ids"], END]
    assert [list(text) for text, _ in batches.texts] == [ids[:4], ids[4:8]]


def test_a_short_text_is_one_short_row():
    assert blocks([1, 2, 3], 12) == [(1, 2, 3)]
    with pytest.raises(gg.GnormError, match="has 1 tokens: a language model needs at least 2"):
        blocks([1], 12)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (tiny_rows(9), {}, r"have labels \('label'\), which a language model does not use. Give --text text"),
        (tiny_rows(9), {"text": "text", "label": "label"}, "and no --label"),
        ([{"text": "a", "other": "b"}] * 9, {"text": "text", "text_pair": "other"}, "leave out --text-pair"),
        ([{"text": "good film"}] * 9, {"block_length": 49}, "takes at most 48 tokens: block_length can't be 49"),
        ([{"text": "good film"}, {"text": " "}], {}, "1 row has no text"),
    ],
)
def test_bad_input(rows, settings, message):
    model = language_model()
    with pytest.raises(gg.GnormError, match=message):
        scoring_batches(model, text_tokenizer(), task_of(model), rows, Settings(**settings))


def test_labelled_rows_are_used_where_the_text_is_named():
    model = language_model()
    settings = Settings(text="text", block_length=8, samples=0)
    assert scoring_batches(model, text_tokenizer(), task_of(model), tiny_rows(30), settings).rows > 5


def test_a_block_length_is_a_number_above_one():
    with pytest.raises(gg.GnormError, match="block_length must be a whole number, 2 or more, not 1"):
        Settings(block_length=1)


# Outputs, losses and measures


@pytest.fixture(params=[2**23, 100], ids=["whole", "chunks"])
def chunks(request, monkeypatch):
    """All positions at once, or two at a time."""
    monkeypatch.setattr(vocabulary, "AT_ONCE", request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_measures_follow_from_the_loss_of_transformers(family, chunks):
    model = language_model(family)
    batches = [token_batch(), token_batch(rows=3, seed=2, longest=7)]
    total = tokens = right = 0
    for batch in batches:
        for row in unpadded(batch):
            with torch.no_grad():
                found = model(**row, labels=row["input_ids"])
            count = row["input_ids"].shape[1] - 1
            total, tokens = total + float(found.loss) * count, tokens + count
            right += int((found.logits[0, :-1].argmax(-1) == row["input_ids"][0, 1:]).sum())
    quality = evaluate(find_sites(model), complete(model, batches))
    assert quality["loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert quality["perplexity"] == pytest.approx(np.exp(total / tokens), rel=1e-5)
    assert quality["accuracy"] == pytest.approx(right / tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_head_give_the_logits(family):
    model, batch = language_model(family, torch.float64), ready_batches([token_batch()]).items[0]
    task = task_of(model)
    torch.testing.assert_close(task.head(task.outputs(model, batch)), model(**batch.inputs).logits)


def test_ignored_labels_do_not_count():
    model, batch = language_model(), token_batch(rows=1)
    labels = batch["input_ids"].clone()
    labels[:, :7] = IGNORED
    with torch.no_grad():
        wanted = float(model(**batch, labels=labels).loss)
    found = evaluate(find_sites(model), complete(model, [{**batch, "labels": labels}]))
    assert found["loss"] == pytest.approx(wanted, rel=1e-5)


def test_resampled_measures_are_those_of_the_samples():
    model = language_model()
    task, statistics = task_of(model), row_statistics(find_sites(model), complete(model, [token_batch()])).numpy()
    weights = next(resamples(len(statistics)))[:20]
    found = task.resampled(statistics, weights)
    for place, times in enumerate(weights):
        sample = task.measures(np.repeat(statistics, times, axis=0))
        assert {name: found[name][place] for name in found} == pytest.approx(dict(sample))


def gradients_of(site, name):
    return rows_of(site, name, gradient=True)


def slow_norms(model, batches, objective):
    """A backward pass for each unpadded row, from the logits."""
    sites, sums, count = find_sites(model, "both"), None, 0
    for batch in batches:
        for row in unpadded(batch):
            model.zero_grad()
            logits = model(**row).logits[0, :-1]
            centred = logits - logits.mean(-1, keepdim=True)
            norm = centred.norm() / len(logits) ** 0.5
            likely = logits.log_softmax(-1).gather(1, row["input_ids"][0, 1:, None])
            (norm if objective == "logit-norm" else -likely.mean()).backward()
            found = [
                block.norm().item()
                for site in sites
                if site.kind == "attention"
                for name in ("q", "k", "v")
                for block in gradients_of(site, name)
            ]
            sums, count = np.array(found) + (0 if sums is None else sums), count + 1
    return sums / count


@pytest.mark.parametrize("objective", ["logit-norm", "loss"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_norms_are_those_of_a_backward_pass_per_row(family, objective, chunks):
    model = language_model(family, torch.float64)
    batches = [token_batch(), token_batch(rows=3, seed=2, longest=7)]
    for gone in ({}, {0: [1]}):
        gg.remove_heads(model, gone)
        norms = gradient_norms(find_sites(model, "both"), complete(model, batches), OBJECTIVES[objective])
        table = np.stack([as_matrix(norms[name]) for name in ("q", "k", "v")], axis=1)  # sites x parts x heads
        ours = table[~np.isnan(table)]
        np.testing.assert_allclose(ours, slow_norms(model, batches, objective), rtol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_fisher_has_a_gate_at_every_token(family):
    """Against gates that are factors of their own for each token and unit, a backward pass for each row."""
    model = language_model(family, torch.float64)
    sites = find_sites(model)
    batches = [token_batch(), token_batch(rows=3, seed=2, longest=7)]
    found = SCORES["fisher"](sites, complete(model, batches), OBJECTIVES["loss"])
    slow, rows = [np.zeros(site.total) for site in sites], [row for batch in batches for row in unpadded(batch)]
    for row in rows:
        tokens, opened = row["input_ids"].shape[1], []
        with ExitStack() as stack:
            for site in sites:
                gate = torch.ones(tokens, site.total, dtype=torch.float64, requires_grad=True)
                opened.append(gate)

                def multiply(module, arguments, gate=gate, site=site):
                    return (arguments[0] * gate.repeat_interleave(site.output_size, dim=1),)

                stack.callback(site.output.register_forward_pre_hook(multiply).remove)
            logits = model(**row).logits[0, :-1]
            torch.nn.functional.cross_entropy(logits, row["input_ids"][0, 1:]).backward()
        for total, gate in zip(slow, opened, strict=True):
            total += gate.grad.square().sum(0).numpy() / len(rows)
    for ours, theirs in zip(found.vectors, slow, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-8)


def test_a_head_with_a_bias_has_its_norm(chunks):
    head = torch.nn.Linear(6, 30).double()
    hidden = torch.randn(9, 6, dtype=torch.float64)
    logits = head(hidden)
    wanted = (logits - logits.mean(-1, keepdim=True)).square().sum(-1)
    torch.testing.assert_close(vocabulary.centred_squares(head, hidden), wanted)
    with torch.no_grad():
        head.weight *= 2  # the form is that of the present weights
        head.bias *= 2
    torch.testing.assert_close(vocabulary.centred_squares(head, hidden), 4 * wanted)


def test_objectives_of_one_class_are_refused():
    model = language_model()
    batch = complete(model, [token_batch()]).items[0]
    for objective in ("margin", "gold-probability", "kl"):
        with pytest.raises(gg.GnormError, match="requires one correct class per row"):
            OBJECTIVES[objective].function(model, batch)


def test_graphs_that_do_not_fit_are_computed_again(monkeypatch):
    model = language_model("llama", torch.float64, num_hidden_layers=4)
    batches, runs = complete(model, [token_batch()]), []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda *_: runs.append(1))

    def norms():
        runs.clear()
        return gradient_norms(find_sites(model).use(Savings()), batches, OBJECTIVES["logit-norm"])

    whole = norms()
    assert len(runs) == 4
    monkeypatch.setattr(layers, "LEAST_ROOM", 1)  # room for the first graph alone
    again = norms()
    assert len(runs) == 7
    for name in whole:
        assert all(np.array_equal(*pair, equal_nan=True) for pair in zip(whole[name], again[name], strict=True))


# Labels of the model's own


def test_own_labels_are_drawn_and_predicted_at_every_position(chunks):
    model = language_model()
    batches = complete(model, [token_batch()])
    drawn = with_drawn_labels(model, batches).items[0].labels
    assert torch.equal(drawn, with_drawn_labels(model, batches).items[0].labels)
    assert torch.equal(drawn == IGNORED, batches.items[0].labels.index_fill(1, torch.tensor([0]), IGNORED) == IGNORED)
    judged = with_predictions(model, batches)
    with torch.no_grad():
        likeliest = model(**token_batch()).logits.argmax(-1)[:, :-1]
    predicted = judged.items[0].predicted[:, 1:]
    assert torch.equal(predicted[predicted != IGNORED], likeliest[predicted != IGNORED])
    assert evaluate(find_sites(model), judged)["agreement"] == 1.0


def test_drawn_tokens_have_their_probabilities():
    model = language_model()
    batch = {name: tensor.expand(4000, -1) for name, tensor in token_batch(rows=1, longest=4).items()}
    drawn = with_drawn_labels(model, ready_batches([batch])).items[0].labels[:, 1]
    with torch.no_grad():
        wanted = model(input_ids=batch["input_ids"][:1]).logits[0, 0].softmax(-1)
    counts = torch.bincount(drawn, minlength=40) / 4000
    assert float((counts - wanted).abs().max()) < 0.03


# Whole runs


def test_a_run_is_recorded_loaded_and_generates(folder, texts, tmp_path):
    run = gg.prune(folder, texts, stop="heads=2", out=tmp_path / "run", latency=False, **OPTIONS)
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    assert header["quality"] == "perplexity"
    assert header["higher_is_better"] is False
    assert header["data"]["scoring"]["longest"] == 12
    assert header["data"]["scoring"]["tokens"] == 8 * 12
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", trust_remote_code=True)
    ids = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(loaded(ids).logits, run.model(ids).logits)
    generate = transformers.pipeline("text-generation", str(tmp_path / "run" / "model"), trust_remote_code=True)
    found = generate(["good film", "the plot was very"], max_new_tokens=3, do_sample=False, batch_size=2)
    assert all(each[0]["generated_text"] for each in found)
    assert "pipeline_tag: text-generation" in (tmp_path / "run" / "model" / "README.md").read_text()
    evaluation = gg.evaluate(tmp_path / "run", texts)
    assert evaluation.leading == "perplexity"
    assert evaluation.data["longest"] == 12  # as in the run


def test_compression_fits_maps(folder, tmp_path):
    options = {"rounds": 2, "calibration_tokens": 900, "measure_speed": False, "labels": "own", **OPTIONS}
    texts = [{"text": line} for line in lines(500)]
    run = gg.compress(folder, texts, params=0.9, out=tmp_path / "run", **options)
    plain = gg.compress(folder, texts, params=0.9, recover="none", **options)
    assert run.solution.parameters <= 0.9 * run.steps[0].parameters
    assert run.solution.quality["agreement"] > plain.solution.quality["agreement"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Perplexity (lower is better)" in page


def test_exchanges_are_refused(folder):
    with pytest.raises(gg.GnormError, match="a language model has few blocks of text"):
        gg.compress(folder, [{"text": line} for line in lines(500)], params=0.9, rounds=1, swap=True, **OPTIONS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_an_empty_layer_can_be_fitted(family, tmp_path):
    model = language_model(family)
    heads = gg.find_sites(model, "heads")
    gg.remove_heads(model, {1: list(range(heads[1].total))})
    texts = [{"text": line} for line in lines(300)]
    options = {"rounds": 1, "calibration_tokens": 600, "tokenizer": text_tokenizer(), **OPTIONS}
    run = gg.compress(model, texts, params=0.97, **options)
    assert run.solution.parameters < run.steps[0].parameters


def test_own_labels_and_a_named_measure(folder, texts):
    own = gg.prune(folder, texts, labels="own", stop="heads=1", method="fisher-greedy", **OPTIONS)
    assert own.header["quality"] == "agreement"
    assert own.header["higher_is_better"]
    assert 0 < own.solution.quality["agreement"] < 1
    assert "perplexity" in own.solution.quality
    named = gg.prune(folder, texts, metric="accuracy", stop="heads=1", **OPTIONS)
    assert named.header["quality"] == "accuracy"


def test_ready_batches_need_no_labels(folder):
    scoring, evaluation = ([token_batch(seed=seed)] for seed in (1, 2))
    run = gg.prune(language_model(), scoring, eval_data=evaluation, stop="heads=1")
    assert run.solution.quality["perplexity"] > 1


def test_a_guessing_model_is_doubted(folder, texts):
    with pytest.warns(UserWarning, match="not below the 40 of guessing"):
        gg.prune(folder, texts, stop="heads=1", **OPTIONS)


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"device_map": SPLIT}])
def test_other_precisions_and_places(folder, texts, changes):
    if "device_map" in changes:
        pytest.importorskip("accelerate", reason="device_map needs accelerate")
    plain = gg.prune(folder, texts, stop="heads=1", **OPTIONS)
    other = gg.prune(folder, texts, stop="heads=1", **OPTIONS, **changes)
    assert other.steps[0].quality["perplexity"] == pytest.approx(plain.steps[0].quality["perplexity"], rel=0.1)
    assert other.steps[1].scores.values.shape == plain.steps[1].scores.values.shape


# Padding


def decoder_classifier():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = tiny_config("llama", pad_token_id=None, num_hidden_layers=2)
        config.label2id = {"neg": 0, "neutral": 1, "pos": 2}
        config.id2label = {place: name for name, place in config.label2id.items()}
        return transformers.AutoModelForSequenceClassification.from_config(config).eval()


def test_a_decoder_that_classifies_reads_the_last_token_of_every_row(tmp_path, caplog):
    model, tokenizer = decoder_classifier(), text_tokenizer()
    with caplog.at_level(logging.INFO, logger="greedy_gnorm"):
        run = gg.prune(model, tiny_rows(40), tokenizer=tokenizer, stop="heads=1", samples=20, out=tmp_path / "run")
    assert caplog.text.count("the tokenizer has no padding token: rows are filled up with <end>") == 1
    assert model.config.pad_token_id is None
    assert tokenizer.pad_token is None
    task, rows = task_of(run.model), tiny_rows(40)
    settings = Settings()
    batches = scoring_batches(run.model, run.tokenizer, task, rows, settings)
    assert max(len(batch) for batch in batches) > 1
    for batch in batches:
        together = run.model(**batch.inputs).logits
        for row, given in enumerate(unpadded(batch.inputs)):
            torch.testing.assert_close(together[row : row + 1], run.model(**given).logits, rtol=1e-4, atol=1e-5)
    classify = transformers.pipeline("text-classification", str(tmp_path / "run" / "model"), trust_remote_code=True)
    assert len(classify(["good film", "the plot was very dull"], batch_size=2)) == 2
    assert transformers.AutoConfig.from_pretrained(tmp_path / "run" / "model").pad_token_id == END


def test_without_any_token_for_padding_rows_of_unequal_length_are_refused():
    model, tokenizer = decoder_classifier(), text_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(gg.GnormError, match="no padding token, and no end-of-text token"):
        gg.prune(model, tiny_rows(40), tokenizer=tokenizer, stop="heads=1", samples=20)


# Trained models


def test_stories_are_told_after_pruning(tmp_path):
    folder = shared("models/llama-stories")
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(folder), gg.load(folder)
    torch.manual_seed(0)
    start = torch.full((40, 1), tokenizer.bos_token_id)
    drawn = model.generate(
        start, attention_mask=torch.ones_like(start), do_sample=True, max_new_tokens=63, min_new_tokens=63,
        pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    rows = [{"text": tokenizer.decode(ids, skip_special_tokens=True)} for ids in drawn]
    run = gg.prune(folder, rows, stop="heads=2", block_length=64, samples=16, out=tmp_path / "run", latency=False)
    assert 2 < run.steps[0].quality["perplexity"] < 10  # the text is the model's own
    assert run.solution.quality["perplexity"] < 12
    tell = transformers.pipeline("text-generation", str(tmp_path / "run" / "model"), trust_remote_code=True)
    story = tell("Once upon a time", max_new_tokens=20, do_sample=False)[0]["generated_text"]
    assert story.startswith("Once upon a time, there was a")
