"""What takes long to prepare, kept between runs in the user's cache folder."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/lightfed or ~/.cache/lightfed; it may not exist."""
    configured = os.environ.get("XDG_CACHE_HOME")
    # The variable may be set and empty.
    caches = Path(configured) if configured else Path.home() / ".cache"
    return caches / "lightfed"


def cached(key: object, make: Callable[[], Any]) -> Any:
    """Return what `make` returns, or what an earlier call with the same key has returned.

    Arrays are mapped from a file. A damaged file is replaced. If the folder is not writable,
    nothing is kept.

    Args:
        key: Everything that the result depends on: lists, mappings, numbers and words.
        make: Makes the result.
    """
    # joblib is imported here because most runs prepare nothing.
    from joblib import Memory

    with suppress(OSError):
        # Mapped arrays are copied when they are written to.
        memory = Memory(cache_folder(), mmap_mode="c", verbose=0)
        return memory.cache(_made, ignore=["make"])(key, make)
    return make()


# joblib finds a result by the name and the source of this function, and by the key. A change here
# would make it prepare everything again.
def _made(key: object, make: Callable[[], Any]) -> Any:
    return make()
