"""The beginning and the end of the process of a command."""

import atexit
import gc
import os
import sys
import threading


def imports_begin() -> None:
    """Collect no garbage during imports: they create half a million objects, all of which stay."""
    gc.disable()


def imports_end() -> None:
    """Collect garbage from now on, but never look at what has been imported."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def end_process(status: int) -> None:
    """End the process as Python does, except that the system frees the memory.

    Python would visit and free every object first, which takes a second of CPU time. Waits for
    threads, calls exit functions, and flushes. Returns if a debugger or profiler would lose its
    results, or if a stream cannot be flushed: the caller then exits as usual.

    Args:
        status: of the process.
    """
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # a closed pipe or file
        return
    os._exit(status)
