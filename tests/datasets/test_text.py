"""Characters as numbers, and AG News from the published files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightfed.datasets.text import ALPHABET, AGNews, encode
from lightfed.networks.charcnn import LETTERS
from tests.datasets import tiny
from tests.datasets.kit import prepared, refused


def slowly(text: str, length: int) -> list[int]:
    """First place of each letter in the alphabet, counted from 1; 0 for others."""
    letters = [ALPHABET.find(letter) + 1 for letter in text.lower()[:length]]
    return letters + [0] * (length - len(letters))


def test_the_alphabet_is_the_printed_one() -> None:
    assert len(ALPHABET) == LETTERS == 70
    assert sorted(letter for letter in ALPHABET if ALPHABET.count(letter) > 1) == ["-", "-"]
    assert encode(["aZ9-\n\0 é"], 9).tolist() == [[1, 26, 36, 37, 70, 0, 0, 0, 0]]


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(ALPHABET + "\0éÀÿĀİßΣ\u2028\U0001f600\ud800", max_size=12), max_size=4),
    length=st.integers(1, 10),
)
def test_encode_matches_a_slow_reference(texts: list[str], length: int) -> None:
    codes = encode(texts, length)
    assert codes.dtype == np.uint8
    assert codes.shape == (len(texts), length)
    assert codes.tolist() == [slowly(text, length) for text in texts]


def test_ag_news_is_a_title_and_a_description(tmp_path: Path) -> None:
    written = tiny.ag_news(tmp_path)
    dataset = AGNews(str(tmp_path), length=50)
    assert dataset.classes == tuple(tiny.NEWS)
    assert (dataset.num_classes, dataset.input_shape, dataset.task) == (4, (50,), "classification")
    for split in ("train", "test"):
        texts, labels = written[split]
        loaded = dataset.load(split)
        assert loaded.x.dtype == torch.uint8
        assert loaded.x.tolist() == [slowly(text, 50) for text in texts]
        np.testing.assert_array_equal(loaded.y.numpy(), labels)
        assert loaded.groups is None
    assert any("\n" in text and '"' in text and "," in text for text in written["train"][0])


def of_hub(root: Path, written: Mapping[str, Any]) -> None:
    """ROOT/ag_news: the items as the hub has them, in parquet, with classes from 0."""
    (root / "ag_news" / "data").mkdir(parents=True)
    for split in ("train", "test"):
        texts, labels = written[split]
        kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=[*tiny.NEWS])}
        columns = {"text": texts, "label": labels.tolist()}
        table = datasets.Dataset.from_dict(columns, datasets.Features(kinds))
        table.to_parquet(str(root / "ag_news" / "data" / f"{split}-00000-of-00001.parquet"))


def test_ag_news_of_the_hub_is_the_same_data(tmp_path: Path) -> None:
    written = tiny.ag_news(tmp_path / "published")
    of_hub(tmp_path / "hub", written)
    for split in ("train", "test"):
        published = AGNews(str(tmp_path / "published"), length=50).load(split)  # type: ignore[arg-type]
        loaded = AGNews(str(tmp_path / "hub"), length=50).load(split)  # type: ignore[arg-type]
        assert torch.equal(loaded.x, published.x)
        assert torch.equal(loaded.y, published.y)


def test_what_is_not_ag_news_of_the_hub_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ag_news").mkdir()
    assert "ag_news cannot be loaded" in refused("root", AGNews(str(tmp_path)).load, "train")
    rows = [{"title": "a", "label": 1}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "ag_news" / "train.parquet"))
    line = refused("root", AGNews(str(tmp_path)).load, "train")
    assert "has the columns title, label, not text and label" in line


def test_batches_are_float32(tmp_path: Path) -> None:
    tiny.ag_news(tmp_path)
    data = prepared(AGNews(str(tmp_path), length=30))
    assert not data.augments
    x, y = data.global_test_batch(0)
    test = AGNews(str(tmp_path), length=30).load("test")
    assert torch.equal(x, test.x.float())
    assert torch.equal(y, test.y)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    line = refused("root", AGNews(str(tmp_path)).load, "train")
    assert f"expected {tmp_path / 'ag_news_csv' / 'train.csv'}, which is not there" in line


def written(root: Path, content: str) -> Path:
    """A file of these signs, some of which no encoding has."""
    (root / "ag_news_csv").mkdir()
    path = root / "ag_news_csv" / "train.csv"
    path.write_bytes(content.encode(errors="surrogateescape"))
    return path


def test_line_breaks_in_a_text_are_kept(tmp_path: Path) -> None:
    written(tmp_path, '"1","a","b\r\nc"\r\n"2","d","e"\r\n')
    loaded = AGNews(str(tmp_path), length=6).load("train")
    assert loaded.x.tolist() == [slowly("a b\r\nc", 6), slowly("d e", 6)]
    assert loaded.y.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("content", "found"), [('"1","a","b"\n"one","c","d"\n', "'one'"), ('"1","\udcff","b"\n', "")]
)
def test_what_is_not_ag_news_is_refused(content: str, found: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    line = refused("root", AGNews(str(tmp_path)).load, "train")
    assert found in line
    assert str(path) in line


def test_a_length_is_at_least_one() -> None:
    assert AGNews("x").input_shape == (1014,)
    refused("length", AGNews, "x", length=0)
