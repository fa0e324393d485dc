"""Training a pruned model towards the unpruned one: its loss, its order, its checkpoints, and runs that end with it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import EVERY_FAMILY, LABEL_NAMES, shared, tiny_batch, tiny_model, tiny_rows, tiny_tokenizer
from recovery.test_least_squares import GONE, cut_for, recovery_for, refitted
from tasks.test_choices import choice_batch
from twins import slow_distillation_loss, unpadded

import greedy_gnorm as gg
from greedy_gnorm.cli.app import main
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.data.sets import TEST
from greedy_gnorm.errors import NonFiniteScore
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.pruning.prepare import load_inputs, load_sets
from greedy_gnorm.pruning.run import at_step
from greedy_gnorm.records.journal import Journal
from greedy_gnorm.records.training import TRAINING_FILE, KeptTraining
from greedy_gnorm.recovery import distillation
from greedy_gnorm.recovery.distillation import TEMPERATURE, Distillation, Targets, rate, trained_parameters
from greedy_gnorm.settings import Settings
from greedy_gnorm.units import Unit

pytestmark = pytest.mark.filterwarnings("ignore:The calibration rows have")
ROWS = [tiny_batch(rows=9, seed=1), tiny_batch(rows=6, seed=2), tiny_batch(rows=5, seed=3, longest=7)]


def without_labels(rows):
    return ready_batches([{key: tensor for key, tensor in row.items() if key != "labels"} for row in rows])


def distillation_of(model, steps=4, rows=ROWS, **changes):
    return Distillation(find_sites(copy.deepcopy(model)), replace(without_labels(rows), **changes), steps)


def cut(model, units=GONE):
    sites = find_sites(copy.deepcopy(model))
    remove(sites, units)
    return sites


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def loss_at(targets, sites, batch):
    return float(targets.loss(sites, batch).detach())


def first_token(found):
    return [found[0].logits[0]]


def each_label(found):
    return [torch.stack([torch.zeros_like(logit), logit]) for logit in found[0].logits[0]]


def each_token(found):
    return list(found[0].logits[0])


def start_and_end(found):
    return [found[0].start_logits[0], found[0].end_logits[0]]


def choices_together(found):
    return [torch.cat([each.logits[0] for each in found])]


def each_next_token(found):
    return list(found[0].logits[0, :-1])


def mean_vector(found):
    return [found[0].last_hidden_state[0].mean(0)]


SEQUENCES = "AutoModelForSequenceClassification"
TASKS = {
    "classes": (SEQUENCES, {}, first_token, TEMPERATURE),
    "labels": (SEQUENCES, {"problem_type": "multi_label_classification"}, each_label, TEMPERATURE),
    "numbers": (SEQUENCES, {"num_labels": 1}, first_token, 0),
    "tokens": ("AutoModelForTokenClassification", {}, each_token, TEMPERATURE),
    "answers": ("AutoModelForQuestionAnswering", {"num_labels": 2}, start_and_end, TEMPERATURE),
    "choices": ("AutoModelForMultipleChoice", {}, choices_together, TEMPERATURE),
    "embeddings": ("AutoModel", {}, mean_vector, 0),
    "language": ("AutoModelForCausalLM", {}, each_next_token, TEMPERATURE),
}


@pytest.mark.parametrize("kind", TASKS)
def test_the_loss_equals_that_of_single_rows(kind, monkeypatch):
    monkeypatch.setattr("greedy_gnorm.tasks.vocabulary.AT_ONCE", 200)  # several pieces
    auto_class, changes, outputs, temperature = TASKS[kind]
    family = "gpt2" if kind == "language" else "bert"
    model = tiny_model(family, dtype=torch.float64, auto_class=auto_class, **changes)
    rows = [choice_batch(rows=6) if kind == "choices" else ROWS[0]]
    pruned, training = cut(model), distillation_of(model, rows=rows)
    targets = Targets(training.original, training.batches)
    trained = trained_parameters(pruned.model)
    found = targets.loss(pruned, training.batches.items[0])
    if kind == "choices":
        given = rows[0]["input_ids"], rows[0]["attention_mask"].bool()
        sequences = [
            [{"input_ids": ids[mask][None, None]} for ids, mask in zip(*row, strict=True)]
            for row in zip(*given, strict=True)
        ]
    else:
        sequences = [[{n: t for n, t in row.items() if n != "labels"}] for row in unpadded(rows[0])]
    wanted = slow_distillation_loss(pruned.model, model, sequences, outputs, temperature)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    pairs = zip(
        *(torch.autograd.grad(loss, list(trained.values()), allow_unused=True) for loss in (found, wanted)), strict=True
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)
    assert found.detach() > 0.01


def test_the_loss_of_the_unpruned_model_is_zero():
    model = tiny_model("bert", dtype=torch.float64)
    training = distillation_of(model)
    targets = Targets(training.original, training.batches)
    same_model = find_sites(copy.deepcopy(model))
    assert loss_at(targets, same_model, training.batches.items[2]) == pytest.approx(0, abs=1e-20)


@EVERY_FAMILY
def test_every_family_takes_a_step(family):
    model = tiny_model(family)
    sites, training = refitted(model, [cut_for(model)], recovery_for(model)), distillation_of(model, steps=2)
    before, layers = weights(sites.model), model.config.num_hidden_layers
    original = weights(training.original.model)
    training(sites)
    assert not same(weights(sites.model), before)
    assert same(weights(training.original.model), original)
    assert all(torch.isfinite(tensor).all() for tensor in sites.model.parameters())
    targets = Targets(training.original, training.batches)
    assert targets._variances.shape == (layers * model.config.to_dict().get("inner_group_num", 1),)


def test_the_unpruned_model_stays_as_it_is():
    """Maps below the lowest cut are set to the unpruned model's own parameters when the others are fitted."""
    model = tiny_model("bert")
    recovery = recovery_for(model)
    sites = refitted(model, [[Unit(5, 2)]], recovery)
    original = recovery.calibration.original
    before = weights(original.model)
    Distillation(original, without_labels(ROWS), 3)(sites)
    assert same(weights(original.model), before)
    assert not torch.equal(sites[0].output.bias, original[0].output.bias)
    assert no_hooks(original.model)


def test_images_take_a_step():
    model = tiny_model("vit")
    rows = [{"pixel_values": torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))}]
    sites = cut(model)
    before = weights(sites.model)
    distillation_of(model, rows=rows)(sites)
    after = weights(sites.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "classifier.weight" in changed
    assert not any("embeddings" in name for name in changed)


def test_embeddings_stay_and_all_else_is_trained():
    model = tiny_model("bert")
    sites = cut(model)
    before = weights(sites.model)
    distillation_of(model)(sites)
    after = weights(sites.model)
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {name for name in before if ".embeddings." in name}
    assert not any(parameter.grad is not None for parameter in sites.model.parameters())
    assert all(parameter.requires_grad for parameter in sites.model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_the_vocabulary_stays(tied):
    model = tiny_model("llama", auto_class="AutoModelForCausalLM", tie_word_embeddings=tied)
    sites = cut(model)
    distillation_of(model)(sites)
    assert torch.equal(sites.model.lm_head.weight, model.lm_head.weight)
    assert torch.equal(sites.model.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert not torch.equal(sites.model.model.norm.weight, model.model.norm.weight)


def test_the_same_seed_gives_the_same_bits_and_another_one_others():
    model = tiny_model("bert")
    found = []
    for seed in (3, 3, 4):
        sites = cut(model)
        distillation_of(model, steps=7, seed=seed)(sites)
        found.append(weights(sites.model))
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


def test_the_order_goes_through_all_batches_again_and_again():
    order = distillation_of(tiny_model("bert"), steps=8).order()
    assert sorted(order[:3]) == sorted(order[3:6]) == [0, 1, 2]
    assert len(order) == 8


def test_the_learning_rate_rises_and_falls():
    rates = [rate(step, 100) / distillation.RATE for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.02
    assert [rate(step, 1) for step in range(1)] == [distillation.RATE]


def test_training_comes_closer():
    model = tiny_model("bert")
    sites, training = refitted(model, [cut_for(model)], recovery_for(model)), distillation_of(model, steps=60)
    targets = Targets(training.original, training.batches)
    before = [loss_at(targets, sites, batch) for batch in training.batches]
    training(sites)
    after = [loss_at(targets, sites, batch) for batch in training.batches]
    assert all(new < 0.99 * old for new, old in zip(after, before, strict=True))


@pytest.mark.parametrize("saved_every", [2, 100])
def test_an_interrupted_training_ends_with_the_same_bits(saved_every, tmp_path, monkeypatch):
    """The checkpoint is from a regular step before the interruption, or from the interruption itself."""
    monkeypatch.setattr(distillation, "SAVED_EVERY", saved_every)
    model = tiny_model("bert")
    whole = cut(model)
    distillation_of(model, steps=9)(whole)
    sites, kept, loss, calls = cut(model), KeptTraining(tmp_path), Targets.loss, []

    def interrupted(self, *given):
        calls.append(given)
        if len(calls) == 6:
            raise KeyboardInterrupt if saved_every == 100 else RuntimeError
        return loss(self, *given)

    monkeypatch.setattr(Targets, "loss", interrupted)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        distillation_of(model, steps=9)(sites, kept)
    assert no_hooks(sites.model)
    assert [path.name for path in tmp_path.iterdir()] == [TRAINING_FILE]
    calls.clear()
    monkeypatch.setattr(Targets, "loss", lambda self, *given: (calls.append(given), loss(self, *given))[1])
    again = cut(model)
    distillation_of(model, steps=9)(again, kept)
    assert len(calls) == (4 if saved_every == 100 else 5)
    assert same(weights(again.model), weights(whole.model))
    calls.clear()
    last = cut(model)
    distillation_of(model, steps=9)(last, kept)
    assert not calls, "the end is kept too"
    assert same(weights(last.model), weights(whole.model))


def test_an_interruption_before_the_first_step_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(self, *given):
        raise KeyboardInterrupt

    model, kept = tiny_model("bert"), KeptTraining(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Targets, "loss", interrupted)
        with pytest.raises(KeyboardInterrupt):
            distillation_of(model)(cut(model), kept)
    assert not list(tmp_path.iterdir())
    distillation_of(model)(cut(model), kept)


def no_hooks(model):
    return not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_checkpoint_of_another_training_is_not_used(tmp_path):
    model, kept = tiny_model("bert"), KeptTraining(tmp_path)
    distillation_of(model, steps=3)(cut(model), kept)
    for changes, units in (({"steps": 2}, None), ({"seed": 5}, None), ({}, [Unit(0, 2)])):
        given = {"steps": 3, **changes}
        one, other = (cut(model, units) if units else cut(model) for _ in range(2))
        distillation_of(model, **given)(one, kept)
        distillation_of(model, **given)(other)
        assert same(weights(one.model), weights(other.model))


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x02\0\0\0\0\0\0\0{}"])
def test_a_damaged_checkpoint_says_what_to_do(content, tmp_path):
    (tmp_path / TRAINING_FILE).write_bytes(content)
    model = tiny_model("bert")
    with pytest.raises(gg.RunFolderError, match="delete it; the training starts again"):
        distillation_of(model)(cut(model), KeptTraining(tmp_path))


def test_a_checkpoint_with_other_tensors_is_damaged(tmp_path):
    model, kept = tiny_model("bert"), KeptTraining(tmp_path)
    training, sites = distillation_of(model), cut(model)
    kept.save(training.state(sites), 2, {"weight.x": torch.zeros(2)})
    with pytest.raises(gg.RunFolderError, match="its tensors are not those of the model"):
        training(sites, kept)


def test_a_loss_that_is_no_number_is_refused():
    model = tiny_model("bert")
    sites = cut(model)
    with torch.no_grad():
        sites.model.bert.encoder.layer[1].output.LayerNorm.bias[0] = torch.nan
    with pytest.raises(NonFiniteScore, match=r"NaN or infinite at step 1.*--recover least-squares"):
        distillation_of(model)(sites)
    assert no_hooks(sites.model)


def test_few_rows_for_many_steps_are_told(monkeypatch):
    monkeypatch.setattr(distillation, "MANY", 2)
    model = tiny_model("bert")
    with pytest.warns(UserWarning, match=r"goes over its 9 rows 3 times in 3 steps: give more rows"):
        distillation_of(model, steps=3, rows=ROWS[:1])(cut(model))


def test_weights_in_half_precision_are_trained_in_float32():
    model = tiny_model("bert", dtype=torch.bfloat16)
    sites, training = cut(model), distillation_of(model)
    training(sites)
    assert {parameter.dtype for parameter in sites.model.parameters()} == {torch.float32}


OPTIONS = {
    "rounds": 3, "samples": 24, "calibration_tokens": 600, "tokens_per_batch": 128, "measure_speed": False, "macs": 0.5
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distilled")
    tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny_rows(200)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def compress(folder):
    given = {**OPTIONS, "recover": "distill", "recover_steps": 8}
    return lambda **more: gg.compress(folder / "model", folder / "rows.jsonl", **{**given, **more})


@pytest.fixture(scope="module")
def finished(folder, compress):
    return compress(out=folder / "run")


def lines(folder):
    return [json.loads(line)["seal"] for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_a_run_is_fitted_like_least_squares_and_then_trained(finished, folder, compress):
    fitted = compress(out=folder / "fitted", recover="least-squares", recover_steps=300)
    assert lines(folder / "run") == lines(folder / "fitted")
    assert not same(weights(finished.model), weights(fitted.model))
    expected = recovered(fitted, finished)
    assert same(weights(finished.model), weights(expected))
    assert same(weights(gg.load(folder / "run" / "model")), weights(finished.model))
    assert fitted.distilled is None
    assert "distilled" not in fitted.summary()


def recovered(fitted, run):
    """The fitted model after the training, by hand."""
    model = copy.deepcopy(fitted.model)
    run.recovery.training(find_sites(model))
    return model


def test_quality_before_and_after_training_is_recorded_and_shown(finished, folder):
    result = json.loads((folder / "run" / "run.json").read_text())["result"]
    step = finished.steps[finished.solution.step]
    assert result["distilled"]["steps"] == 8
    before, after = result["distilled"]["quality"]["loss"]
    assert before == step.quality["loss"]
    assert after == finished.solution.quality["loss"] == result["quality"]["loss"][1]
    assert before != after
    assert "8 steps of distillation" in repr(finished)
    sentence = "What is left was trained for 8 steps towards the unpruned model"
    assert sentence in (folder / "run" / "model" / "README.md").read_text()
    assert sentence in (folder / "run" / "report.html").read_text()
    assert not (folder / "run" / TRAINING_FILE).exists()


@pytest.mark.parametrize("distilled", [{"steps": 8}, {"steps": 8, "quality": {"loss": [1.0, 2.0]}}, "yes"])
def test_a_damaged_record_of_the_training_is_refused(distilled, finished, folder, tmp_path):
    header = json.loads((folder / "run" / "run.json").read_text())
    header["result"]["distilled"] = distilled
    (tmp_path / "run.json").write_text(json.dumps(header))
    (tmp_path / "journal.jsonl").write_bytes((folder / "run" / "journal.jsonl").read_bytes())
    with pytest.raises(gg.RunFolderError, match=r"distilled|the measures of quality after training are loss"):
        Journal.read(tmp_path)


def test_any_step_can_be_taken_out(finished, folder):
    step = finished.solution.step
    assert same(weights(finished.at(step)), weights(finished.model))
    other = finished.at(1)
    assert same(weights(finished.at(1)), weights(other))
    taken = gg.take_step(folder / "run", 1, out=folder / "taken", latency=False)
    assert same(weights(taken.model), weights(other))
    assert taken.distilled["quality"]["loss"][1] != taken.steps[1].quality["loss"]
    assert not (folder / "taken" / TRAINING_FILE).exists()
    assert same(weights(finished.at(0)), weights(finished.unpruned))


def test_a_run_that_was_interrupted_in_training_ends_alike(finished, folder, compress, monkeypatch, tmp_path):
    loss, calls = Targets.loss, []

    def interrupted(self, *given):
        calls.append(given)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return loss(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Targets, "loss", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compress(out=tmp_path / "run")
    assert (tmp_path / "run" / TRAINING_FILE).exists()
    with pytest.raises(gg.RunFolderError, match="tokens_per_batch was 128 and is now 256"):
        compress(out=tmp_path / "run", resume=True, tokens_per_batch=256)
    calls.clear()
    monkeypatch.setattr(Targets, "loss", lambda self, *given: (calls.append(given), loss(self, *given))[1])
    run = compress(out=tmp_path / "run", resume=True)
    assert len(calls) == 4
    assert same(weights(run.model), weights(finished.model))
    assert run.summary()["distilled"] == finished.summary()["distilled"]
    assert not (tmp_path / "run" / TRAINING_FILE).exists()


def test_a_run_of_an_older_version_goes_on(folder, tmp_path):
    given = {"stop": "heads=1", "samples": 12, "latency": False, "out": tmp_path / "run"}
    prune = partial(gg.prune, folder / "model", folder / "rows.jsonl", **given)
    prune()
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    assert header["config"].pop("recover_steps") == 300
    (tmp_path / "run" / "run.json").write_text(json.dumps(header))
    assert prune(resume=True).solution.step == 1


def test_a_run_that_keeps_every_unit_trains_nothing(folder):
    run = gg.prune(
        folder / "model", folder / "rows.jsonl", stop="knee", samples=12, recover="distill", recover_steps=2,
        protect=[(0, 0), (0, 1), (0, 2), 1], calibration_tokens=200,
    )  # fmt: skip
    assert (run.distilled is None) == (run.solution.step == 0)
    assert same(weights(run.at(0)), weights(run.unpruned))


def test_commands(folder, tmp_path, capsys):
    out, taken = tmp_path / "run", tmp_path / "taken"
    options = ["--stop", "heads=2", "--samples", "24", "--calibration-tokens", "300", "--no-latency", "--quiet"]
    given = [str(folder / "model"), "--data", str(folder / "rows.jsonl"), "--out", str(out), *options]
    assert main(["prune", *given, "--recover", "distill", "--recover-steps", "3"]) == 0
    assert "What is left was trained for 3 steps" in capsys.readouterr().out.replace("\n", " ")
    assert main(["prune", "--from-run", str(out), "--at-step", "2", "--out", str(taken), "--no-latency", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["distilled"]["steps"] == 3
    assert same(weights(gg.load(taken / "model")), weights(gg.load(out / "model")))
    assert main(["table", str(out)]) == 0
    assert main(["prune", *given[:-1], "--out", str(tmp_path / "x"), "--recover-steps", "3"]) == 2
    assert "recover_steps are those of a distillation" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recover": "least-squares"}, "recover_steps are those of a distillation: set recover to 'distill'"),
        ({"recover": "none"}, "recover_steps are those of a distillation"),
        ({"recover_steps": 0}, "recover_steps must be at least 1"),
        ({"recover_steps": "many"}, "recover_steps must be a valid integer"),
        ({"recover": "lora"}, "recover must be 'none', 'least-squares', 'gates', 'mean' or 'distill'"),
    ],
)
def test_wrong_settings_are_refused(options, message, compress):
    with pytest.raises(gg.GnormError, match=message):
        compress(**options)


def test_a_model_on_several_devices_is_refused(folder):
    with pytest.raises(gg.GnormError, match="device_map can't be combined with recover"):
        gg.prune(folder / "model", folder / "rows.jsonl", recover="distill", device_map="auto")


@pytest.mark.slow
def test_a_trained_model_comes_closer_on_rows_that_it_was_not_trained_on(minilm):
    """Cut to 30 % of the multiplications in one round, and trained on some 600 tweets; the rows are 400 test rows."""
    given = {"macs": 0.3, "rounds": 1, "samples": 64, "calibration_tokens": 16384, "eval_samples": 400}
    data = str(shared("data/tweets.jsonl"))
    run = gg.compress(minilm, data, measure_speed=False, recover="distill", recover_steps=150, **given)
    fitted = at_step(run.unpruned, run.steps, 1, "both", replace(run.recovery, training=None))
    settings = Settings(method="joint-refit", **given)
    rows = load_sets(*load_inputs(str(minilm), None, settings, "both"), data, None, settings)[TEST]
    before, after = (divergence(run.unpruned, model, rows) for model in (fitted, run.model))
    assert after < 0.97 * before


def divergence(unpruned, model, rows):
    """The mean divergence of a classifier from another, in float32."""
    one, other = (copy.deepcopy(each).float() for each in (unpruned, model))
    with torch.no_grad():
        found = [[each(**batch.inputs).logits.log_softmax(-1) for each in (one, other)] for batch in rows]
    return sum(float((p.exp() * (p - q)).sum()) for p, q in found) / rows.rows
