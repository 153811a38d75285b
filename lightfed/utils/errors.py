"""Exceptions that end a run early: user errors and signals."""


class UserError(ValueError):
    """An argument, flag or file given by the user cannot be used.

    Args:
        key: the configuration key, flag or file to change.
        found: what was found there.
        fix: how to fix it.

    Attributes:
        status: exit status of the command.
    """

    status = 2

    def __init__(self, key: str, found: str, fix: str) -> None:
        super().__init__(f"{key}: {found}; {fix}")
        self.key, self.found, self.fix = key, found, fix

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str, str]]:
        return type(self), (self.key, self.found, self.fix)


def require(fits: bool, key: str, found: object, fix: str) -> None:
    """Raise a `UserError` of these arguments unless `fits`."""
    if not fits:
        raise UserError(key, f"{found}", fix)


def reason(error: BaseException) -> str:
    """The type and the text of an error, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


class DiskError(UserError):
    """A run cannot write to its folder; the complete files there are intact."""

    status = 1


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
