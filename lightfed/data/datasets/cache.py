"""What takes long to prepare is kept between runs, as tensors in the user's cache folder."""

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
    """$XDG_CACHE_HOME/lightfed, or ~/.cache/lightfed; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightfed"


def cached(name: str, key: object, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors that `make` gives, from a file if it made them before for the same key.

    A file that is damaged is made again. Where nothing can be written, nothing is kept.

    Args:
        name: says in the file's name what it holds.
        key: all that the tensors depend on, as JSON can write it.
        make: prepares the tensors, by name; called where there is no file of that key.
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
