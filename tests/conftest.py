"""Tiny models of every family, tiny data, and the trained ones where they lie beside the project."""

from __future__ import annotations

import gc
import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.data.encoding import encode
from greedy_gnorm.data.loading import both_rows, is_ready, ready_sets
from greedy_gnorm.data.splits import sampled, warn_of_overlap
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import task_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)  # two test processes with two threads each starve one another
transformers.utils.logging.disable_progress_bar()


def pytest_collection_finish() -> None:
    """Python no longer looks for garbage among the libraries, which would take a tenth of the time of the tests."""
    gc.collect()
    gc.freeze()


SHARED = Path(__file__).resolve().parents[2] / "shared"
WORDS = ("good", "bad", "film", "book", "very", "not", "the", "a", "was", "it", "plot", "actor", "dull", "fun", "end")

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 48,
    "num_labels": 3,
    "pad_token_id": 0,
}
GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "bos_token_id": 1, "eos_token_id": 2}
"""Four key/value heads with two query heads each, wider together than the hidden size."""
FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"max_position_embeddings": 49},
    "xlm-roberta": {"max_position_embeddings": 49},
    "camembert": {"max_position_embeddings": 49},
    "electra": {"embedding_size": 12},
    "albert": {"embedding_size": 12, "num_hidden_layers": 4},
    "albert-groups": {"embedding_size": 12, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2},
    "distilbert": {},
    "modernbert": {"local_attention": 8, "attention_bias": True},
    "gpt2": {},
    "llama": GROUPED,
    "llama-each": {**GROUPED, "num_key_value_heads": 2, "head_dim": 4, "pruned_group_queries": "each"},
    "mistral": {**GROUPED, "sliding_window": 5},
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "position_buckets": 4,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "mpnet": {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3},
}
IMAGE_CONFIGS: dict[str, dict[str, Any]] = {"vit": {"image_size": 8, "patch_size": 4}}
"""Families of image classifiers."""
CONFIG_NAMES = {
    "distilbert": {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
    },
    "gpt2": {"intermediate_size": "n_inner"},
}
"""What families call these settings, where they have other names."""


def model_type(family: str) -> str:
    """What transformers calls a family of these tests."""
    return family.removesuffix("-groups").removesuffix("-each")


def tiny_config(family: str, **changes: Any) -> Any:
    """A configuration of a few thousand parameters; `albert-groups` is ALBERT with groups and inner groups.

    In `llama-each`, a head that can be removed is one query head of each group.
    """
    values = {**SMALL, **FAMILY_CONFIGS.get(family, {}), **IMAGE_CONFIGS.get(family, {}), **changes}
    names = CONFIG_NAMES.get(family, {})
    values = {names.get(name, name): value for name, value in values.items()}
    return transformers.AutoConfig.for_model(model_type(family), **values)


def tiny_model(
    family: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    auto_class: str | None = None,
    **changes: Any,
) -> Any:
    """A random classifier whose heads differ: weights several times larger than transformers' own initial ones."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        usual = "AutoModelForImageClassification" if family in IMAGE_CONFIGS else "AutoModelForSequenceClassification"
        model = getattr(transformers, auto_class or usual).from_config(tiny_config(family, **changes))
        for parameter in model.parameters():
            parameter.data += 0.25 * torch.randn_like(parameter)
    for parameter in model.parameters():  # not buffers: transformers loads the frequencies of rotations in float32
        parameter.data = parameter.data.to(dtype)
    return model.eval()


ROUNDED = ("modernbert", "llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(autouse=True, scope="session")
def exact_in_float64() -> Iterator[None]:
    """Norms, rotations and softmax in float64 where a model is: transformers takes them in float32 even then."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ROUNDED:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            norm = getattr(module, f"{name.capitalize()}RMSNorm", None)
            if norm is not None:
                patch.setattr(norm, "forward", exact(norm.forward, 1, normalise))
            patch.setattr(module, "eager_attention_forward", exact(module.eager_attention_forward, 1, attend))
        modernbert, llama = (importlib.import_module(f"transformers.models.{n}.modeling_{n}") for n in ROUNDED[:2])
        rotate = exact(modernbert.apply_rotary_pos_emb, 0, llama.apply_rotary_pos_emb)
        patch.setattr(modernbert, "apply_rotary_pos_emb", rotate)
        yield


def exact(rounded: Callable[..., Any], place: int, own: Callable[..., Any]) -> Callable[..., Any]:
    """The function `own` where the argument at this place is in float64, else transformers' function."""

    def choose(*arguments: Any, **options: Any) -> Any:
        return (own if arguments[place].dtype == torch.float64 else rounded)(*arguments, **options)

    return choose


def normalise(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return norm.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **options: Any) -> tuple[Any, Any]:
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) if each.shape[1] else each for each in (k, v))
    weights = (q @ k.mT * scaling + (0 if mask is None else mask)).softmax(-1)
    return (weights @ v).transpose(1, 2), weights


def tiny_batch(rows: int = 5, seed: int = 0, labels: int = 3, longest: int = 12) -> dict[str, torch.Tensor]:
    """Padded rows of unequal length."""
    chance = torch.Generator().manual_seed(seed)
    lengths = [longest - (place * 3) % (longest - 2) for place in range(rows)]
    ids = torch.zeros(rows, longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(3, 40, (length,), generator=chance)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.randint(0, labels, (rows,), generator=chance),
    }


def tiny_tokenizer() -> Any:
    """A tokenizer of fifteen words."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )


def tiny_rows(count: int = 60, labels: tuple[str, ...] = ("neg", "neutral", "pos")) -> list[dict[str, Any]]:
    """Sentences over the tokenizer's words, no two alike, labels in turn."""
    rows = []
    for place in range(count):
        words = [WORDS[(place * step + step) % len(WORDS)] for step in range(1, 3 + place % 5)]
        rows.append({"text": " ".join(words) + f" {place}", "label": labels[place % len(labels)]})
    return rows


LABEL_NAMES = {"id2label": {0: "neg", 1: "neutral", 2: "pos"}, "label2id": {"neg": 0, "neutral": 1, "pos": 2}}


def both_batches(
    model: Any, tokenizer: Any, data: Any, eval_data: Any = None, settings: Settings | None = None
) -> tuple[Batches, Batches]:
    """The first scoring sample and the evaluation rows of a comparison."""
    settings, task = settings or Settings(), task_of(model)
    if is_ready(data) or is_ready(eval_data):
        return ready_sets(task, data, eval_data, settings)
    pool, rows = both_rows(task, tokenizer, data, eval_data, settings, needs_labels=True)
    sample = sampled(pool, settings.samples, settings.seed)
    warn_of_overlap([row.words for row in sample], [row.words for row in rows])
    scoring = encode(sample, model, tokenizer, task, settings)
    return scoring, encode(rows, model, tokenizer, task, settings, "evaluation")


@pytest.fixture(autouse=True)
def without_drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave figures undrawn, which takes half the time of a small run, except in tests that are marked `draws`."""
    if "draws" not in request.keywords:
        undrawn = {".png": b"-", ".svg": b"-", ".pdf": b"-"}
        monkeypatch.setattr("greedy_gnorm.report.figures.pictures", lambda figure, dpi: undrawn)


EVERY_FAMILY = pytest.mark.parametrize("family", list(FAMILY_CONFIGS))
"""For the tests that must meet every family each time; in the others Llama stands for those that are built like it."""
LIKE_LLAMA = ("llama-each", "mistral", "qwen2", "qwen3")


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.slow] if name in LIKE_LLAMA else []) for name in FAMILY_CONFIGS]
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A tiny named classifier with its tokenizer, saved."""
    folder = tmp_path / "classifier"
    tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny classifier in `model` and `rows.jsonl`, for commands in other processes."""
    folder = tmp_path_factory.mktemp("place")
    tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, tiny_rows(120))))
    return folder


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as JSON lines and give the path."""

    def write(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def data_file(write_rows: Callable[..., Path]) -> Path:
    return write_rows(tiny_rows())


@pytest.fixture(scope="session")
def minilm() -> Path:
    """MiniLM fine-tuned on tweets: trained heads."""
    return shared("models/minilm-tweets")


def shared(path: str) -> Path:
    """A file or folder beside the project, or a skip that says so."""
    if not (SHARED / path).exists():
        pytest.skip(f"needs {path} of the shared folder beside the project, which is not here")
    return SHARED / path
