"""Rows that do not fit on the device: kept in pinned host memory and prefetched."""

import torch

from lightfed.state.rows import Row, RowStore


class Staging:
    """Double buffer on the device for a group's host rows.

    One row trains while the next is copied.

    On CUDA the copies run on a separate stream; elsewhere the same code makes plain copies.
    """

    def __init__(self, store: RowStore) -> None:
        self._store = store
        device = store.device
        self._buffers = [Row.zeros(store.layout, device) for _ in range(2)]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: dict[int, Row] = {}
        self._next = 0

    def prefetch(self, client: int) -> None:
        """Start copying a client's row to the device, which holds at most two."""
        if client in self._held:
            return
        assert len(self._held) < 2, "both buffers are in use: put a row back first"
        buffer = self._buffers[self._next]
        self._next = 1 - self._next
        self._held[client] = buffer
        with torch.cuda.stream(self._stream):
            if self._stream is not None:
                # The buffer's previous row was put back on the compute stream.
                self._stream.wait_stream(torch.cuda.current_stream(self._store.device))
            buffer.copy_(self._store.row(client))

    def get(self, client: int) -> Row:
        """The client's row on the device, ready for use on the compute stream."""
        self.prefetch(client)
        if self._stream is not None:
            torch.cuda.current_stream(self._store.device).wait_stream(self._stream)
        return self._held[client]

    def holds(self, client: int) -> bool:
        """Whether the client's row is on the device."""
        return client in self._held

    def put_back(self, client: int) -> None:
        """Copy the trained row back to the host and free its buffer."""
        self._store.row(client).copy_(self._held.pop(client))
