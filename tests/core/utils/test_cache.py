"""The cache: made once for a key, again if damaged, and never half written."""

from pathlib import Path

import numpy as np
import pytest

from lightfed.utils.cache import cache_folder, cached


class Maker:
    """Counts its calls; its samples show the count."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> np.ndarray:
        self.asked += 1
        return np.full((3, 2), self.asked, dtype=np.uint8)


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


def test_arrays_are_made_once_for_a_key_and_mapped(folder: Path) -> None:
    make = Maker()
    for _ in range(2):
        found = cached({"version": [1, "a"]}, make)
        assert isinstance(found, np.memmap)
        assert (found == 1).all()
        found[:] = 9  # changes no file
    assert make.asked == 1
    assert cached({"version": [2, "a"]}, make).max() == 2


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_file_is_made_again(damage: bytes | None, folder: Path) -> None:
    make = Maker()
    cached(1, make)
    (path,) = folder.rglob("output.pkl")
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    assert cached(1, make).max() == 2
    assert cached(1, make).max() == 2
    assert make.asked == 2


def test_without_a_writable_folder_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    make = Maker()
    for asked in (1, 2):
        assert cached(1, make).max() == asked


def test_a_failed_preparation_is_not_kept(folder: Path) -> None:
    def refuse() -> np.ndarray:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        cached(1, refuse)
    assert cached(1, Maker()).max() == 1
