import shutil
import socket
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lightfed.data.datasets.dataset import Dataset, Transform
from lightfed.data.datasets.vision import CIFAR10, CIFAR100, MNIST, Digits, FashionMNIST
from lightfed.utils.errors import UserError
from tests.data import tiny


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


def test_digits_split_is_stratified_and_fixed() -> None:
    train, test = Digits().load("train"), Digits().load("test")
    sizes = torch.bincount(train.y) + torch.bincount(test.y)
    assert ((torch.bincount(train.y) - 0.8 * sizes).abs() <= 1).all()
    again = Digits().load("test")
    assert torch.equal(again.x, test.x)
    assert torch.equal(again.y, test.y)


def test_digits_constants_are_those_of_the_training_split() -> None:
    x, transform = Digits().load("train").x, Digits().transform
    assert transform.mean == (round(x.mean().item(), 4),)
    assert transform.std == (round(x.std().item(), 4),)


def test_digits_can_be_enlarged() -> None:
    large = Digits(image_size=32)
    assert large.input_shape == (1, 32, 32)
    small = Digits().load("test").x
    expected = F.interpolate(small, size=(32, 32), mode="bilinear")
    assert torch.equal(large.load("test").x, expected)
    with pytest.raises(UserError, match=r"data\.dataset\.init_args\.image_size: 0 pixels"):
        Digits(image_size=0)


def test_cifar10_reads_the_official_layout(tmp_path: Path) -> None:
    written = tiny.cifar10(tmp_path)
    assert_holds(CIFAR10(str(tmp_path), verify_checksums=False), written)


def test_cifar100_reads_the_official_layout(tmp_path: Path) -> None:
    written = tiny.cifar100(tmp_path)
    assert_holds(CIFAR100(str(tmp_path), verify_checksums=False), written)


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST])
def test_both_mnists_read_the_official_layout(kind: type[MNIST], tmp_path: Path) -> None:
    written = tiny.mnist(tmp_path, name=kind.__name__)
    assert_holds(kind(str(tmp_path), verify_checksums=False), written)


def test_foreign_files_are_refused_by_their_checksum(tmp_path: Path) -> None:
    tiny.cifar10(tmp_path)
    with pytest.raises(UserError, match="cannot be read") as error:
        CIFAR10(str(tmp_path)).load("train")
    assert error.value.key == "data.dataset.init_args.root"
    assert "verify_checksums: false" in error.value.fix


def test_mnist_with_missing_images_is_refused(tmp_path: Path) -> None:
    tiny.mnist(tmp_path)
    with pytest.raises(UserError, match="120 images; officially 60000"):
        MNIST(str(tmp_path)).load("train")


@pytest.mark.parametrize(
    ("dataset", "folder"),
    [
        (CIFAR10, "cifar-10-batches-py"),
        (CIFAR100, "cifar-100-python"),
        (MNIST, "MNIST/raw"),
        (FashionMNIST, "FashionMNIST/raw"),
    ],
)
def test_a_missing_folder_is_named(dataset: type[CIFAR10], folder: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        dataset(str(tmp_path)).load("train")
    assert error.value.key == "data.dataset.init_args.root"
    assert str(tmp_path / folder) in error.value.found
    assert "download: true" in error.value.fix
    assert "\n" not in str(error.value)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    tiny.cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read") as error:
        CIFAR10(str(tmp_path), verify_checksums=False).load("train")
    assert "\n" not in str(error.value)
    tiny.mnist(tmp_path)
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read"):
        MNIST(str(tmp_path), verify_checksums=False).load("train")


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
    for dataset in (CIFAR10(str(tmp_path), download=True), MNIST(str(tmp_path), download=True)):
        with pytest.raises(UserError, match="cannot be read") as error:
            dataset.fetch()
        assert error.value.key == "data.dataset.init_args.download"
        assert "no route to host" in error.value.found


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
    with pytest.raises(UserError, match="CIFAR100 has no preset 'fedbcd'; choose one of dispfl"):
        CIFAR100("x", preset="fedbcd")


def test_class_names_are_the_published_ones() -> None:
    assert CIFAR10.classes[0] == "airplane"
    assert len(CIFAR100.classes) == len(set(CIFAR100.classes)) == 100
    assert list(CIFAR100.classes) == sorted(CIFAR100.classes)
    assert FashionMNIST.classes[0] == "T-shirt/top"
    sizes = [d("x").num_classes for d in (MNIST, FashionMNIST, CIFAR10, CIFAR100)]
    assert sizes == [10, 10, 10, 100]


def test_the_network_is_out_of_reach() -> None:
    with socket.socket() as remote, pytest.raises(RuntimeError, match="do not use the network"):
        remote.connect(("192.0.2.1", 80))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as local:
        local.connect(server.getsockname())
