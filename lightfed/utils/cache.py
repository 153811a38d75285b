"""What takes long to prepare, kept between runs in the user's cache folder."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/lightfed or ~/.cache/lightfed; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightfed"


def cached(key: object, make: Callable[[], Any]) -> Any:
    """What `make` returns, or an earlier call with the same key did; arrays are mapped from a file.

    A damaged file is replaced. If the folder is not writable, nothing is kept. `key` is everything
    that the result depends on: lists, mappings, numbers and words.
    """
    from joblib import Memory

    with suppress(OSError):
        memory = Memory(cache_folder(), mmap_mode="c", verbose=0)  # copied on write
        return memory.cache(_made, ignore=["make"])(key, make)
    return make()


def _made(key: object, make: Callable[[], Any]) -> Any:
    return make()
