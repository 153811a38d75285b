import shutil
import socket
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lightfed.data.dataset import Dataset, Transform
from lightfed.datasets.hub import CINIC10
from lightfed.datasets.vision import CIFAR10, CIFAR100, MNIST, Digits, FashionMNIST
from lightfed.utils.errors import UserError
from tests.datasets import tiny
from tests.datasets.kit import refused

# What writes the official files, a part of their place, and the number of classes.
OFFICIAL: dict[Any, tuple[Any, str, int]] = {
    CIFAR10: (tiny.cifar10, "cifar-10-batches-py", 10),
    CIFAR100: (tiny.cifar100, "cifar-100-python", 100),
    MNIST: (tiny.mnist, "MNIST/raw", 10),
    FashionMNIST: (partial(tiny.mnist, name="FashionMNIST"), "FashionMNIST/raw", 10),
    CINIC10: (partial(tiny.cinic10, per_class=1), "train", 10),
}


def assert_holds(dataset: Dataset, written: tiny.Written) -> None:
    for split in ("train", "test"):
        loaded = dataset.load(split)
        images, labels = written[split]
        assert loaded.x.dtype == torch.uint8
        assert loaded.y.dtype == torch.int64
        assert loaded.x.shape[1:] == dataset.input_shape
        assert loaded.x.is_contiguous()
        assert loaded.groups is None
        np.testing.assert_array_equal(loaded.x.numpy(), images)
        np.testing.assert_array_equal(loaded.y.numpy(), labels)


def test_digits_are_all_there_once() -> None:
    from sklearn.datasets import load_digits

    train, test = Digits().load("train"), Digits().load("test")
    assert (len(train), len(test)) == (1437, 360)
    x, y = torch.cat((train.x, test.x)), torch.cat((train.y, test.y))
    both = torch.cat((x.flatten(1) * 16, y.unsqueeze(1)), dim=1)
    digits = load_digits()
    original = np.column_stack((digits.data, digits.target))
    ours = sorted(map(tuple, both.tolist()))
    assert ours == sorted(map(tuple, original.tolist()))
    assert torch.equal((train.x * 16).round(), train.x * 16)


def test_digits_split_is_stratified_and_has_its_constants() -> None:
    train, test, transform = Digits().load("train"), Digits().load("test"), Digits().transform
    sizes = torch.bincount(train.y) + torch.bincount(test.y)
    assert ((torch.bincount(train.y) - 0.8 * sizes).abs() <= 1).all()
    assert torch.equal(Digits().load("test").x, test.x)
    assert transform.mean == (round(train.x.mean().item(), 4),)
    assert transform.std == (round(train.x.std().item(), 4),)


def test_digits_can_be_enlarged() -> None:
    large = Digits(image_size=32)
    assert large.input_shape == (1, 32, 32)
    small = Digits().load("test").x
    expected = F.interpolate(small, size=(32, 32), mode="bilinear")
    assert torch.equal(large.load("test").x, expected)
    with pytest.raises(UserError, match=r"data\.dataset\.init_args\.image_size: 0 pixels"):
        Digits(image_size=0)


@pytest.mark.parametrize("kind", OFFICIAL)
def test_the_official_layout_is_read(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write, place, classes = OFFICIAL[kind]
    root = tmp_path / "root"
    line = refused("root", kind(str(root)).load, "train")
    assert str(root / place) in line
    assert ("download: true" in line) == (kind is not CINIC10)
    written = write(root)
    given = {} if kind is CINIC10 else {"verify_checksums": False}
    dataset = kind(str(root), **given)
    assert dataset.num_classes == len(set(dataset.classes)) == classes
    assert_holds(dataset, written)


def test_folders_of_other_classes_are_refused(tmp_path: Path) -> None:
    tiny.cinic10(tmp_path, per_class=1)
    (tmp_path / "train" / "deer").rename(tmp_path / "train" / "eagle")
    assert "cat, dog, eagle" in refused("root", CINIC10(str(tmp_path)).load, "train")


def test_foreign_and_damaged_files_are_refused(tmp_path: Path) -> None:
    tiny.cifar10(tmp_path)
    tiny.mnist(tmp_path)
    assert "verify_checksums: false" in refused("root", CIFAR10(str(tmp_path)).load, "train")
    line = refused("root", MNIST(str(tmp_path)).load, "train")
    assert "120 images; officially 60000" in line
    for kind, name in (
        (CIFAR10, "cifar-10-batches-py/data_batch_2"),
        (MNIST, "MNIST/raw/train-images-idx3-ubyte"),
    ):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:1000])
        dataset = kind(str(tmp_path), verify_checksums=False)
        assert "cannot be read" in refused("root", dataset.load, "train")


def test_download_unpacks_a_local_archive(tmp_path: Path) -> None:
    written = tiny.cifar10(tmp_path / "source")
    (tmp_path / "root").mkdir()
    packed = str(tmp_path / "root" / "cifar-10-python")
    shutil.make_archive(packed, "gztar", tmp_path / "source", "cifar-10-batches-py")
    dataset = CIFAR10(str(tmp_path / "root"), verify_checksums=False, download=True)
    dataset.fetch()
    assert (tmp_path / "root" / "cifar-10-batches-py" / "test_batch").is_file()
    assert_holds(dataset, written)


def test_a_failed_download_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    for kind in (CIFAR10, MNIST):
        line = refused("download", kind(str(tmp_path), download=True).fetch)
        assert "no route to host" in line


def test_nothing_is_downloaded_by_default(tmp_path: Path) -> None:
    MNIST(str(tmp_path)).fetch()
    assert not list(tmp_path.iterdir())


def test_presets_are_the_constants_of_the_papers() -> None:
    heterofl = Transform((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), 4, True)
    assert CIFAR10("x").transform == CIFAR10("x", preset="flexifed").transform == heterofl
    fedbcd = CIFAR10("x", preset="fedbcd").transform
    assert fedbcd == Transform((0.5,) * 3, (0.5,) * 3, crop_padding=4, flip=True)
    dispfl = CIFAR10("x", preset="dispfl", augment=False).transform
    assert (dispfl.crop_padding, dispfl.flip) == (0, False)
    assert dispfl.std == (0.24703233, 0.24348505, 0.26158768)
    assert CIFAR100("x").transform.mean == (0.5071, 0.4865, 0.4409)
    others = {"crop_padding": 4, "flip": True, "padding": "mean", "erase": 0.5}
    imagenet = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    assert CIFAR10("x", preset="pfedmoe").transform == Transform(*imagenet, **others)
    plain = CIFAR10("x", preset="pfedmoe", augment=False).transform
    assert plain == Transform(*imagenet)
    cifar100 = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    assert CIFAR100("x", preset="pfedmoe").transform == Transform(*cifar100, **others)
    assert MNIST("x").transform == Transform((0.1307,), (0.3081,))
    cinic = (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)
    assert CINIC10("x").transform == Transform(*cinic, crop_padding=4, flip=True)
    assert CINIC10("x", augment=False).transform == Transform(*cinic)
    with pytest.raises(UserError, match="CIFAR100 has no preset 'fedbcd'; choose one of dispfl"):
        CIFAR100("x", preset="fedbcd")


def test_class_names_are_the_published_ones() -> None:
    assert (CIFAR10.classes[0], FashionMNIST.classes[0]) == ("airplane", "T-shirt/top")
    assert list(CIFAR100.classes) == sorted(CIFAR100.classes)


def test_the_network_is_out_of_reach() -> None:
    with socket.socket() as remote, pytest.raises(RuntimeError, match="do not use the network"):
        remote.connect(("192.0.2.1", 80))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as local:
        local.connect(server.getsockname())
