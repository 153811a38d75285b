"""Rows that do not fit on the device: they are kept in pinned host memory, and prefetched."""

import torch

from lightfed.state.rows import Row, RowStore


class Staging:
    """Two rows on the device for the clients of a store in host memory: one trains, one is copied.

    On CUDA the copies run on a stream of their own, beside training. Elsewhere the same code makes
    plain copies.

    Args:
        store: The rows of a group's clients, in host memory.
    """

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self._device = store.device
        self._buffers = [Row.zeros(store.layout, self._device) for _ in range(2)]
        self._next_buffer = 0
        self._held: dict[int, Row] = {}

        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)

    def prefetch(self, client: int) -> None:
        """Start to copy a client's row to the device, which holds at most two."""
        if client in self._held:
            return
        assert len(self._held) < 2, "both buffers are in use: put a row back first"

        buffer = self._buffers[self._next_buffer]
        self._next_buffer = 1 - self._next_buffer
        self._held[client] = buffer

        with torch.cuda.stream(self._stream):
            if self._stream is not None:
                # The buffer's previous row was put back on the compute stream.
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            buffer.copy_(self._store.row(client))

    def get(self, client: int) -> Row:
        """Return the client's row on the device, ready for use on the compute stream."""
        self.prefetch(client)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._held[client]

    def holds(self, client: int) -> bool:
        """Return whether the client's row is on the device."""
        return client in self._held

    def put_back(self, client: int) -> None:
        """Copy the trained row to the host, and free its buffer."""
        self._store.row(client).copy_(self._held.pop(client))
