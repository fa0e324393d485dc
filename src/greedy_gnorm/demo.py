"""The demo: sentences in 20 languages, and a small classifier trained to tell the languages apart."""

import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaForSequenceClassification

SENTENCES = Path(__file__).with_name("demo_sentences.tsv")
"""A language and a sentence per line, from Django's translations; `experiments/demo_sentences.py` writes it."""

LANGUAGES = (
    "ar", "bg", "de", "el", "en", "es", "fr", "hi", "it", "ja",
    "nl", "pl", "pt", "ru", "sw", "th", "tr", "ur", "vi", "zh",
)  # fmt: skip
LABELS = {language: index for index, language in enumerate(LANGUAGES)}

SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
BOS_ID, PAD_ID, EOS_ID, UNK_ID, MASK_ID = range(len(SPECIAL))

Row = dict[str, str]
Sentences = list[tuple[str, str]]
Example = tuple[list[int], int]


@dataclass(frozen=True)
class Recipe:
    """Everything besides the seed that determines the demo's model."""

    per_language: int = 305
    pieces: int = 6000
    longest: int = 40
    layers: int = 4
    heads: int = 8
    hidden: int = 128
    feed_forward: int = 256
    initial_spread: float = 0.05
    dropout: float = 0.1
    masked: float = 0.15
    epochs: int = 5
    batch: int = 32
    learning_rate: float = 1e-3


@dataclass(frozen=True)
class DemoAssets:
    """The folders of the demo's model and data, and the model's accuracy on the test split."""

    model: Path
    data: Path
    accuracy: float


def corpus(per_language: int = Recipe.per_language) -> Sentences:
    """Return (sentence, language) pairs: each language's longest sentences, in a fixed order."""
    pairs: Sentences = []
    for language, lines in groupby(SENTENCES.read_text(encoding="utf-8").splitlines(), lambda line: line[:2]):
        pairs += [(line.partition("\t")[2], language) for line in islice(lines, per_language)]
    return pairs


def prepare(
    cache: Path | None = None, *, seed: int = 0, say: Callable[[str], None] = print, recipe: Recipe | None = None
) -> DemoAssets:
    """Return the demo's model and data from the cache folder, training and storing them first if needed."""
    recipe = recipe or Recipe()
    pairs = corpus(recipe.per_language)
    root = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "greedy-gnorm"
    home = root / f"demo-{_fingerprint(pairs, seed, recipe)}"
    if not _complete(home):
        root.mkdir(parents=True, exist_ok=True)
        # Built in a temporary folder and moved in one step, so that an interruption leaves nothing incomplete
        with tempfile.TemporaryDirectory(dir=root, prefix=".building-") as temporary:
            built = Path(temporary) / home.name
            _build(built, _split(pairs, seed), seed, recipe, say)
            _move(built, home)
    return _assets(home)


MODEL, DATA = "languages-classifier", "languages.jsonl"
"""What the model's folder and the file of sentences are called, in titles too."""


def _split(pairs: Sentences, seed: int) -> list[Row]:
    """Split each language's sentences: 70 % train, 15 % validation, 15 % test."""
    rng = random.Random(seed)
    rows: list[Row] = []
    for language in LANGUAGES:
        texts = [text for text, owner in pairs if owner == language]
        rng.shuffle(texts)
        held_out = round(0.15 * len(texts))
        for index, text in enumerate(texts):
            split = "validation" if index < held_out else "test" if index < 2 * held_out else "train"
            rows.append({"text": text, "label": language, "split": split})
    rng.shuffle(rows)
    return rows


def _fingerprint(pairs: Sentences, seed: int, recipe: Recipe) -> str:
    """A short hash of everything that a build depends on."""
    made_from = json.dumps([pairs, seed, asdict(recipe)], ensure_ascii=False)
    return hashlib.sha256(made_from.encode()).hexdigest()[:12]


def _complete(home: Path) -> bool:
    """Whether a cache folder has all files."""
    model = (home / MODEL / name for name in ("config.json", "model.safetensors", "tokenizer.json"))
    return all(path.is_file() for path in (home / "demo.json", home / DATA, *model))


def _move(built: Path, home: Path) -> None:
    """Move a finished build to its place, unless another process was faster."""
    if not _complete(home):
        shutil.rmtree(home, ignore_errors=True)
        try:
            os.replace(built, home)
        except OSError:
            if not _complete(home):
                raise


def _assets(home: Path) -> DemoAssets:
    """The assets in a complete cache folder."""
    accuracy = json.loads((home / "demo.json").read_text(encoding="utf-8"))["accuracy"]
    return DemoAssets(home / MODEL, home / DATA, float(accuracy))


def _build(home: Path, rows: list[Row], seed: int, recipe: Recipe, say: Callable[[str], None]) -> None:
    """Train tokenizer and model, and write them with the data and the test accuracy."""
    say(f"training the demo model: {len(rows)} sentences, {len(LANGUAGES)} languages, {recipe.epochs} epochs")
    tokenizer = _train_tokenizer([row["text"] for row in rows if row["split"] == "train"], recipe)
    examples = {split: _encode(tokenizer, rows, split) for split in ("train", "validation", "test")}
    # Only the CPU generator is used, and restored afterwards; a caller's no_grad or inference mode is suspended
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.default_generator.manual_seed(seed)
        model = _new_model(len(tokenizer), recipe)
        _train(model, examples["train"], examples["validation"], random.Random(seed), recipe, say)
    accuracy = _accuracy(model, examples["test"])
    say(f"test accuracy {accuracy:.4f}")
    model.save_pretrained(home / MODEL)
    tokenizer.save_pretrained(home / MODEL)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (home / DATA).write_text("".join(lines), encoding="utf-8")
    record = {"accuracy": accuracy, "seed": seed, "recipe": asdict(recipe)}
    (home / "demo.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _train_tokenizer(texts: list[str], recipe: Recipe) -> PreTrainedTokenizerFast:
    """Train a Unigram tokenizer with XLM-RoBERTa's special tokens and template."""
    core = Tokenizer(models.Unigram())
    core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=recipe.pieces, special_tokens=list(SPECIAL.values()), unk_token="<unk>", show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    core.model = _deterministic_model(core)
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", BOS_ID), ("</s>", EOS_ID)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        model_max_length=recipe.longest,
        cls_token=SPECIAL["bos_token"],
        sep_token=SPECIAL["eos_token"],
        **SPECIAL,
    )


def _deterministic_model(core: Tokenizer) -> models.Unigram:
    """Rebuild a trained Unigram model so that the same sentences always give the same pieces, scores and ids."""
    vocabulary = json.loads(core.to_str())["model"]["vocab"]
    special, pieces = vocabulary[: len(SPECIAL)], vocabulary[len(SPECIAL) :]
    # The trainer gives the characters it had pruned scores 0.0001 apart, just above the lowest, in random order, and
    # the other scores have rounding noise: a common floor removes the former, rounding the latter
    floor = min(score for _, score in pieces) + 0.1
    ordered = sorted((-round(max(score, floor), 6), piece) for piece, score in pieces)
    return models.Unigram([*map(tuple, special), *((piece, -cost) for cost, piece in ordered)], unk_id=UNK_ID)


def _encode(tokenizer: PreTrainedTokenizerFast, rows: list[Row], split: str) -> list[Example]:
    """Turn one split into (token ids, label id) pairs."""
    chosen = [row for row in rows if row["split"] == split]
    ids = tokenizer([row["text"] for row in chosen], truncation=True)["input_ids"]
    return [(sentence, LABELS[row["label"]]) for sentence, row in zip(ids, chosen, strict=True)]


def _new_model(pieces: int, recipe: Recipe) -> XLMRobertaForSequenceClassification:
    """Create the untrained classifier."""
    config = XLMRobertaConfig(
        vocab_size=pieces,
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        intermediate_size=recipe.feed_forward,
        hidden_dropout_prob=recipe.dropout,
        attention_probs_dropout_prob=recipe.dropout,
        max_position_embeddings=recipe.longest + PAD_ID + 1,  # positions start after the padding id
        type_vocab_size=1,
        initializer_range=recipe.initial_spread,
        bos_token_id=BOS_ID,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        label2id=LABELS,
        id2label={index: language for language, index in LABELS.items()},
    )
    model = XLMRobertaForSequenceClassification(config)  # type: ignore[no-untyped-call]
    torch.nn.Module.float(model)  # in spite of the caller's default dtype
    return model


def _train(
    model: XLMRobertaForSequenceClassification,
    train: list[Example],
    validation: list[Example],
    rng: random.Random,
    recipe: Recipe,
    say: Callable[[str], None],
) -> None:
    """Fit the model with AdamW under a one-cycle schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    steps = recipe.epochs * len(range(0, len(train), recipe.batch))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=steps)
    for epoch in range(1, recipe.epochs + 1):
        start, total = time.perf_counter(), 0.0
        model.train()
        for batch in _batches(train, recipe.batch, rng):
            loss = model(**_mask(_collate(batch), recipe.masked)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += loss.item() * len(batch)
        accuracy = _accuracy(model, validation)
        seconds = time.perf_counter() - start
        say(f"epoch {epoch}: loss {total / len(train):.3f}, validation accuracy {accuracy:.4f}, {seconds:.1f} s")


def _batches(examples: list[Example], size: int, rng: random.Random) -> list[list[Example]]:
    """Group examples into shuffled batches of similar length, which need little padding."""
    order = sorted(examples, key=lambda example: len(example[0]) + rng.uniform(-3, 3))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    rng.shuffle(batches)
    return batches


def _collate(batch: list[Example]) -> dict[str, torch.Tensor]:
    """Pad a batch into the model's arguments."""
    ids = pad_sequence([torch.tensor(ids) for ids, _ in batch], batch_first=True, padding_value=PAD_ID)
    labels = torch.tensor([label for _, label in batch])
    return {"input_ids": ids, "attention_mask": (ids != PAD_ID).long(), "labels": labels}


def _mask(arguments: dict[str, torch.Tensor], share: float) -> dict[str, torch.Tensor]:
    """Mask a random share of the tokens, so that the model does not depend on a few memorised words."""
    ids = arguments["input_ids"]
    hidden = (torch.rand(ids.shape) < share) & (ids >= len(SPECIAL))
    return arguments | {"input_ids": ids.masked_fill(hidden, MASK_ID)}


@torch.no_grad()
def _accuracy(model: XLMRobertaForSequenceClassification, examples: list[Example]) -> float:
    """The share of correctly labelled examples; leaves the model in evaluation mode."""
    model.train(False)
    right = 0
    for start in range(0, len(examples), 128):
        batch = _collate(examples[start : start + 128])
        right += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
    return right / len(examples)
