"""Docstrings as a data set: the texts, their splits, and the cache."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightfed.datasets import text as module
from lightfed.datasets.text import Docstrings, docstrings, encode, source_folders
from lightfed.utils.errors import UserError
from tests.datasets import tables
from tests.datasets.kit import refused


def text(name: str, number: int) -> str:
    return f"The {name} function number {number} " + "does what its long name says. " * 3 + "End."


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Four packages: 20, 25, 30 and 35 documented functions each, and nothing in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = {}
    for name, count in zip(Docstrings.classes, (20, 25, 30, 35), strict=True):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        lines = [f'def f{i}():\n    """{text(name, i)}"""\n' for i in range(count)]
        (folders[name] / "a.py").write_text("".join(lines))
    monkeypatch.setattr(module, "source_folders", lambda: {n: [f] for n, f in folders.items()})
    return folders


def rows(x: Tensor) -> set[tuple[int, ...]]:
    return set(map(tuple, x.tolist()))


def test_classes_are_balanced_and_splits_apart(sources: dict[str, Path]) -> None:
    dataset = Docstrings(length=120, per_class=10)
    train, test = dataset.load("train"), dataset.load("test")
    assert dataset.input_shape == (120,)
    assert train.y.bincount().tolist() == [8] * 4
    assert test.y.bincount().tolist() == [2] * 4
    assert (train.x.dtype, train.y.dtype) == (torch.uint8, torch.int64)
    assert len(rows(torch.cat((train.x, test.x)))) == 40
    # Without a number the smallest package sets it, here of 20 functions.
    assert Docstrings().load("train").y.bincount().tolist() == [16] * 4
    assert Docstrings().per_class == 1200


def test_a_text_is_there_once_in_its_first_class(sources: dict[str, Path]) -> None:
    same = "same " * 20
    for name in ("stdlib", "torch"):
        path = sources[name] / "a.py"
        path.write_text(f'"""{same}"""\n' + path.read_text())
    dataset = Docstrings()
    both = [dataset.load("train"), dataset.load("test")]
    x, y = torch.cat([split.x for split in both]), torch.cat([split.y for split in both])
    found = (x == torch.from_numpy(encode([same], x.shape[1]))).all(1)
    assert y[found].tolist() == [0]


def test_labels_belong_to_the_texts(sources: dict[str, Path]) -> None:
    loaded = Docstrings(length=9).load("train")
    names = {tuple(encode([f"the {name}"], 9)[0].tolist()): c for c, name in enumerate(sources)}
    assert [names[tuple(row)] for row in loaded.x.tolist()] == loaded.y.tolist()


def test_a_tokenizer_makes_columns_of_the_texts(sources: dict[str, Path], tmp_path: Path) -> None:
    tables.tokenizer(tmp_path / "tokens", ["The", *sources])
    dataset = Docstrings(length=7, tokenizer=str(tmp_path / "tokens"))
    train, plain = dataset.load("train"), Docstrings().load("train")
    assert (dataset.task, dataset.num_classes, dataset.input_shape) == ("columns", 0, ())
    assert train.columns is not None
    columns = train.columns.tensors
    assert list(columns) == ["input_ids", "attention_mask", "labels"]
    assert columns["input_ids"].shape == (64, 7)
    # [UNK] is 1, "The" 2, and the packages follow
    assert torch.equal(columns["input_ids"][:, 1], 3 + plain.y)
    assert torch.equal(columns["labels"], plain.y)
    assert torch.equal(train.y, plain.y)


def test_samples_depend_on_the_sources_alone(sources: dict[str, Path]) -> None:
    first, again = Docstrings(per_class=10).load("train"), Docstrings(per_class=10).load("train")
    torch.manual_seed(1)
    shutil.rmtree(sources["torch"].parent / "cache")
    scanned = Docstrings(per_class=10).load("train")
    for other in (again, scanned):
        assert torch.equal(first.x, other.x)
        assert torch.equal(first.y, other.y)


def forbid_scanning(monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(folder: Path) -> None:
        raise AssertionError(f"{folder} is scanned")

    monkeypatch.setattr(module, "docstrings", scan)


def test_sources_are_scanned_once(
    sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Docstrings(per_class=10).fetch()
        forbid_scanning(patch)
        assert len(Docstrings(length=7, per_class=20).load("train")) == 64
    monkeypatch.setattr(module, "version", lambda name: "another" if name == "pandas" else "1")
    forbid_scanning(monkeypatch)
    with pytest.raises(AssertionError, match="is scanned"):
        Docstrings().load("train")


def test_what_counts_as_a_docstring(tmp_path: Path) -> None:
    long = [letter * 80 for letter in "abcdefg"]
    (tmp_path / "one.py").write_text(
        f'"""{long[0]}"""\n'
        f'class C:\n    """{long[1]}"""\n    async def g(self):\n        """{long[2]}"""\n'
        f'def h():\n    """{"h" * 79}"""\n'
        f'def i():\n    "\\d"\n    """{long[3]}"""\n'
        f'x = """{long[4]}"""\n'
    )
    for folder in ("tests", "site-packages", "sub"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "two.py").write_text(f'"""{folder} {long[5]}"""\n')
    (tmp_path / "broken.py").write_text(f'"""{long[6]}"""\ndef (')
    (tmp_path / "zeros.py").write_bytes(b'"""' + b"\0" * 80 + b'"""')
    assert list(docstrings(tmp_path)) == [*long[:3], f"sub {long[5]}"]


def test_the_real_sources_are_found() -> None:
    folders = source_folders()
    assert list(folders) == list(Docstrings.classes)
    assert all(folder.is_dir() for found in folders.values() for folder in found)
    assert len(folders["torch"]) == 4
    assert (folders["stdlib"][0] / "ast.py").is_file()
    found = list(docstrings(folders["numpy"][0] / "linalg"))
    assert len(found) > 10
    assert min(map(len, found)) >= 80


def test_too_few_texts_are_refused(
    sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused("per_class", Docstrings, per_class=4)
    monkeypatch.setattr(module, "source_folders", lambda: {n: [] for n in sources})
    with pytest.raises(UserError, match=r"data\.dataset: not all of stdlib, torch"):
        Docstrings().load("test")
