"""Records the operators of a step on a device, to run them again without Python."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from typing import Any

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
        self._pool = torch.cuda.graph_pool_handle()
        self._kept: dict[Any, torch.cuda.CUDAGraph] = {}  # by pool, which lasts as long

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
        try:
            self._capture(graph, self._pool, body)
        except Exception:
            self._recover(graph)
            raise
        self._kept.setdefault(self._pool, graph)
        return graph.replay

    def _capture(self, graph: torch.cuda.CUDAGraph, pool: Any, body: Callable[[], object]) -> None:
        # A graph whose end raises leaves its stream the current one. Other threads, such as that of
        # checkpoints, may allocate meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(
                graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            body()

    def _recover(self, failed: torch.cuda.CUDAGraph) -> None:
        """Undo what a capture leaves that did not end: torch does not.

        Its memory pool is still recorded to, so that no graph can share it, and the generator of
        the device raises at every draw until another capture has ended.
        """
        with suppress(RuntimeError):  # it has ended: what raised was Python
            torch._C._cuda_endAllocateToPool(self._stream.device.index, self._pool)
            torch._C._cuda_releasePool(self._stream.device.index, self._pool)
        self._kept[self._pool] = failed  # the allocator of pinned memory goes on asking it
        self._pool = torch.cuda.graph_pool_handle()
        nothing = partial(torch.zeros, 1, device=self._device)
        self._capture(torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), nothing)


@cache
def recorder_of(device: torch.device) -> Recorder | None:
    """The recorder of a device; None if it has none."""
    return CudaRecorder(device) if device.type == "cuda" else None
