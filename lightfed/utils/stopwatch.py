"""The time that work takes on a device, and the parts of a round on a rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar, get_args

import torch

T = TypeVar("T")
Part = Literal["data", "sessions", "merge", "evaluation", "checkpoint", "waiting", "rest"]
PARTS: tuple[Part, ...] = get_args(Part)


class Stopwatch:
    """Times work on a device from now on; on CUDA by two events, without synchronizing.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # Of the begin and the end. Only one of the two lists is used.
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._mark()

    def _mark(self) -> None:
        """Note the time at which the device reaches this point."""
        if self._stream is None:
            self._times.append(time.perf_counter())
        else:
            self._events.append(self._stream.record_event(torch.cuda.Event(enable_timing=True)))

    def stop(self) -> None:
        """Stop timing when the device reaches this point."""
        self._mark()

    def seconds(self) -> float:
        """Return the elapsed time; call it only after the device has finished some later work."""
        if self._stream is None:
            start, end = self._times
            return end - start
        start_event, end_event = self._events
        return start_event.elapsed_time(end_event) / 1000


class Timings:
    """Wall-clock seconds of the parts of a round on one rank.

    Every moment counts for the innermost part, so that the parts add up to the round. On CUDA the
    sessions last until their results have arrived; what is still queued counts for the part that
    waits for it.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._part: Part = "rest"
        self._since = time.perf_counter()

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Count the block for a part."""
        outer = self._switch(part)
        try:
            yield
        finally:
            self._switch(outer)

    def each(self, part: Part, items: Iterator[T]) -> Iterator[T]:
        """Yield the items; the time to get each of them counts for a part."""
        while True:
            outer = self._switch(part)
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self._switch(outer)
            yield item

    def take(self) -> dict[Part, float]:
        """Return the seconds by part since the last call."""
        # Count the present part up to now.
        self._switch(self._part)
        seconds = self._seconds
        self._seconds = dict.fromkeys(PARTS, 0.0)
        return seconds

    def _switch(self, part: Part) -> Part:
        """Count from now on for another part, and return the one before it."""
        now = time.perf_counter()
        before = self._part
        self._seconds[before] += now - self._since
        self._part = part
        self._since = now
        return before
