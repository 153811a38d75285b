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

_LONGEST = 400 - len("lightfed: error: : ; ")  # characters of a key, what was found and the fix
# Tracebacks of errors that one line reports. A run writes them to its folder.
tracebacks = logging.getLogger("lightfed.tracebacks")
tracebacks.setLevel(logging.DEBUG)

# What a user's code calls, or lightfed itself.
_LIBRARIES = """
PIL datasets fsspec huggingface_hub jinja2 joblib jsonargparse lightfed lightfed_kernels lightning
lightning_utilities networkx numpy pandas pyarrow safetensors scipy sklearn torch torchmetrics
torchaudio torchvision triton yaml
"""
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

NOT_FINITE = "its update is not finite"  # in the line of a run that has diverged
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a disk without space


class UserError(ValueError):
    """An argument, flag or file given by the user cannot be used.

    Args:
        key: the configuration key, flag or file to change, or a class and its argument.
        found: what was found there.
        fix: how to fix it.

    Attributes:
        status: exit status of the command.
    """

    status = 2

    def __init__(self, key: str, found: str, fix: str) -> None:
        super().__init__(f"{key}: {found}; {fix}")
        self.key, self.found, self.fix = key, found, fix

    @property
    def line(self) -> str:
        """All of it on a line that is not too long to read."""
        key, fix = _cut(self.key, 120), _cut(self.fix, 200)
        return f"{key}: {_cut(self.found, _LONGEST - len(key) - len(fix))}; {fix}"

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str, str]]:
        return type(self), (self.key, self.found, self.fix)


def require(fits: bool, key: str, found: object, fix: str) -> None:
    """Raise a `UserError` of these arguments unless `fits`."""
    if not fits:
        raise UserError(key, f"{found}", fix)


class OneLineParser(ArgumentParser):
    """Reports errors in one line, as every command does."""

    @override
    def error(self, message: str) -> NoReturn:
        command = self.prog.rpartition(" ")[2]
        raise UserError(command, message, f"see {self.prog} --help")


def _cut(text: str, most: int) -> str:
    """A text on one line; the middle of a longer one than `most` characters is left out."""
    line, half = plain(" ".join(text.split())), (most - 5) // 2
    return line if len(line) <= most else f"{line[:half]} ... {line[-half:]}"


def reason(error: BaseException) -> str:
    """The type and the text of an error, on one line, and where in a user's code it was raised."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    calls = _calls(error)
    return f"{said} ({_place(*calls[-1])})" if calls else said


def of_users_code(error: BaseException) -> UserError | None:
    """The line about an error that a user's code has raised; None if it is not a user's.

    The key is that of the innermost object with one.
    """
    seen: list[BaseException] = []
    inner: BaseException | None = error
    while inner is not None and inner not in seen:
        seen.append(inner)
        owners = [frame.f_locals.get("self") for frame, _ in _calls(inner)]
        missing = getattr(inner, "obj", None)  # an object lacks an attribute that all have
        if not owners and _is_users(type(missing).__module__):
            owners = [missing]
        if owners:
            key = next(filter(None, map(_key, reversed(owners))), "model")
            return UserError(
                key, reason(inner), "; ".join(["correct it", *getattr(error, "__notes__", [])])
            )
        inner = inner.__cause__ or inner.__context__
    return None


def is_failure(leaving: SystemExit) -> bool:
    """Whether the status of an exit is not 0, as the system cuts it."""
    return bool(leaving.code & 0xFF if isinstance(leaving.code, int) else leaving.code)


def is_raised_by_user(error: BaseException) -> bool:
    """Whether a user's code, called by lightfed, has raised this very error."""
    return bool(_calls(error))


def _calls(error: BaseException) -> list[tuple[FrameType, int]]:
    """The calls from lightfed's first to the innermost in a user's code; [] if there is none."""
    calls = list(walk_tb(error.__traceback__))
    names = [str(frame.f_globals.get("__name__")) for frame, _ in calls]
    ours = [i for i, name in enumerate(names) if name.partition(".")[0] == "lightfed"]
    users = [i for i, name in enumerate(names) if ours and i > ours[0] and _is_users(name)]
    return calls[ours[0] : users[-1] + 1] if users else []


def _is_users(module: str) -> bool:
    package = module.partition(".")[0]
    return package not in sys.stdlib_module_names and package not in _LIBRARIES.split()


def _place(frame: FrameType, line: int) -> str:
    path = frame.f_code.co_filename
    return f"{path.removeprefix(os.getcwd() + os.sep)}:{line}"


def _key(owner: object) -> str | None:
    return next((_KEYS[c.__name__] for c in type(owner).__mro__ if c.__name__ in _KEYS), None)


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
        """What is said of an exit: where it was asked for, and when, in words."""
        named = of_users_code(error)
        key = "trainer" if named is None else named.key
        fix = "raise an error, or end a run early by trainer.should_stop = True"
        code = getattr(error, "code", None)
        status = UserError.status
        if isinstance(error, SystemExit) and is_failure(error):
            status = code & 0xFF if isinstance(code, int) else 1  # of a text, as Python does
        return cls(key, f"{reason(error)}, {when}", fix, status)


class DiskError(UserError):
    """A run cannot write to its folder; the complete files there are intact."""

    status = 1


def repair(error: OSError) -> str:
    """What to do before a run that could not write is started again."""
    if error.errno == errno.ENOENT:
        return "keep the folder of the run"
    return "free space" if error.errno in FULL else "repair the file system"


class NoEnd:
    """A block in which StopIteration is an error: Lightning's loops take it for their end.

    It is no generator's context manager: that one would take the new error for the old one.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StopIteration):
            raise RuntimeError(f"{self._what} raised StopIteration") from error


class Interrupted(Exception):
    """A signal stopped an unfinished run; every rank has saved its state.

    Args:
        signal_number: the signal received.
        saved: what is on disk, in words: "round 4 of 30 and 3 of 10 sessions of round 5".
        resumable: whether the run can resume from a checkpoint.
        progressed: whether anything was finished since this process started or resumed. A job
            that is requeued repeatedly without progress is too short.
    """

    def __init__(
        self, signal_number: int, saved: str, *, resumable: bool, progressed: bool = True
    ) -> None:
        super().__init__(f"signal {signal_number}: {saved}")
        self.signal_number, self.saved = signal_number, saved
        self.resumable, self.progressed = resumable, progressed
