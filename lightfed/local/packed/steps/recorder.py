"""Records the operators of a step on a device, to run them again without Python."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

import torch
from typing_extensions import override

Body = Callable[[], None]


class Recorder(ABC):
    """Records steps.

    A step reads and writes tensors that stay where they are, and nothing of the host. A recorded
    step runs on their addresses, with the numbers that the host gave it at that time.
    """

    @abstractmethod
    def warm(self) -> AbstractContextManager[None]:
        """Where a step runs before it is recorded, so that libraries allocate what they keep."""

    @abstractmethod
    def record(self, body: Body) -> Body:
        """Record a step without running it.

        Returns:
            runs the operators again.

        Raises:
            Exception: it cannot be recorded; no tensor has changed.
        """


class CudaRecorder(Recorder):
    """CUDA graphs. They share memory for what a step allocates: no two run at once.

    Args:
        device: of the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._first: torch.cuda.CUDAGraph | None = None  # its memory is that of all

    @override
    @contextmanager
    def warm(self) -> Iterator[None]:
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    @override
    def record(self, body: Body) -> Body:
        graph = torch.cuda.CUDAGraph()
        pool = None if self._first is None else self._first.pool()
        # A graph whose end raises leaves its stream the current one. Other threads, such as that of
        # checkpoints, may allocate meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(
                graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            body()
        self._first = self._first or graph
        return graph.replay


@cache
def recorder_of(device: torch.device) -> Recorder | None:
    """The recorder of a device; None if it has none."""
    return CudaRecorder(device) if device.type == "cuda" else None
