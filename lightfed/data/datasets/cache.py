"""Samples that take long to prepare, kept between runs in the user's cache folder."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightfed.utils.atomic_io import write_atomically

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/lightfed or ~/.cache/lightfed; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightfed"


def cached(name: str, key: object, make: Callable[[], Iterable[np.ndarray]]) -> Tensor:
    """The samples of `make`, mapped from a file that an earlier call may have written.

    Samples are written block by block, so that they may need more memory than there is. A damaged
    file is replaced. If the folder is not writable, the samples are in memory, and nothing is kept.
    `name` begins the file name. `key` is everything that the samples depend on; JSON can represent
    it. `make` prepares the samples, at least one, in blocks (B, ...) of one type.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = cache_folder() / f"{name}-{digest[:16]}.npy"
    if path.is_file():
        try:
            return _mapped(path)
        except (OSError, ValueError, EOFError) as error:
            log.warning("%s is made again: it cannot be read (%s)", path, error)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: _write(file, make()))
        return _mapped(path)
    except OSError as error:
        log.warning("%s cannot be written, and will be made again next time (%s)", path, error)
    return torch.from_numpy(np.concatenate(list(make())))


def _mapped(path: Path) -> Tensor:
    # Copy on write: the file never changes, and torch does not warn about a read-only array.
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))


def _write(file: Any, blocks: Iterable[np.ndarray]) -> None:
    """An npy file; numpy leaves space in its header for a larger number of samples."""
    count, header = 0, dict[str, Any](fortran_order=False)
    for block in blocks:
        if not count:
            header |= {"descr": block.dtype.str, "shape": (0, *block.shape[1:])}
            np.lib.format.write_array_header_1_0(file, header)
        file.write(block.tobytes())
        count += len(block)
    file.seek(0)
    header["shape"] = (count, *header["shape"][1:])
    np.lib.format.write_array_header_1_0(file, header)
