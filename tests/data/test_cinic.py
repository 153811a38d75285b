"""CINIC-10 from folders of pictures, decoded once."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightfed.data.datasets import hub
from lightfed.data.datasets.dataset import Transform
from lightfed.data.datasets.hub import CINIC10
from lightfed.utils.errors import UserError
from tests.data import tiny


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lightfed"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "CINIC-10"


def forbid_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_decoded", lambda *_, **__: pytest.fail("decoded again"))


def assert_holds(root: Path, written: tiny.Written) -> None:
    dataset = CINIC10(str(root))
    for split in ("train", "test"):
        loaded = dataset.load(split)
        images, labels = written[split]
        assert (loaded.x.dtype, loaded.y.dtype) == (torch.uint8, torch.int64)
        np.testing.assert_array_equal(loaded.x.numpy(), images)
        np.testing.assert_array_equal(loaded.y.numpy(), labels)


def test_cinic10_reads_its_folders_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tiny.cinic10(root)
    assert CINIC10.classes == tuple(sorted(os.listdir(root / "train")))
    CINIC10(str(root)).fetch()  # the node decodes before its ranks load
    forbid_decoding(monkeypatch)
    assert_holds(root, written)


def plain(path: Path, shade: int, *, time: int) -> None:
    """Write an image of one colour with a given time."""
    Image.new("RGB", (32, 32), (shade, 0, 0)).save(path)
    os.utime(path, ns=(time, time))


@pytest.mark.parametrize("change", ["name", "time"])
def test_changed_files_are_decoded_again(change: str, root: Path) -> None:
    tiny.cinic10(root)
    one, other = (root / "train" / "bird" / f"cifar10-train-0000{i}.png" for i in (6, 7))
    plain(one, 10, time=5)
    plain(other, 20, time=5)
    assert CINIC10(str(root)).load("train").x[6:8, 0, 0, 0].tolist() == [10, 20]
    if change == "name":
        one.rename(other.with_stem(other.stem + "x"))
        expected = [20, 10]
    else:
        plain(one, 30, time=6)
        expected = [30, 20]
    assert CINIC10(str(root)).load("train").x[6:8, 0, 0, 0].tolist() == expected


def refused(root: Path, key: str = "root") -> UserError:
    with pytest.raises(UserError) as error:
        CINIC10(str(root)).load("train")
    assert error.value.key == f"data.dataset.init_args.{key}"
    assert "\n" not in str(error.value)
    return error.value


def test_missing_folders_are_named(root: Path) -> None:
    error = refused(root)
    assert error.found == f"{root / 'train'} holds the folders none"
    assert "the folder that holds train and test" in error.fix
    tiny.cinic10(root)
    (root / "train" / "deer").rename(root / "train" / "eagle")
    assert "the folders airplane, automobile, bird, cat, dog, eagle" in refused(root).found


def test_damaged_and_foreign_pictures_are_named(root: Path, cache: Path) -> None:
    tiny.cinic10(root)
    path = root / "train" / "frog" / "cifar10-train-00019.png"
    whole = path.read_bytes()
    for damaged in (whole[:500], b"", b"no picture", whole[:40] + b"x" * 400):
        path.write_bytes(damaged)
        assert f"{path} cannot be used" in refused(root, "image").found
    Image.new("RGB", (31, 32)).save(path)
    assert "its shape is (3, 32, 31)" in refused(root, "image").found
    assert not list(cache.rglob("output.pkl"))


def test_the_constants_are_those_of_the_published_code() -> None:
    mean, std = (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)
    assert CINIC10("x").transform == Transform(mean, std, crop_padding=4, flip=True)
    assert CINIC10("x", augment=False).transform == Transform(mean, std)
    assert CINIC10.input_shape == (3, 32, 32)
