"""Files of CIFAR's form that nobody vouches for: arrays and lists are read, nothing else is."""

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightfed.datasets.cifar_batches import batch_of
from lightfed.datasets.vision import CIFAR10
from lightfed.utils.errors import UserError

called: list[str] = []
IMAGES = np.arange(2 * 3072, dtype=np.int64).astype(np.uint8).reshape(2, 3072)
GOOD: dict[str, Any] = {"data": IMAGES, "labels": [3, 1]}


def note() -> str:
    called.append("note")
    return "x"


class Names:
    """An object whose file names a function of this module."""

    def __reduce__(self) -> Any:
        return note, ()


def written(folder: Path, content: Any, protocol: int = 2) -> Path:
    path = folder / "data_batch_1"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL))
def test_arrays_and_lists_are_read(protocol: int, tmp_path: Path) -> None:
    images, labels = batch_of(written(tmp_path, GOOD, protocol))
    assert labels == [3, 1]
    assert images.shape == (2, 32, 32, 3)
    assert images[1, 0, 0].tolist() == IMAGES[1, [0, 1024, 2048]].tolist()


def test_bytes_as_names_are_read(tmp_path: Path) -> None:
    found = batch_of(written(tmp_path, {**GOOD, "batch_label": b"one of five"}))
    assert len(found[0]) == 2


@pytest.mark.parametrize("place", ["label", "besides", "whole"])
def test_what_else_a_file_names_is_refused_and_not_called(place: str, tmp_path: Path) -> None:
    content: Any = {
        "label": {**GOOD, "labels": [3, Names()]},
        "besides": {**GOOD, "meta": Names()},
        "whole": Names(),
    }[place]
    called.clear()
    with pytest.raises(ValueError, match=r"it names tests\.datasets\.test_cifar_batches\.note"):
        batch_of(written(tmp_path, content))
    assert called == []


def test_a_class_of_the_standard_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"it names collections\.OrderedDict"):
        batch_of(written(tmp_path, OrderedDict(GOOD)))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (3, "holds a int"),
        ({}, "no array of bytes"),
        ({**GOOD, "data": IMAGES.astype(np.int64)}, "no array of bytes"),
        ({**GOOD, "data": np.array([None, 1], dtype=object)}, "no array of bytes"),
        ({**GOOD, "data": IMAGES[:, :100]}, r"shape \(2, 100\)"),
        ({**GOOD, "data": IMAGES[0]}, r"shape \(3072,\)"),
        ({"data": IMAGES}, "a whole number for each image"),
        ({**GOOD, "labels": [1]}, "a whole number for each image"),
        ({**GOOD, "labels": ["a", "b"]}, "a whole number for each image"),
    ],
)
def test_what_is_no_batch_is_refused(content: Any, found: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=found):
        batch_of(written(tmp_path, content))


def test_the_data_set_names_the_file_and_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    written(folder, {**GOOD, "meta": Names()})
    called.clear()
    with pytest.raises(UserError, match=r"CIFAR10 cannot be read from .*it names tests") as refused:
        CIFAR10(str(tmp_path), verify_checksums=False).load("train")
    assert refused.value.key == "data.dataset.init_args.root"
    assert called == []
