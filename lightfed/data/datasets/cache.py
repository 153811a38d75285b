"""Tensors that take long to prepare, kept between runs in the user's cache folder."""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from lightfed.utils.atomic_io import write_atomically

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/lightfed or ~/.cache/lightfed; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightfed"


def cached(name: str, key: object, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The result of `make`, read from a file if an earlier call had the same name and key.

    A damaged file is replaced. If the folder is not writable, nothing is kept.

    Args:
        name: start of the file name.
        key: everything that the tensors depend on; JSON can represent it.
        make: prepares the tensors, by name.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = cache_folder() / f"{name}-{digest[:16]}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        if path.is_file():
            log.warning("%s is made again: it cannot be read (%s)", path, error)
    tensors = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(save(tensors)))
    except OSError as error:
        log.warning("%s cannot be written, and will be made again next time (%s)", path, error)
    return tensors
