"""Signals that ask a run to stop and save: recorded here, handled by the loop at a safe point.

SLURM sends SIGUSR1 before a time limit and SIGTERM when it preempts or requeues a job; Ctrl-C sends
SIGINT. A handler may run inside a collective, so it only records the number.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)

# The number of the last signal.
_asked: int | None = None


def _record(number: int, frame: FrameType | None) -> None:
    global _asked
    _asked = number


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Record the first Ctrl-C; the second one does not wait for the end of a session."""
    if _asked == number:
        raise KeyboardInterrupt
    _record(number, frame)


def listen() -> None:
    """Record SIGUSR1 and SIGTERM from now on. To call it again has no effect.

    Raises:
        ValueError: Outside the main thread, where Python cannot set handlers.
    """
    for number in _SIGNALS:
        signal.signal(number, _record)


def asked() -> int | None:
    """Return the last signal since the run began to listen; None if there was none."""
    return _asked


def forget() -> None:
    """Clear a signal that has been handled, so that a new one is noticed."""
    global _asked
    _asked = None


@contextmanager
def listening() -> Iterator[None]:
    """Listen within a block, then restore the previous handlers.

    If the process already listens, nothing changes and earlier signals count in the block.
    Otherwise signals of the block are forgotten after it. Does nothing outside the main thread,
    where Python cannot set handlers. Ctrl-C is recorded too, if Python's own handler has it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGINT)}
    listen()
    if before[signal.SIGINT] is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            # A handler that was not set from Python is None, and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        listened_already = before[signal.SIGTERM] is _record
        if not listened_already:
            forget()
