"""Reads batches of CIFAR from files that nobody vouches for.

CIFAR's files are pickles. A pickle names the functions that are called to read it. Here it may name
only those that make an array, and every other name is refused before it is looked up. So a file can
hold arrays, texts, numbers and lists, and cannot run code.
"""

import pickle
from gzip import GzipFile
from pathlib import Path
from typing import IO, Any

import numpy as np
from typing_extensions import override

_SIDE = 32  # pixels of an image
_VALUES = 3 * _SIDE * _SIDE  # of an image
_LABEL_NAMES = ("labels", "fine_labels")
_CODECS = ("latin1", "latin-1", "ascii", "utf-8")


def arrays_of(file: IO[bytes] | GzipFile) -> Any:
    """Read a pickle of arrays, texts, numbers, tuples, lists and dictionaries.

    Raises:
        ValueError: The file names something that no array is made of.
        pickle.UnpicklingError: The file is not a pickle.
    """
    return _ArrayUnpickler(file, encoding="latin1").load()


def batch_of(path: Path) -> tuple[np.ndarray, list[int]]:
    """Read a batch.

    Args:
        path: The file.

    Returns:
        The images as a uint8 array of shape (N, 32, 32, 3), and their N labels.

    Raises:
        ValueError: The file names something that no array is made of, or is not a batch.
        pickle.UnpicklingError: The file is not a pickle.
    """
    with path.open("rb") as file:
        batch = arrays_of(file)
    if not isinstance(batch, dict):
        raise ValueError(f"{path.name} holds a {type(batch).__name__}, not a batch by names")

    images = batch.get("data")
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        raise ValueError(f"{path.name} has no array of bytes as data")
    if images.ndim != 2 or images.shape[1] != _VALUES:
        raise ValueError(f"{path.name} has data of shape {images.shape}, not (N, {_VALUES})")

    labels = None
    for name in _LABEL_NAMES:
        if labels is None and name in batch:
            labels = batch[name]
    if (
        not isinstance(labels, list)
        or len(labels) != len(images)
        or not all(type(label) is int for label in labels)
    ):
        raise ValueError(f"{path.name} does not have a whole number for each image as labels")
    return images.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1), labels


def _encode(text: str, codec: str = "utf-8") -> bytes:
    """Return bytes, which Python 3 pickles for Python 2 as a text and its codec."""
    if codec not in _CODECS:
        raise ValueError(f"a text is encoded by {codec!r}")
    return text.encode(codec)


def _empty_array(kind: type, shape: tuple[int, ...], code: bytes) -> np.ndarray:
    """Return an empty array, which the pickle then fills."""
    if kind is not np.ndarray or tuple(shape) != (0,):
        raise ValueError("an array is not made as numpy writes it")
    return np.ndarray.__new__(np.ndarray, (0,), np.int8)


# What a file may name, and what is called instead: numpy's own functions would accept more.
_CALLED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    ("_codecs", "encode"): _encode,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads arrays, texts, bytes, numbers, lists and dictionaries."""

    @override
    def find_class(self, module: str, name: str, /) -> Any:
        called = _CALLED.get((module, name))
        if called is None:
            raise ValueError(f"it names {module}.{name}, which no array is made of")
        return called

    @override
    def persistent_load(self, pid: Any, /) -> Any:
        raise ValueError("it names an object outside of the file")
