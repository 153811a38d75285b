"""The time that work takes on a device."""

import time

import torch


class Stopwatch:
    """Times work on a device; on CUDA by two events in its stream, without synchronising.

    Args:
        device: device to time; creating the stopwatch starts it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._mark()

    def stop(self) -> None:
        """Stop timing when the device reaches this point."""
        self._mark()

    def _mark(self) -> None:
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
