"""The token that fills up rows, for models and tokenizers that come without one."""

from __future__ import annotations

import logging
from typing import Any

from greedy_gnorm.model.families import image_tokens

log = logging.getLogger("greedy_gnorm")


def lacks_padding(model: Any, tokenizer: Any) -> bool:
    """Whether a model or its tokenizer does not say which token fills up rows; images have no such token."""
    if tokenizer is None or image_tokens(model.config) is not None:
        return False
    return tokenizer.pad_token_id is None or model.config.pad_token_id is None


def set_padding(model: Any, tokenizer: Any) -> None:
    """Set the token that fills up rows: the tokenizer's, else the model's, else the end-of-text token.

    Decoders that classify find the last token of a row by it.
    """
    if not lacks_padding(model, tokenizer):
        return
    if tokenizer.pad_token_id is None:
        known = model.config.pad_token_id
        token = tokenizer.eos_token if known is None else tokenizer.convert_ids_to_tokens(known)
        if token is None:
            return  # rows of equal length need no padding
        tokenizer.pad_token = token
        log.info("the tokenizer has no padding token: rows are filled up with %s", token)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
