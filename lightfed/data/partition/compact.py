"""The file of a partition: its arrays in narrow types, compressed.

A client's samples ascend, so the steps from one to the next are small numbers.
"""

import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

Arrays = Mapping[str, np.ndarray]


def compact(arrays: Arrays) -> dict[str, np.ndarray]:
    """The arrays of a `Partition`, narrowed.

    Of each split, `sizes` (clients,) are the differences of the offsets, and `steps` (T,) those of
    the index, 0 at a client's first sample. `jumps` are the steps there.
    """
    found = {}
    for split in ("train", "test"):
        index, offsets = arrays[f"{split}_index"], arrays[f"{split}_offsets"]
        steps, starts = index.copy(), _starts(offsets)
        steps[1:] -= index[:-1]
        found[f"{split}_jumps"] = steps[starts]
        steps[starts] = 0
        found[f"{split}_steps"] = _narrow(steps)
        found[f"{split}_sizes"] = _narrow(np.diff(offsets))
        found[f"{split}_counts"] = _narrow(arrays[f"{split}_counts"])
    return found


def expand(stored: Arrays) -> dict[str, np.ndarray]:
    """The arrays that `compact` was given; a KeyError or IndexError for a damaged file."""
    found = {}
    for split in ("train", "test"):
        jumps = stored[f"{split}_jumps"]
        offsets = np.concatenate(([0], np.cumsum(stored[f"{split}_sizes"], dtype=np.int64)))
        index = stored[f"{split}_steps"].astype(jumps.dtype)
        index[_starts(offsets)] = jumps
        found[f"{split}_index"] = np.cumsum(index, dtype=jumps.dtype, out=index)
        found[f"{split}_offsets"] = offsets
        found[f"{split}_counts"] = stored[f"{split}_counts"].astype(np.int32)
    return found


def write(file: BinaryIO, arrays: Mapping[str, Any]) -> None:
    """Write an npz file; numpy's own way to compress takes three times as long."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)


def _starts(offsets: np.ndarray) -> np.ndarray:
    """Where the first sample of each client is that has any."""
    return offsets[:-1][np.diff(offsets) > 0]


def _narrow(values: np.ndarray) -> np.ndarray:
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    return values.astype(np.min_scalar_type(high if low >= 0 else min(low, -high - 1)))
