"""How a run ends before its time: what a user can cause, and what a signal asks for."""


class UserError(ValueError):
    """What a user typed or pointed at cannot be used.

    Args:
        key: the configuration key, flag or file that has to change.
        found: what was found there.
        fix: what to do about it.

    Attributes:
        status: with which the command ends.
    """

    status = 2

    def __init__(self, key: str, found: str, fix: str) -> None:
        super().__init__(f"{key}: {found}; {fix}")
        self.key, self.found, self.fix = key, found, fix

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str, str]]:
        return type(self), (self.key, self.found, self.fix)


class DiskError(UserError):
    """A run that was going well cannot write to its folder; what was whole there still is."""

    status = 1


class Interrupted(Exception):
    """A signal stopped a run that is not finished; every rank has put its state on disk.

    Args:
        signal_number: the signal that asked for it.
        saved: what is on disk, in words: "round 4 of 30 and 3 of 10 sessions of round 5".
        resumable: whether a checkpoint has what it takes to go on.
        progressed: whether anything was finished since this process began or went on; a job that
            is requeued again and again without is too short.
    """

    def __init__(
        self, signal_number: int, saved: str, *, resumable: bool, progressed: bool = True
    ) -> None:
        super().__init__(f"signal {signal_number}: {saved}")
        self.signal_number, self.saved = signal_number, saved
        self.resumable, self.progressed = resumable, progressed
