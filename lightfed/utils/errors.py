"""Exceptions that end a run early: user errors and signals; and errors in a user's own code."""

import errno
import logging
import os
import sys
from argparse import ArgumentParser
from traceback import walk_tb
from types import FrameType
from typing import Any, NoReturn

from typing_extensions import override

from lightfed.utils.plain_text import plain

# The most characters of a key and of a fix in a line, and of the key, what was found and the fix
# together.
_LONGEST_KEY = 120
_LONGEST_FIX = 200
_LONGEST = 400 - len("lightfed: error: : ; ")

# Tracebacks of errors that one line reports. A run writes them to its folder.
tracebacks = logging.getLogger("lightfed.tracebacks")
tracebacks.setLevel(logging.DEBUG)

# The packages that a user's code calls, and lightfed itself: an error there is none of the user's
# code.
_LIBRARIES = {
    "PIL",
    "datasets",
    "fsspec",
    "huggingface_hub",
    "jinja2",
    "joblib",
    "jsonargparse",
    "lightfed",
    "lightfed_kernels",
    "lightning",
    "lightning_utilities",
    "networkx",
    "numpy",
    "pandas",
    "pyarrow",
    "safetensors",
    "scipy",
    "sklearn",
    "torch",
    "torchaudio",
    "torchmetrics",
    "torchvision",
    "triton",
    "yaml",
}

# The keys of what a user may write, by the names of base classes.
_KEYS = {
    "Algorithm": "model.algorithm",
    "Callback": "trainer.callbacks",
    "Dataset": "data.dataset",
    "FederatedDataModule": "data.dataset",
    "LRScheduler": "model.lr_schedule",
    "Logger": "trainer.logger",
    "Optimizer": "model.optimizer",
    "Partitioner": "data.partition",
    "Module": "model.clients",
    "Trainer": "trainer",
}

# In the line of a run that has diverged.
NOT_FINITE = "its update is not finite"

# In place of a signal's number: the run was to stop after this round.
PAUSED = 0

# Errors of a disk without space.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(ValueError):
    """An argument, flag or file given by the user cannot be used.

    Args:
        key: The configuration key, flag or file to change, or a class and its argument.
        found: What was found there.
        fix: How to fix it.

    Attributes:
        status: The exit status of the command.
    """

    status = 2

    def __init__(self, key: str, found: str, fix: str) -> None:
        super().__init__(f"{key}: {found}; {fix}")
        self.key = key
        self.found = found
        self.fix = fix

    @property
    def line(self) -> str:
        """The whole error on one line that is not too long to read."""
        key = _cut(self.key, _LONGEST_KEY)
        fix = _cut(self.fix, _LONGEST_FIX)
        found = _cut(self.found, _LONGEST - len(key) - len(fix))
        return f"{key}: {found}; {fix}"

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str, str]]:
        # Errors travel between ranks. An exception is pickled by its message alone otherwise.
        return type(self), (self.key, self.found, self.fix)


class OneLineParser(ArgumentParser):
    """Reports errors in one line, as every command does."""

    @override
    def error(self, message: str) -> NoReturn:
        command = self.prog.rpartition(" ")[2]
        raise UserError(command, message, f"see {self.prog} --help")


def _cut(text: str, most: int) -> str:
    """Return a text on one line, without its middle if it is longer than `most` characters."""
    line = plain(" ".join(text.split()))
    if len(line) <= most:
        return line
    half = (most - len(" ... ")) // 2
    return f"{line[:half]} ... {line[-half:]}"


def reason(error: BaseException) -> str:
    """Return the type and the text of an error on one line, and where in a user's code it arose."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    calls = _users_calls(error)
    if not calls:
        return text
    frame, line = calls[-1]
    return f"{text} ({_location(frame, line)})"


def of_users_code(error: BaseException) -> UserError | None:
    """Return the line about an error that a user's code has raised; None if it is not a user's.

    The key is that of the innermost object with one. If the error was raised while another one was
    handled, and is not a user's itself, the other one is looked at.
    """
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        owners = _users_objects(current)
        if owners:
            notes = getattr(error, "__notes__", [])
            return UserError(
                key=_innermost_key(owners),
                found=reason(current),
                fix="; ".join(["correct it", *notes]),
            )
        current = current.__cause__ or current.__context__
    return None


def _users_objects(error: BaseException) -> list[object]:
    """Return the objects whose code has raised an error, the innermost last; [] if not a user's.

    A function has no object, and counts as None.
    """
    calls = _users_calls(error)
    if calls:
        return [frame.f_locals.get("self") for frame, _ in calls]

    # Lightning itself raises if a user's object lacks an attribute that all of its kind have.
    incomplete = getattr(error, "obj", None)
    if _is_users(type(incomplete).__module__):
        return [incomplete]
    return []


def _innermost_key(owners: list[object]) -> str:
    """Return the key of the last of some objects that has one."""
    for owner in reversed(owners):
        for kind in type(owner).__mro__:
            if kind.__name__ in _KEYS:
                return _KEYS[kind.__name__]
    return "model"


def is_failure(leaving: SystemExit) -> bool:
    """Return whether the status of an exit is not 0, as the system sees it: its last 8 bits."""
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF != 0
    return bool(leaving.code)


def is_raised_by_user(error: BaseException) -> bool:
    """Return whether a user's code, called by lightfed, has raised this very error."""
    return bool(_users_calls(error))


def _users_calls(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the calls from lightfed's first to the innermost in a user's code, with their lines.

    Empty if lightfed has called no code of a user.
    """
    calls = list(walk_tb(error.__traceback__))
    first_of_ours: int | None = None
    last_of_users: int | None = None
    for position, (frame, _) in enumerate(calls):
        module = str(frame.f_globals.get("__name__"))
        if first_of_ours is None:
            if module.partition(".")[0] == "lightfed":
                first_of_ours = position
        elif _is_users(module):
            last_of_users = position

    if first_of_ours is None or last_of_users is None:
        return []
    return calls[first_of_ours : last_of_users + 1]


def _is_users(module: str) -> bool:
    """Return whether a module is a user's: neither of Python nor of a library."""
    package = module.partition(".")[0]
    return package not in sys.stdlib_module_names and package not in _LIBRARIES


def _location(frame: FrameType, line: int) -> str:
    """Return the file, from the working folder on, and the line of a call."""
    path = frame.f_code.co_filename
    return f"{path.removeprefix(os.getcwd() + os.sep)}:{line}"


class Exited(UserError):
    """A user's code, or a library, ends the process before the command has done its work.

    A status of 0 would say that the work is done: then the command ends with that of a mistake. Any
    other status that the code has asked for is the command's.
    """

    def __init__(self, key: str, found: str, fix: str, status: int = UserError.status) -> None:
        super().__init__(key, found, fix)
        self.status = status

    @override
    def __reduce__(self) -> Any:
        return type(self), (self.key, self.found, self.fix, self.status)

    @classmethod
    def by(cls, error: SystemExit | KeyboardInterrupt, *, when: str) -> "Exited":
        """Return the error about an exit: where it was asked for, and when, in words."""
        users_error = of_users_code(error)
        status = UserError.status
        if isinstance(error, SystemExit) and is_failure(error):
            # For an exit with a text, Python's status is 1.
            status = error.code & 0xFF if isinstance(error.code, int) else 1
        return cls(
            key="trainer" if users_error is None else users_error.key,
            found=f"{reason(error)}, {when}",
            fix="raise an error, or end a run early by trainer.should_stop = True",
            status=status,
        )


class DiskError(UserError):
    """A run cannot write to its folder; the complete files there are intact."""

    status = 1


def repair(error: OSError) -> str:
    """Return what to do before a run that could not write is started again."""
    if error.errno == errno.ENOENT:
        return "keep the folder of the run"
    if error.errno in FULL:
        return "free space"
    return "repair the file system"


class NoEnd:
    """A block in which StopIteration is an error: Lightning's loops take it for their end.

    It is no generator's context manager: that one would take the new error for the old one.

    Args:
        what: What runs in the block, in words.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StopIteration):
            raise RuntimeError(f"{self._what} raised StopIteration") from error


class Interrupted(Exception):
    """An unfinished run was stopped by a signal or pauses; every rank has saved its state.

    Args:
        signal_number: The signal received; `PAUSED` for a run that was to stop there.
        saved: What is on disk, in words: "round 4 of 30 and 3 of 10 sessions of round 5".
        resumable: Whether the run can resume from a checkpoint.
        progressed: Whether anything was finished since this process started or resumed. A job
            that is requeued repeatedly without progress is too short.
    """

    def __init__(
        self, signal_number: int, saved: str, *, resumable: bool, progressed: bool = True
    ) -> None:
        super().__init__(f"signal {signal_number}: {saved}")
        self.signal_number = signal_number
        self.saved = saved
        self.resumable = resumable
        self.progressed = progressed
