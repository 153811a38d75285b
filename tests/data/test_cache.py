"""The cache: made once for a key, again if damaged, and never half written."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lightfed.data.datasets.cache import cache_folder, cached


class Maker:
    """Counts its calls; its samples show the count."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> Iterator[np.ndarray]:
        self.asked += 1
        for samples in (1, 2):
            yield np.full((samples, 2), self.asked, dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lightfed"


def test_the_folder_belongs_to_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == tmp_path / ".cache" / "lightfed"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert cache_folder() == tmp_path / "other" / "lightfed"


def test_tensors_are_made_once_for_a_key(folder: Path) -> None:
    make = Maker()
    for _ in range(2):
        found = cached("x", {"version": [1, "a"]}, make)
        assert torch.equal(found, torch.ones(3, 2, dtype=torch.uint8))
    assert make.asked == 1
    assert cached("x", {"version": [2, "a"]}, make).max() == 2
    assert cached("y", {"version": [1, "a"]}, make).max() == 3
    assert len(list(folder.iterdir())) == 3  # and nothing temporary


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_file_is_made_again(
    damage: bytes | None, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = Maker()
    cached("x", 1, make)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert cached("x", 1, make).max() == 2
    assert str(path) in caplog.text
    assert cached("x", 1, make).max() == 2
    assert make.asked == 2


def test_without_a_writable_folder_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    make = Maker()
    for asked in (1, 2):  # the folder is known before anything is made
        assert cached("x", 1, make).max() == asked
    assert "cannot be written" in caplog.text


def test_a_failed_preparation_is_not_kept(folder: Path) -> None:
    def refuse() -> Iterator[np.ndarray]:
        yield np.zeros(2)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cached("x", 1, refuse)
    assert list(folder.iterdir()) == []
    assert cached("x", 1, Maker()).max() == 1
