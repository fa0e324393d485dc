"""The embedded default: its sentences, its tokenizer, its cache and its model."""

import json
import re
from collections import Counter
from pathlib import Path

import demo_sentences
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from greedy_gnorm import demo

TINY = demo.Recipe(per_language=20, pieces=1500, layers=1, heads=2, hidden=16, feed_forward=16, epochs=1)


def silent(_line: str) -> None:
    """Swallow progress lines."""


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    return demo.corpus()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, demo.DemoAssets, list[str]]:
    cache, lines = tmp_path_factory.mktemp("cache"), list[str]()
    return cache, demo.prepare(cache, say=lines.append, recipe=TINY), lines


def test_corpus_is_large_and_balanced(pairs: list[tuple[str, str]]) -> None:
    per_language = Counter(language for _, language in pairs)
    assert list(per_language) == list(demo.LANGUAGES)
    assert len(per_language) == 20
    assert 5500 <= len(pairs) <= 6500
    assert min(per_language.values()) >= 0.8 * max(per_language.values())


def test_no_sentence_occurs_twice(pairs: list[tuple[str, str]]) -> None:
    assert len({text.casefold() for text, _ in pairs}) == len(pairs)


def test_sentences_are_clean(pairs: list[tuple[str, str]]) -> None:
    for text, _ in pairs:
        assert not re.search(r"%[(\w%]|[{}<>]|&\w+;|\s\s|[\0\n]", text), text
        assert text == text.strip()
        assert demo_sentences.letters(text) >= demo_sentences.LEAST_LETTERS


def test_the_sentences_are_those_of_django() -> None:
    written = demo.SENTENCES.read_text(encoding="utf-8")
    assert demo_sentences.as_lines(demo_sentences.corpus()) == written, "constraints.txt has the version of Django"


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("Der Wert „%(value)s“ ist\n falsch.", "Der Wert ist falsch."),
        ('<a href="{url}">Siehe&nbsp;hier</a>: %s %(size).1f', "Siehe hier :"),
        ("{count} von %d, 100 %%", "von , 100"),
    ],
)
def test_clean(raw: str, clean: str) -> None:
    assert demo_sentences.clean(raw) == clean


def test_splits_are_stratified(pairs: list[tuple[str, str]]) -> None:
    rows = demo._split(pairs, 0)
    assert sorted((row["text"], row["label"]) for row in rows) == sorted(pairs)
    counts = Counter((row["label"], row["split"]) for row in rows)
    for language, total in Counter(language for _, language in pairs).items():
        for split, share in (("train", 0.7), ("validation", 0.15), ("test", 0.15)):
            assert abs(counts[language, split] - share * total) <= 2
    assert demo._split(pairs, 0) == rows
    assert demo._split(pairs, 1) != rows


def test_tokenizer_training_is_repeatable() -> None:
    texts = [text for text, _ in demo.corpus(TINY.per_language)]
    first, second = (demo._train_tokenizer(texts, TINY).backend_tokenizer.to_str() for _ in range(2))
    assert first == second


def test_tokenizer_loads_with_the_same_ids(built: tuple[Path, demo.DemoAssets, list[str]]) -> None:
    loaded = AutoTokenizer.from_pretrained(built[1].model)
    rows = [json.loads(line) for line in built[1].data.read_text(encoding="utf-8").splitlines()]
    trained = demo._train_tokenizer([row["text"] for row in rows if row["split"] == "train"], TINY)
    texts = [row["text"] for row in rows]
    assert loaded.get_vocab() == trained.get_vocab()
    assert loaded(texts, truncation=True)["input_ids"] == trained(texts, truncation=True)["input_ids"]
    assert loaded(texts[0], texts[1])["input_ids"] == trained(texts[0], texts[1])["input_ids"]
    assert loaded.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]) == [0, 1, 2, 3, 4]
    assert (loaded.pad_token, loaded.cls_token, loaded.sep_token) == ("<pad>", "<s>", "</s>")
    framed = loaded.convert_ids_to_tokens(loaded("und", "oder")["input_ids"])
    assert [token for token in framed if token in ("<s>", "</s>")] == ["<s>", "</s>", "</s>", "</s>"]
    assert max(map(len, loaded(texts, truncation=True)["input_ids"])) == TINY.longest


def test_assets_hold_together(built: tuple[Path, demo.DemoAssets, list[str]]) -> None:
    _, assets, lines = built
    rows = [json.loads(line) for line in assets.data.read_text(encoding="utf-8").splitlines()]
    model = AutoModelForSequenceClassification.from_pretrained(assets.model)
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    assert model.config.model_type == "xlm-roberta"
    assert set(model.config.label2id) == {row["label"] for row in rows} == set(demo.LANGUAGES)
    assert {row["split"] for row in rows} == {"train", "validation", "test"}
    assert demo._accuracy(model, demo._encode(tokenizer, rows, "test")) == assets.accuracy
    assert any(re.match(r"epoch 1: loss [\d.]+, validation accuracy [\d.]+, [\d.]+ s", line) for line in lines)


def test_cached_call_does_not_retrain(
    built: tuple[Path, demo.DemoAssets, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_build", lambda *_: pytest.fail("trained again"))
    assert demo.prepare(built[0], say=silent, recipe=TINY) == built[1]


def test_same_seed_same_weights(built: tuple[Path, demo.DemoAssets, list[str]], tmp_path: Path) -> None:
    again = demo.prepare(tmp_path, say=silent, recipe=TINY)
    assert (again.model / "model.safetensors").read_bytes() == (built[1].model / "model.safetensors").read_bytes()
    assert again.data.read_bytes() == built[1].data.read_bytes()


def test_seed_and_recipe_name_the_folder(pairs: list[tuple[str, str]]) -> None:
    names = {demo._fingerprint(pairs, 0, demo.Recipe()), demo._fingerprint(pairs, 1, demo.Recipe())}
    assert len(names | {demo._fingerprint(pairs, 0, TINY), demo._fingerprint(pairs[1:], 0, TINY)}) == 4


def test_interrupted_build_leaves_no_cache(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("test accuracy"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.prepare(tmp_path, say=interrupt, recipe=TINY)
    assert list(tmp_path.iterdir()) == []


def test_incomplete_cache_is_rebuilt(tmp_path: Path) -> None:
    assets = demo.prepare(tmp_path, say=silent, recipe=TINY)
    (assets.model / "model.safetensors").unlink()
    assert demo.prepare(tmp_path, say=silent, recipe=TINY) == assets
    assert (assets.model / "model.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir()] == [assets.data.parent.name]


def test_default_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home = demo.prepare(say=silent, recipe=TINY).data.parent
    assert home.parent == tmp_path / "greedy-gnorm"
    assert home.name.startswith("demo-")


def test_global_state_is_left_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
    with torch.inference_mode():
        demo.prepare(tmp_path, say=silent, recipe=TINY)
        assert not torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_num_threads(), torch.get_default_dtype()) == before[1:]


@pytest.mark.slow
def test_full_training_reaches_its_accuracy(tmp_path: Path) -> None:
    assets = demo.prepare(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(assets.model)
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (4, 8, 128)
    assert assets.accuracy >= 0.95
