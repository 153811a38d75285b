"""Batches of CIFAR from files that nobody vouches for: arrays, texts, numbers and lists alone.

CIFAR's files are pickles. A pickle names what is to be called; here it may name only what makes an
array. Every other name is refused before it is looked up.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

_SIDE = 32  # pixels
_PIXELS = 3 * _SIDE * _SIDE
_LABELS = ("labels", "fine_labels")
_CODECS = ("latin1", "latin-1", "ascii", "utf-8")


def batch_of(path: Path) -> tuple[np.ndarray, list[int]]:
    """The images of a batch, (N, 32, 32, 3) uint8, and their N labels.

    Raises:
        ValueError: It names something else than what arrays are made of, or is no batch.
        pickle.UnpicklingError: It is no pickle.
    """
    with path.open("rb") as file:
        batch = _Arrays(file, encoding="latin1").load()
    if not isinstance(batch, dict):
        raise ValueError(f"{path.name} holds a {type(batch).__name__}, not a batch by names")
    images = batch.get("data")
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        raise ValueError(f"{path.name} has no array of bytes as data")
    if images.ndim != 2 or images.shape[1] != _PIXELS:
        raise ValueError(f"{path.name} has data of shape {images.shape}, not (N, {_PIXELS})")
    labels = next((batch[name] for name in _LABELS if name in batch), None)
    listed = isinstance(labels, list) and all(type(label) is int for label in labels)
    if not isinstance(labels, list) or not listed or len(labels) != len(images):
        raise ValueError(f"{path.name} does not have a whole number for each image as labels")
    return images.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1), labels


def _encoded(text: str, codec: str = "utf-8") -> bytes:
    """Bytes, as pickles of Python 3 write them for Python 2."""
    if codec not in _CODECS:
        raise ValueError(f"a text is encoded by {codec!r}")
    return text.encode(codec)


def _made(kind: type, shape: tuple[int, ...], code: bytes) -> np.ndarray:
    """An empty array, which the pickle then fills."""
    if kind is not np.ndarray or tuple(shape) != (0,):
        raise ValueError("an array is not made as numpy writes it")
    return np.ndarray.__new__(np.ndarray, (0,), np.int8)


# What a file may name, and what it gets; numpy's own functions would take more than that.
_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _made,
    ("numpy._core.multiarray", "_reconstruct"): _made,
    ("_codecs", "encode"): _encoded,
}


class _Arrays(pickle.Unpickler):
    """Reads arrays, texts, bytes, numbers, lists and dictionaries."""

    @override
    def find_class(self, module: str, name: str, /) -> Any:
        found = _NAMES.get((module, name))
        if found is None:
            raise ValueError(f"it names {module}.{name}, which no array is made of")
        return found

    @override
    def persistent_load(self, pid: Any, /) -> Any:
        raise ValueError("it names an object outside of the file")
