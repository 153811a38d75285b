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
    """Times work on a device from now on; on CUDA by two events, without synchronising."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.stop()  # a begin and an end are marked alike

    def stop(self) -> None:
        """Stop timing when the device reaches this point."""
        if self._stream is None:
            self._times.append(time.perf_counter())
        else:
            self._events.append(self._stream.record_event(torch.cuda.Event(enable_timing=True)))

    def seconds(self) -> float:
        """Elapsed time; read it only after the device has finished some later work."""
        if self._stream is None:
            begin, over = self._times
            return over - begin
        start, end = self._events
        return start.elapsed_time(end) / 1000


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
        """The items; the time to get each of them counts for a part."""
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
        """Seconds by part since the last call."""
        self._switch(self._part)
        taken, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return taken

    def _switch(self, part: Part) -> Part:
        now = time.perf_counter()
        self._seconds[self._part] += now - self._since
        before, self._part, self._since = self._part, part, now
        return before
