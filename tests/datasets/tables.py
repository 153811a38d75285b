"""Small tables of every format that `Hub` reads, with two classes that are easy to tell apart."""

import csv
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

KINDS = ("cat", "dog")


def points(path: Path, *, samples: int = 40) -> Path:
    """PATH: a csv file with the columns a, b, kind and who, three writers one after the other."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["a", "b", "kind", "who"])
        for i in range(samples):
            a, b = rng.normal(i % 2, 0.1, 2).round(3).tolist()
            rows.writerow([a, b, KINDS[i % 2], f"writer {i % 3}"])
    return path


def shades(root: Path, *, each: int = 3, size: int = 8) -> Path:
    """ROOT/{train,test}/{cat,dog}/I.png: even images of a grey level of 16 * I, dogs 128 more."""
    for split in ("train", "test"):
        for label, kind in enumerate(KINDS):
            folder = root / split / kind
            folder.mkdir(parents=True)
            for i in range(each):
                Image.new("RGB", (size, size), (16 * i + 128 * label,) * 3).save(
                    folder / f"{i}.png"
                )
    return root


def leaf(root: Path, **split: dict[str, tuple[list[object], list[object]]]) -> Path:
    """ROOT/SPLIT/all_data.json for each split: x and y of every user, in LEAF's layout."""
    for name, users in split.items():
        (root / name).mkdir(parents=True)
        data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
        sizes = [len(x) for x, _ in users.values()]
        content = {"users": list(users), "num_samples": sizes, "user_data": data}
        (root / name / "all_data.json").write_text(json.dumps(content))
    return root


def sentences(root: Path, *, authors: int = 4, each: int = 6) -> Path:
    """ROOT/{train,test}.parquet: sentences of ten words by each author, who goes through a cycle.

    Author k says wk.0 to wk.4 over and over, so that every word but the first is known from the
    one before it.
    """
    root.mkdir(parents=True)
    for split in ("train", "test"):
        rows = [
            {"tokens": " ".join(f"W{k}.{i % 5}" for i in range(10)), "client_id": f"author {k}"}
            for _ in range(each)
            for k in range(authors)
        ]
        datasets.Dataset.from_list(rows).to_parquet(str(root / f"{split}.parquet"))
    return root


def tokenizer(path: Path, words: list[str], **given: Any) -> None:
    """A tokenizer of these words and parts of words; skips the test without transformers."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    from tokenizers import Tokenizer, models, pre_tokenizers

    numbers = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    inner = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", **given
    ).save_pretrained(path)
