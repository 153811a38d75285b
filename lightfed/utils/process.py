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
_RANKS = ("RANK", "SLURM_PROCID", "NODE_RANK", "LOCAL_RANK")  # variables that number a process


def started_in() -> str:
    """The folder in which this process was started, also after `os.chdir`.

    It is the one in which the path of the script, as it was given, names the script.
    """
    here = os.getcwd()
    script = getattr(sys.modules["__main__"], "__file__", None)
    given = sys.argv[0]
    if script is None or os.path.isabs(given):
        return here
    for folder in (here, os.environ.get("PWD", here)):
        with suppress(OSError):
            if os.path.samefile(os.path.join(folder, given), script):
                return folder
    return here


def imports_begin() -> None:
    """Collect no garbage during imports: they create half a million objects, all of which stay."""
    gc.disable()


def imports_end() -> None:
    """Collect garbage from now on, but never look at what has been imported."""
    if not gc.isenabled():
        freeze()
        gc.enable()


def freeze() -> None:
    """Never look at what there is now when collecting garbage.

    What stays to the end of the process is not collected, which would take seconds. Bindings made
    by nanobind list that as leaked; where there are some, it is collected after all.
    """
    gc.freeze()
    if _lists_leaks():
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)


def _lists_leaks() -> bool:
    """Whether Triton has been imported, and its bindings are those of nanobind, as from 3.9 on."""
    bindings = sys.modules.get(_TRITON)
    if bindings is None:
        return False
    return any(type(value).__module__ == "nanobind" for value in vars(bindings).values())


def drop_output(text: str = "") -> OSError | None:
    """Write to standard output, and drop all if it takes none, as on a full disk: then its error.

    Python forgets a text that it could not write, and with it the error.
    """
    if sys.stdout is not None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return error
    return None


def is_interactive() -> bool:
    """Whether a user is at this process, as in a notebook: it is no script that ranks could run."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def is_first() -> bool:
    """Whether this process is rank 0, by its launcher's variables; what is no number is none."""
    values = [os.environ.get(name, "0") for name in _RANKS]
    return not any(value.isdigit() and int(value) for value in values)


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
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        silence()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level if level == logging.DEBUG else logger.level)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
