"""Texts as token ids, by a tokenizer of `transformers`."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightfed.data.datasets.dataset import KEY, Columns
from lightfed.utils.errors import UserError, reason, require


def tokenizer_of(path: str) -> Any:
    """The tokenizer in a folder, or of a name of the hub; a UserError if there is none."""
    key = f"{KEY}.tokenizer"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        found = f"{path}, and transformers is not installed"
        raise UserError(key, found, "pip install lightfed[hf]") from error
    logging.getLogger("transformers").setLevel(logging.CRITICAL)  # what fails is raised, too
    local = Path(path).expanduser()
    fix = "give the folder of a tokenizer, or a name of the hub that is in the cache"
    there = local.exists() or not path.startswith(("/", ".", "~"))
    require(there, key, f"{path} is not there", fix)
    try:
        return AutoTokenizer.from_pretrained(str(local) if local.exists() else path)
    except Exception as error:  # of a file, or of the hub
        raise UserError(key, f"{path} cannot be loaded ({reason(error)})", fix) from error


def tokenized(
    texts: list[str], tokenizer: Any, *, classes: Tensor | None, max_length: int | None
) -> Columns:
    """The columns `input_ids`, `attention_mask` and `labels` of N texts.

    Args:
        texts: N of them.
        tokenizer: of `transformers`.
        classes: (N,) int64, the labels; None if the labels are the token ids.
        max_length: tokens that longer texts are cut to; None for the limit of the tokenizer.
    """
    own = tokenizer.model_max_length
    found = f"{max_length}, and the tokenizer takes {own}"
    fits = max_length is None or 1 <= max_length <= own
    require(fits, f"{KEY}.max_length", found, "give 1 to that many")
    limit = max_length or (own if own < 1 << 30 else None)  # a huge one means none
    rows = tokenizer(texts, truncation=limit is not None, max_length=limit)["input_ids"]
    ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
    masks = [torch.ones_like(row) for row in ids]
    labels = ids if classes is None else list(classes)
    samples = {"input_ids": ids, "attention_mask": masks, "labels": labels}
    return Columns.of(samples, {"input_ids": tokenizer.pad_token_id or 0})
