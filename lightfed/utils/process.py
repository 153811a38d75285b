"""The beginning and the end of a process, and what it prints that is not of a run."""

import atexit
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lightfed.utils.errors import UserError

_LIBRARIES = ("lightning.pytorch", "lightning.fabric")
_TRITON = "triton._C.libtriton"
# The variables by which launchers number their processes.
_RANKS = ("RANK", "SLURM_PROCID", "NODE_RANK", "LOCAL_RANK")


def started_in() -> str:
    """Return the folder in which this process was started, also after `os.chdir`.

    It is the one in which the path of the script, as it was given, names the script.
    """
    current = os.getcwd()
    script = getattr(sys.modules["__main__"], "__file__", None)
    given_path = sys.argv[0]
    if script is None or os.path.isabs(given_path):
        return current

    # A shell's PWD stays as it was at the start.
    for folder in (current, os.environ.get("PWD", current)):
        with suppress(OSError):
            if os.path.samefile(os.path.join(folder, given_path), script):
                return folder
    return current


def imports_begin() -> None:
    """Collect no garbage during imports: they create half a million objects, all of which stay."""
    gc.disable()


def imports_end() -> None:
    """Collect garbage from now on, but never look at what has been imported."""
    if not gc.isenabled():
        freeze()
        gc.enable()


def freeze() -> None:
    """Exclude all present objects from the collection of garbage.

    What stays to the end of the process is not collected, which would take seconds. Bindings made
    by nanobind list that as leaked; where there are some, it is collected after all.
    """
    gc.freeze()
    if _lists_leaks():
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)


def _lists_leaks() -> bool:
    """Return whether Triton has been imported, and its bindings are nanobind's, as from 3.9 on."""
    bindings = sys.modules.get(_TRITON)
    if bindings is None:
        return False
    return any(type(value).__module__ == "nanobind" for value in vars(bindings).values())


def drop_output(text: str = "") -> OSError | None:
    """Write a text to standard output. If it takes none, as on a full disk, drop all from now on.

    Python forgets a text that it could not write, and with it the error.

    Returns:
        The error, if standard output could not be written to.
    """
    if sys.stdout is None:
        return None
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Otherwise Python would write, and fail, again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def is_interactive() -> bool:
    """Return whether a user is at this process, as in a notebook: ranks could not run it."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def is_first() -> bool:
    """Return whether this process is rank 0, by its launcher's variables.

    A variable that is no number is ignored.
    """
    for name in _RANKS:
        value = os.environ.get(name, "0")
        if value.isdigit() and int(value) != 0:
            return False
    return True


def report(error: UserError) -> None:
    """Print one line on the first rank, or on one that its launcher numbers wrongly."""
    if error.key in _RANKS or is_first():
        print(f"lightfed: error: {error.line}", file=sys.stderr)


def silence() -> None:
    """Hide tips and warnings of libraries for runs that are not federations."""
    for name in _LIBRARIES:
        logger = logging.getLogger(name)
        logger.setLevel(max(logger.level, logging.WARNING))
    warnings.filterwarnings("ignore", message=".*srun.*|.*treespec.*")
    warnings.filterwarnings("ignore", message="Initializing zero-element tensors.*")
    warnings.filterwarnings("ignore", message="There is a performance drop.*")
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")


@contextmanager
def silenced() -> Iterator[None]:
    """Silence libraries in a block of a script; one that a user has made talkative stays so."""
    levels = {name: logging.getLogger(name).level for name in _LIBRARIES}
    with warnings.catch_warnings():
        silence()
        for name, level in levels.items():
            if level == logging.DEBUG:
                logging.getLogger(name).setLevel(level)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
