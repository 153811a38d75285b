"""Rows in a file: those of very many clients need not fit in memory.

The file has no name, so that nothing of it is left when the process ends, however it ends. It is
mapped into memory, and the system keeps there what has space. A client's row begins to exist, with
its initial values, when it is first used: clients that never take part take no space.
"""

import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.state.rows import ModelLayout, Row, RowStore
from lightfed.utils.errors import DiskError, UserError, reason

KEY = "model.store_folder"


class _FileMatrix:
    """A (slots, n) matrix in a file; slots that were not written take no space.

    Args:
        first: (n,) the values that a slot begins with.
        folder: of the file.
    """

    def __init__(self, first: Tensor, folder: Path) -> None:
        self.first, self._folder = first, folder
        self.values = first.new_empty(0, len(first))
        with tempfile.TemporaryFile(dir=folder) as file:
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)

    def grow(self, slots: int) -> None:
        """Have at least this many slots; views of before still show the same rows."""
        size = slots * self.first.nbytes
        if size:
            os.ftruncate(self._file, size)
            self._map = mmap.mmap(self._file, size)
        self.values = self.part(slice(0, slots))

    def part(self, slots: slice) -> Tensor:
        """Consecutive slots as a tensor with a storage of its own, so that it is saved alone."""
        count, size = slots.stop - slots.start, self.first.nbytes
        if not count * size:
            return self.first.new_empty(count, len(self.first))
        given = {"count": count * len(self.first), "offset": slots.start * size}
        return torch.frombuffer(self._map, dtype=self.first.dtype, **given).view(count, -1)

    def begin(self, slot: int) -> None:
        """Write a slot's first values; a full disk is an error here, and a signal in a mapping.

        Raises:
            OSError: there is no space.
        """
        data = memoryview(self.first.numpy().tobytes())
        place = slot * self.first.nbytes
        while data:
            written = os.pwrite(self._file, data, place)
            data, place = data[written:], place + written


class DiskRows(RowStore):
    """A store of rows in a file; `slots` has the clients whose row exists, in order of first use.

    Args:
        layout: of the group.
        device: of training.
        folder: of the file; it is made if it does not exist.
    """

    def __init__(self, layout: ModelLayout, *, device: torch.device, folder: Path) -> None:
        super().__init__(layout, device=device, host=True)
        self._folder = folder
        self._clients: set[int] = set()
        self._initial = Row.zeros(layout)
        self._files: list[_FileMatrix] = []

    @override
    def open(self, clients: list[int], *, keep: bool) -> bool:
        if not keep:
            self.slots.clear()
            self._clients.clear()
        self._clients.update(clients)
        if len(self._clients) <= len(self._floats):
            return False
        try:
            self._grow(len(self._clients))
        except (OSError, ValueError, OverflowError) as error:
            found = f"no file of {len(self._clients)} rows in {self._folder} ({reason(error)})"
            raise UserError(KEY, found, "name a folder on a disk with space") from error
        return True

    def _grow(self, slots: int) -> None:
        if not self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            first = self._initial.floats, self._initial.integers
            self._files = [_FileMatrix(values, self._folder) for values in first]
        for file in self._files:
            file.grow(slots)
        self._floats, self._integers = (file.values for file in self._files)

    @override
    def give(self, slots: Mapping[int, int]) -> None:
        super().give(slots)
        self._clients.difference_update(slots)
        self._clients.update(slots.values())

    @override
    def fill(self, row: Row) -> None:
        """Give every slot that is not used yet these values."""
        self._initial = row
        for file, values in zip(self._files, (row.floats, row.integers), strict=False):
            file.first = values

    @override
    def _slot(self, client: int) -> int:
        slot = self.slots.get(client)
        if slot is not None:
            return slot
        slot = len(self.slots)
        assert client in self._clients, f"client {client} is not on this rank"
        try:
            for file in self._files:
                file.begin(slot)
        except OSError as error:
            found = f"no row of client {client} in {self._folder} ({reason(error)})"
            raise DiskError(KEY, found, "free space there, or name another folder") from error
        self.slots[client] = slot
        return slot

    @override
    def _part(self, slots: slice) -> Row:
        return Row(*(file.part(slots) for file in self._files))
