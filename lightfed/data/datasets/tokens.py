"""Tables of texts as token ids, by a tokenizer of `transformers`."""

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightfed.data.datasets.dataset import KEY, Columns, Split
from lightfed.data.datasets.tables import Table, column_of
from lightfed.utils.errors import UserError, reason, require

IGNORED = -100  # the label that losses of torch leave out


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
    tables: Mapping[Split, Table],
    tokenizer: Any,
    *,
    columns: Sequence[str],
    label: str | None,
    classes: Mapping[Split, Tensor] | None,
    max_length: int | None,
) -> dict[Split, Columns]:
    """The columns `input_ids`, `attention_mask` and `labels` of every split.

    A pair of texts also has `token_type_ids`, if the tokenizer makes them.

    Args:
        tables: of texts.
        tokenizer: of `transformers`.
        columns: of a text or a list of words, or the two of a pair.
        label: the column of classes, of floats, or of a whole number for each word; a word that is
            cut into several tokens has its label on the first. None: the token ids are the labels.
        classes: (N,) int64, if the labels are classes.
        max_length: tokens that longer samples are cut to; None for the limit of the tokenizer.
    """
    own = tokenizer.model_max_length
    fits, found = 1 <= (max_length or 1) <= own, f"{max_length}, and the tokenizer takes {own}"
    require(fits and max_length != 0, f"{KEY}.max_length", found, "give 1 to that many")
    limit = max_length or (own if own < 1 << 30 else None)
    columns_of: dict[Split, Columns] = {}
    for split, table in tables.items():
        texts = [table[column_of(table, name, "columns")][:] for name in columns]
        kind = list if isinstance(texts[0][0], list) else str
        bad = next((i for part in texts for i, t in enumerate(part) if type(t) is not kind), None)
        found = f"{split}: sample {bad} is no {'list of words' if kind is list else 'text'}"
        require(bad is None, f"{KEY}.columns", found, "give all samples texts, or lists of words")
        try:
            encoded = tokenizer(
                *texts,
                truncation=limit is not None,
                max_length=limit,
                is_split_into_words=kind is list,
            )
        except Exception as error:  # of the tokenizer, such as words that are none
            found = f"{split}: they cannot be tokenized ({reason(error)})"
            raise UserError(f"{KEY}.columns", found, "give texts, or lists of words") from error
        ids = encoded["input_ids"]
        samples: dict[str, Any] = {"input_ids": ids, "attention_mask": [[1] * len(r) for r in ids]}
        if "token_type_ids" in encoded and columns[1:]:
            samples["token_type_ids"] = encoded["token_type_ids"]
        if label is None:
            samples["labels"] = ids
        elif classes is not None:
            samples["labels"] = classes[split]
        else:
            samples["labels"] = _labels(table[label][:], texts[0], encoded, split)
        tensors = {name: list(map(torch.as_tensor, values)) for name, values in samples.items()}
        padding = {"input_ids": tokenizer.pad_token_id or 0, "labels": IGNORED}
        columns_of[split] = Columns.of(tensors, padding)
    return columns_of


def _labels(values: list[Any], texts: list[Any], encoded: Any, split: str) -> list[Any]:
    """Floats; or a label for each token, from those of words."""
    labels: list[Any] = []
    for i, (value, words) in enumerate(zip(values, texts, strict=True)):
        if isinstance(value, list):
            many = len(words) if isinstance(words, list) else "a text, no list of"
            found = f"{split}: sample {i} has {len(value)} labels and {many} words"
            fix = "give lists of words, and a label for each"
            require(len(value) == many, f"{KEY}.label", found, fix)
            places = [None, *encoded.word_ids(i)]
            steps = pairwise(places)
            value = [IGNORED if p in (None, before) else value[p] for before, p in steps]
        try:
            labels.append(
                torch.tensor(value, dtype=None if isinstance(value, list) else torch.float32)
            )
        except (TypeError, ValueError) as error:
            found = f"{split}: the label of sample {i} cannot be used ({reason(error)})"
            raise UserError(f"{KEY}.label", found, "give numbers") from error
    return labels
