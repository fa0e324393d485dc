"""Image classification: folders and tables of images, the processor, and what follows up to a saved model."""

from __future__ import annotations

import importlib.util
import json
import shutil

import datasets
import numpy as np
import pytest
import torch
import transformers
from conftest import tiny_model
from PIL import Image

import greedy_gnorm as gg
from greedy_gnorm.cli.app import main
from greedy_gnorm.data.loading import evaluation_batches, scoring_batches
from greedy_gnorm.data.sources import read_splits
from greedy_gnorm.model.checkpoint import load, load_tokenizer
from greedy_gnorm.model.families import image_tokens
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import evaluate
from greedy_gnorm.passes.gradients import gradient_norms
from greedy_gnorm.passes.speed import multiplications, possible
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.images import Images
from greedy_gnorm.tasks.objectives import OBJECTIVES
from greedy_gnorm.tasks.task import task_of

CLASSES = ("cat", "dog", "owl")
NAMES = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: place for place, name in enumerate(CLASSES)}}
TOKENS = 5  # four patches, and one that the classifier reads


def tiny_vit(**changes):
    return tiny_model("vit", **NAMES, **changes)


def tiny_processor(size=8):
    return transformers.ViTImageProcessorPil(size={"height": size, "width": size})


def picture(seed, mode="RGB"):
    channels = {"RGB": (3,), "RGBA": (4,), "L": ()}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 10, *channels), dtype=np.uint8)
    return Image.fromarray(pixels, mode=None)


def write_images(folder, count, seed=0):
    """Images of all classes in turn, a folder for each class."""
    for place in range(count):
        home = folder / CLASSES[place % len(CLASSES)]
        home.mkdir(parents=True, exist_ok=True)
        picture(1000 * seed + place).save(home / f"{place:03}.png")


@pytest.fixture
def vit_folder(tmp_path):
    folder = tmp_path / "vit"
    tiny_vit().save_pretrained(folder)
    tiny_processor().save_pretrained(folder)
    return folder


@pytest.fixture
def pets(tmp_path):
    """Three splits of images."""
    folder = tmp_path / "pets"
    for seed, (name, count) in enumerate({"train": 48, "val": 12, "test": 12}.items()):
        write_images(folder / name, count, seed)
    return folder


def batches_of(data, model=None, **settings):
    model = model or tiny_vit()
    return evaluation_batches(model, tiny_processor(), task_of(model), data, Settings(**settings))


def pixels_of(batches):
    order = np.argsort([row for batch in batches for row in batch.rows])
    return torch.cat([batch.inputs["pixel_values"] for batch in batches])[torch.from_numpy(order)]


def labels_of(batches):
    order = np.argsort([row for batch in batches for row in batch.rows])
    return torch.cat([batch.labels for batch in batches])[torch.from_numpy(order)].tolist()


def test_the_task_is_that_of_one_class():
    assert type(task_of(tiny_vit())) is Images
    for changes in ({"num_labels": 1}, {"problem_type": "multi_label_classification"}):
        with pytest.raises(gg.UnsupportedModel, match="supported tasks"):
            task_of(tiny_model("vit", **changes))


def test_folders_are_splits_and_classes(pets):
    splits = read_splits(pets)
    assert {name: len(table) for name, table in splits.items()} == {"train": 48, "validation": 12, "test": 12}
    assert splits["test"][1] == {"image": str(pets / "test" / "cat" / "003.png"), "label": "cat"}
    (name,) = read_splits(pets / "train")
    assert name == "all rows"


def test_a_class_may_have_the_name_of_a_split(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "bus").mkdir()
    picture(0).save(tmp_path / "train" / "a.png")
    picture(1).save(tmp_path / "bus" / "a.jpg")
    (tmp_path / "bus" / "notes.md").write_text("no image")
    (table,) = read_splits(tmp_path).values()
    assert table["label"] == ["bus", "train"]


def test_images_without_classes_have_no_labels(pets, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in (pets / "test").rglob("*.png"):
        shutil.copy(path, flat)
    assert read_splits(flat)["all rows"].column_names == ["image"]
    with pytest.raises(gg.DataError, match="Without labels, use --labels own"):
        batches_of(flat)
    assert batches_of(flat, labels="own").rows == 12
    shutil.rmtree(pets / "test")
    shutil.move(flat, pets / "test")  # a test split whose labels are hidden
    assert batches_of(pets).texts[0][0] == str(pets / "val" / "cat" / "000.png")


@pytest.mark.parametrize(
    ("place", "message"),
    [("extra/cat/a.png", "folders of splits and other folders: extra"), ("test/a.png", "images beside the folders")],
)
def test_mixed_folders_are_refused(pets, place, message):
    (pets / place).parent.mkdir(parents=True, exist_ok=True)
    picture(0).save(pets / place)
    with pytest.raises(gg.DataError, match=message):
        read_splits(pets)


def test_a_folder_without_images_is_refused(tmp_path):
    (tmp_path / "cat").mkdir()
    with pytest.raises(gg.DataError, match="no folders of images"):
        read_splits(tmp_path)


def test_inputs_are_those_of_the_processor(pets):
    batches, paths = batches_of(pets), sorted((pets / "test").rglob("*.png"))
    expected = tiny_processor()([Image.open(path) for path in paths], return_tensors="pt")["pixel_values"]
    assert torch.equal(pixels_of(batches), expected)
    assert labels_of(batches) == [CLASSES.index(path.parent.name) for path in paths]
    assert batches.texts == tuple((str(path), None) for path in paths)
    assert batches.lengths() == [TOKENS] * 12


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "stored", "in memory", "rows"])
def test_tables_give_the_same_images(kind, pets, tmp_path, monkeypatch):
    folder = batches_of(pets)
    paths = [text for text, _ in folder.texts]
    rows = [{"img": str(path)[len(str(tmp_path)) + 1 :], "label": path.split("/")[-2]} for path in paths]
    table = tmp_path / f"table.{kind}"
    if kind == "jsonl":
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        datasets.Dataset.from_list(rows).to_csv(table)
    else:
        monkeypatch.chdir(tmp_path)
        stored = datasets.Dataset.from_list(rows).cast_column("img", datasets.Image())
        if kind == "parquet":
            stored.to_parquet(table)
        elif kind == "stored":
            stored.save_to_disk(table)
        else:
            table = stored if kind == "in memory" else [{**row, "img": Image.open(row["img"])} for row in rows]
    found = batches_of(table)
    assert torch.equal(pixels_of(found), pixels_of(folder))
    assert labels_of(found) == labels_of(folder)
    assert found.fingerprint == folder.fingerprint  # wherever the files are
    assert len({text for text, _ in found.texts}) == 12


@pytest.mark.parametrize("mode", ["RGBA", "L"])
def test_all_images_get_the_channels_of_the_model(mode, pets):
    picture(0, mode).save(pets / "test" / "cat" / "000.png")
    assert pixels_of(batches_of(pets)).shape == (12, 3, 8, 8)


def test_what_can_not_be_read_is_named(pets, tmp_path):
    (pets / "test" / "cat" / "000.png").write_text("no image")
    whole = (pets / "test" / "owl" / "002.png").read_bytes()
    (pets / "test" / "owl" / "002.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(gg.DataError, match=r"Can't read 2 of 12 images: .*cat/000.png \(.*owl/002.png \("):
        batches_of(pets)
    rows = [{"image": "gone.png", "label": "cat"}, {"image": None, "label": "dog"}]
    with pytest.raises(gg.DataError, match="no image in 'image' of row 1"):
        batches_of(rows)
    with pytest.raises(gg.DataError, match=r"Can't read 1 of 2 images: gone\.png"):
        batches_of([rows[0], {"image": str(pets / "test" / "dog" / "001.png"), "label": "dog"}])
    with pytest.raises(gg.DataError, match="holds int, neither paths nor images, in rows 0, 1"):
        batches_of([{"image": 3, "label": "cat"}, {"image": 4, "label": "dog"}])
    with pytest.raises(gg.DataError, match="Which column is the image"):
        batches_of([{"words": "a", "label": "cat"}])


def test_a_processor_must_fit_the_model(pets, tmp_path):
    model = tiny_vit()
    task, settings = task_of(model), Settings()
    with pytest.raises(gg.DataError, match="gives images of 3 x 16 x 16 numbers, but the model takes 3 x 8 x 8"):
        evaluation_batches(model, tiny_processor(16), task, pets, settings)
    with pytest.raises(gg.DataError, match="images require a processor"):
        evaluation_batches(model, None, task, pets, settings)
    model.save_pretrained(tmp_path / "bare")
    with pytest.raises(gg.GnormError, match="Can't load an image processor from"):
        load_tokenizer(tmp_path / "bare", config=model.config)


def test_pillow_is_asked_for(vit_folder, pets, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "PIL" else find(name, *rest))
    with pytest.raises(gg.GnormError, match=r"pip install 'greedy-gnorm\[images\]'"):
        load_tokenizer(vit_folder, config=load(vit_folder).config)
    with pytest.raises(gg.GnormError, match=r"pip install 'greedy-gnorm\[images\]'"):
        batches_of(pets)


def test_calibration_counts_tokens_without_decoding(pets, monkeypatch):
    model = tiny_vit()
    monkeypatch.setattr(Images, "_decoded", lambda task, row: pytest.fail("decoded"))
    assert task_of(model).token_counts([None] * 7, tiny_processor(), TOKENS, Settings()) == [TOKENS] * 7


def test_measures_and_loss_are_those_of_transformers(pets):
    model = tiny_vit()
    batches = batches_of(pets, model)
    found = evaluate(find_sites(model), batches)
    with torch.no_grad():
        theirs = model(pixel_values=pixels_of(batches), labels=torch.tensor(labels_of(batches)))
    right = theirs.logits.argmax(-1) == torch.tensor(labels_of(batches))
    assert found["accuracy"] == pytest.approx(float(right.float().mean()))
    assert found["loss"] == pytest.approx(float(theirs.loss), rel=1e-6)


@pytest.mark.parametrize("objective", ["logit-norm", "loss"])
def test_norms_match_a_backward_pass_per_image(objective, pets):
    model = tiny_vit(dtype=torch.float64)
    batches = scoring_batches(model, tiny_processor(), task_of(model), pets, Settings(tokens_per_batch=20))
    assert len(batches) == 3
    sites = find_sites(model, "heads")
    norms = gradient_norms(sites, batches, OBJECTIVES[objective])
    slow = {name: [np.zeros(site.total) for site in sites] for name in "qkv"}
    for image, label in zip(pixels_of(batches), labels_of(batches), strict=True):
        model.zero_grad()
        output = model(pixel_values=image[None], labels=torch.tensor([label]))
        (output.loss if objective == "loss" else output.logits.norm()).backward()
        for site in sites:
            for name in "qkv":
                weight = site.inputs[site.parts[name]].weight.grad.view(site.total, site.sizes[name], -1)
                slow[name][site.index] += weight.flatten(1).norm(dim=1).numpy() / 12
    for name in "qkv":
        for ours, theirs in zip(norms[name], slow[name], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9)


def test_tokens_and_multiplications_follow_from_the_configuration():
    model = tiny_vit()
    assert image_tokens(model.config) == TOKENS
    assert image_tokens(tiny_model("vit", image_size=(8, 12)).config) == 7
    assert image_tokens(tiny_model("bert").config) is None
    assert possible(model, [(1, 32), (8, 128), (8, 999)]) == [(1, TOKENS), (8, TOKENS)]
    layer = 4 * 16 * 16 * TOKENS + 2 * 16 * 24 * TOKENS + 2 * 16 * TOKENS * TOKENS
    assert multiplications(model, TOKENS) == 4 * (3 * 4 * 4) * 16 + 3 * layer + 16 * 3


def test_from_a_folder_to_a_model_and_its_report(vit_folder, pets, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    options = ["--macs", "0.6", "--rounds", "3", "--shape", "4", "--out", str(out)]
    assert main(["compress", "vit", "--data", "pets", *options]) == 0
    assert "calibration: 48 rows, 240 tokens" in capsys.readouterr().err
    header = json.loads((out / "run.json").read_text("utf-8"))
    assert header["shape"] == {"rows": 4, "tokens": TOKENS, "squares": TOKENS**2}
    assert header["data"]["test"]["tokens"] == 12 * TOKENS
    assert "pets/test/" in (out / "predictions.json").read_text("utf-8")
    card = (out / "model" / "README.md").read_text("utf-8")
    assert "pipeline_tag: image-classification" in card
    assert "processor = AutoImageProcessor.from_pretrained(FOLDER)" in card
    assert "Tokenizer" not in card
    model = transformers.AutoModelForImageClassification.from_pretrained(out / "model", trust_remote_code=True)
    assert find_sites(model).removed()
    batches = batches_of(pets)
    ours, theirs = gg.load(out / "model"), model.eval()
    with torch.no_grad():
        logits = theirs(pixel_values=pixels_of(batches)).logits
        assert torch.equal(ours(pixel_values=pixels_of(batches)).logits, logits)
    classify = transformers.pipeline("image-classification", str(out / "model"), trust_remote_code=True)
    (best, *_) = classify(batches.texts[0][0])
    assert best["label"] == CLASSES[int(logits[0].argmax())]
    assert best["score"] == pytest.approx(float(logits[0].softmax(-1).max()), rel=1e-5)
    measured = gg.evaluate(out, pets)
    assert measured.quality["accuracy"][1] == pytest.approx(
        float((logits.argmax(-1) == torch.tensor(labels_of(batches))).float().mean())
    )
    taken = gg.take_step(out, 1, out=tmp_path / "taken", latency=False)  # its calibration images are read again
    assert len(taken.removed) > 0
    assert (tmp_path / "taken" / "model" / "preprocessor_config.json").exists()


def test_own_labels_and_ready_batches(pets):
    model, processor = tiny_vit(), tiny_processor()
    options = {"stop": "heads=2", "latency": False}
    run = gg.prune(model, pets, tokenizer=processor, labels="own", objective="loss", **options)
    assert run.steps[0].quality["agreement"] == 1
    sets = [batches_of(pets / name) for name in ("train", "test")]
    data, eval_data = (
        [{"pixel_values": batch.inputs["pixel_values"], "labels": batch.labels} for batch in batches]
        for batches in sets
    )
    ready = gg.compress(model, data, eval_data=eval_data, macs=0.7, rounds=2)
    assert ready.header["data"]["evaluation"]["tokens"] == 12 * TOKENS
    with pytest.warns(UserWarning, match="48 of 48 scoring rows are also evaluation rows"):
        gg.prune(model, data, eval_data=data, **options)


def test_a_shape_of_other_tokens_is_refused(pets):
    with pytest.raises(gg.GnormError, match="an image has 5 tokens here"):
        gg.compress(tiny_vit(), pets, tokenizer=tiny_processor(), macs=0.6, shape="8x128")


def test_onnx_gives_the_same_logits(vit_folder, pets, tmp_path):
    pytest.importorskip("onnxruntime")
    from greedy_gnorm.deployment.export import export, onnx_runner

    exported = export(vit_folder, out=tmp_path / "onnx")
    assert [(row["batch"], row["tokens"]) for row in exported.report["latency"]] == [(1, TOKENS), (8, TOKENS)]
    inputs = {"pixel_values": pixels_of(batches_of(pets))}
    with torch.no_grad():
        torch.testing.assert_close(
            onnx_runner(exported.folder / "model.onnx")(inputs).logits, load(vit_folder)(**inputs).logits
        )
