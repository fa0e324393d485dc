"""Saving and loading models, pruned or not."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from greedy_gnorm.errors import GnormError, UnsupportedModel
from greedy_gnorm.model.families import FAMILIES, image_tokens
from greedy_gnorm.model.modeling_pruned import RECORDS, auto_class_of, pruned_class
from greedy_gnorm.model.sentences import DEFAULT, ENTRY, read_modules, read_settings, subfolder, write_settings
from greedy_gnorm.model.sites import find_sites, parse_record
from greedy_gnorm.model.source import locate
from greedy_gnorm.units import by_site

log = logging.getLogger("greedy_gnorm")

CODE = pruned_class.__module__.rpartition(".")[2]
"""The module that is saved with a pruned model."""
ENCODER = "AutoModel"
"""The auto class of a model without a head, which gives vectors of texts."""
FORMATS = ("pruned", "dense")
"""How a model is saved: without the removed units, or in the original shapes with zeros for them."""


def load(
    name: str | Path, *, dtype: str | torch.dtype = "auto", trust_remote_code: bool = False, **options: Any
) -> Any:
    """Load a model, pruned or not, from a folder or the hub, in evaluation mode.

    Further options, such as `device_map`, are passed to `from_pretrained`.
    """
    if Path(name).is_file():
        raise GnormError(f"{name} is a file: give the model's folder.")
    place = locate(name)
    config = load_config(place, trust_remote_code=trust_remote_code)
    plain = _model_class(config)
    try:
        model, report = _class_to_build(plain, config).from_pretrained(
            place,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **subfolder(read_modules(place)),
            **options,
        )
    except GnormError:
        raise
    except Exception as error:  # libraries raise many kinds of errors on a damaged checkpoint
        raise GnormError(f"Can't load the weights of {name}: {_one_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if auto_class_of(plain) == ENCODER:
        missing = _without_pooler(model, missing)
        if not hasattr(model.config, ENTRY):
            log.info("%s does not say how tokens are pooled: an embedding is the mean over tokens", name)
            setattr(model.config, ENTRY, copy.deepcopy(DEFAULT))
    if missing:
        raise GnormError(
            f"{name} has no weights for {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}: it was saved "
            f"as {', '.join(config.architectures or ['?'])}. Fine-tune it as a {plain.__name__} first."
        )
    find_sites(model)
    return model.eval()


def load_config(name: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the configuration of a supported model from a folder, a JSON file or the hub."""
    path = Path(name)
    try:
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            config: Any = transformers.AutoConfig.for_model(**content)
        else:
            place = locate(name)
            modules = read_modules(place)
            config = transformers.AutoConfig.from_pretrained(
                place, trust_remote_code=trust_remote_code, **subfolder(modules)
            )
            if modules:
                setattr(config, ENTRY, read_settings(place, modules))
    except GnormError:
        raise
    except Exception as error:  # transformers raises many kinds of errors on a damaged file
        raise GnormError(f"Can't read a model configuration from {name}: {_one_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{name} is an encoder-decoder ({config.model_type}), which is not supported yet; supported model types "
            f"are: {', '.join(FAMILIES)}."
        )
    if config.model_type not in FAMILIES:
        raise UnsupportedModel(
            f"{name} is a model of type {config.model_type!r}; supported model types are: {', '.join(FAMILIES)}."
        )
    return config


def load_tokenizer(name: str | Path, *, config: Any = None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer that belongs to a model, or the image processor if its configuration is one of images."""
    place = locate(name)
    if config is not None and image_tokens(config) is not None:
        return _load_processor(name, place, trust_remote_code)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            place, trust_remote_code=trust_remote_code, **subfolder(read_modules(place))
        )
    except GnormError:
        raise
    except Exception as error:  # libraries raise many kinds of errors on a damaged file
        raise GnormError(f"Can't load a tokenizer from {name}: {_one_line(error)}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # transformers builds an empty tokenizer if the folder has none
        raise GnormError(
            f"{name} has no tokenizer (no tokenizer.json or vocabulary file): save the tokenizer in the same folder."
        )
    return tokenizer


def check_pillow() -> None:
    """Refuse to go on without the library that reads images."""
    if importlib.util.find_spec("PIL") is None:
        raise GnormError("Images need Pillow: pip install 'greedy-gnorm[images]'.")


def _load_processor(name: str | Path, place: str | Path, trust_remote_code: bool) -> Any:
    check_pillow()
    try:
        auto_class: Any = transformers.AutoImageProcessor
        return auto_class.from_pretrained(place, backend="pil", trust_remote_code=trust_remote_code)
    except Exception as error:  # libraries raise many kinds of errors on a damaged file
        raise GnormError(
            f"Can't load an image processor from {name} (preprocessor_config.json): {_one_line(error)}"
        ) from error


def skeleton(config: Any) -> Any:
    """Build a model on the meta device, without weights and without the units recorded as removed."""
    plain = _model_class(config)
    try:
        with torch.device("meta"):
            model = _class_to_build(plain, config)(copy.deepcopy(config))
    except (ValueError, RuntimeError, ZeroDivisionError, TypeError) as error:
        raise GnormError(f"No model can be built from this configuration: {_one_line(error)}") from error
    return model


def check_format(form: str) -> None:
    """Refuse an unknown format of a saved model."""
    if form not in FORMATS:
        raise GnormError(f"Unknown format {form!r}. Choose from: {', '.join(FORMATS)}.")


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a model (config.json with `pruned_heads`, safetensors) and its tokenizer to a folder.

    A bare encoder's folder is one of sentence-transformers, whether the original one was or not.
    """
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    _drop_foreign_code(folder)
    if auto_class_of(type(model)) == ENCODER:
        write_settings(model.config, folder)


def _drop_foreign_code(folder: Path) -> None:
    """Remove references to the original model's code: allowing a pruned model's code must not allow that too."""
    for path in (folder / name for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json")):
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        named = content.pop("auto_map", None)
        if named is None:
            continue
        ours = {name: code for name, code in dict(named).items() if str(code).startswith(f"{CODE}.")}
        content |= {"auto_map": ours} if ours else {}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def weights_fingerprint(model: nn.Module) -> str:
    """A short hash of all weights."""
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in sorted(model.named_parameters()):
        tensor = parameter.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def configuration_fingerprint(config: Any) -> str:
    """A short hash of the configuration without names, versions and precision, which do not affect what is computed."""
    unrelated = ("transformers_version", "dtype", "torch_dtype", "pruned_layout")
    settings = {
        name: value for name, value in config.to_dict().items() if not name.startswith("_") and name not in unrelated
    }
    text = json.dumps(settings, sort_keys=True, default=str).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _model_class(config: Any) -> Any:
    """The class that saved the model if it is one of transformers that can be pruned, else a classifier's.

    The folder of a sentence encoder may have been saved with a head that the encoder does not use.
    """
    if hasattr(config, ENTRY):
        return transformers.AutoModel._model_mapping[type(config)]
    for name in config.architectures or ():
        plain = getattr(transformers, name.removeprefix("Pruned"), None)
        if plain is not None and auto_class_of(plain) is not None:
            return plain
    usual = "SequenceClassification" if image_tokens(config) is None else "ImageClassification"
    return getattr(transformers, f"AutoModelFor{usual}")._model_mapping[type(config)]


def _without_pooler(model: Any, missing: list[str]) -> list[str]:
    """Drop the pooler if it has no weights, which sentence embeddings do not use; the weights that are missing else."""
    others = [name for name in missing if not name.startswith("pooler.")]
    if len(others) < len(missing):
        model.pooler = None
    return others


def _class_to_build(plain: Any, config: Any) -> Any:
    """The pruned class if the configuration records removed units (transformers 4 does so too), else the plain one."""
    gone = {kind: by_site(parse_record(config, kind)) for kind in RECORDS}
    if not any(gone.values()):
        return plain
    for kind, record in RECORDS.items():
        if gone[kind]:
            setattr(config, record, gone[kind])
    config.pruned_layout = [row.layout(config) for row in FAMILIES[config.model_type].rows(config)]
    return pruned_class(plain)


def _one_line(error: BaseException) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:300]
