"""Signals that ask a run to stop and save: taken down here, obeyed by the loop at a safe place.

SLURM sends SIGUSR1 ahead of a time limit and SIGTERM when it preempts or requeues a job. A handler
may run inside a collective, so it does nothing but take the number down.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
_asked: int | None = None


def _take_down(number: int, frame: FrameType | None) -> None:
    global _asked
    _asked = number


def listen() -> None:
    """From now on SIGUSR1 and SIGTERM are only taken down; calling it again changes nothing.

    Raises:
        ValueError: outside the main thread, where Python cannot set handlers.
    """
    for number in _SIGNALS:
        signal.signal(number, _take_down)


def asked() -> int | None:
    """The signal that came last since the run began to listen; None if none did."""
    return _asked


def forget() -> None:
    """Of a signal that has been obeyed: the next one is told apart from it."""
    global _asked
    _asked = None


@contextmanager
def listening() -> Iterator[None]:
    """Listen for the length of a block, then have the handlers of before back.

    Where the process listens already nothing changes, and what came before the block counts in
    it; otherwise what came in the block is forgotten after it. Outside the main thread, where
    Python sets no handlers, nobody listens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    listen()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if before[signal.SIGTERM] is not _take_down:
            forget()
