"""The rows of a group's clients on a rank, as a matrix."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightfed.state.rows import ModelLayout, Row


class RowStore:
    """Rows of one group's clients on this rank, as one (slots, P) matrix.

    Stateless algorithms open a slot for each participant of a round and reuse all slots in the next
    one. Stateful ones (`keep`) assign a client's slot until it leaves this rank. Memory is
    proportional to the clients of this rank, not to the registered ones.

    Args:
        layout: of the group.
        device: of training.
        host: keep the rows in (pinned) host memory and stage them through device rows.
    """

    def __init__(self, layout: ModelLayout, *, device: torch.device, host: bool) -> None:
        self.layout = layout
        self.device = device
        self.host = host
        self._place = torch.device("cpu") if host else device
        self._pin = host and device.type == "cuda"
        self.slots: dict[int, int] = {}
        self._floats = self._allocate(0)
        self._integers = torch.zeros(0, layout.integers.size, dtype=torch.int64, device=self._place)

    def _allocate(self, slots: int) -> Tensor:
        return self.layout.floats.new_row(slots, device=self._place, pin_memory=self._pin)

    def open(self, clients: list[int], *, keep: bool) -> bool:
        """Assign every client a slot; True if old views are invalid, as the matrix is a new one.

        A slot's contents are undefined until written, unless the client held it before and `keep`
        is set.
        """
        if not keep:
            self.slots.clear()
        for client in clients:
            self.slots.setdefault(client, len(self.slots))
        if len(self.slots) <= len(self._floats):
            return False
        floats = self._allocate(len(self.slots))
        integers = self._integers.new_zeros(len(self.slots), self.layout.integers.size)
        if keep:
            floats[: len(self._floats)] = self._floats
            integers[: len(self._integers)] = self._integers
        self._floats, self._integers = floats, integers
        return True

    def give(self, slots: Mapping[int, int]) -> None:
        """Give slots to other clients (leaving -> coming), whose rows are then undefined."""
        self.slots = {slots.get(client, client): slot for client, slot in self.slots.items()}

    def fill(self, row: Row) -> None:
        """Give every slot these values."""
        self._floats[:] = row.floats
        self._integers[:] = row.integers

    def row(self, client: int) -> Row:
        """The client's row as views of the store."""
        slot = self._slot(client)
        return Row(self._floats[slot], self._integers[slot])

    def view(self, clients: Sequence[int]) -> Row | None:
        """The clients' rows as (K, P) and (K, Q) views; None if others lie between them."""
        slots = self._slots(clients)
        span = slice(slots[0], slots[0] + len(slots))
        return self._part(span) if slots == list(range(span.start, span.stop)) else None

    def block(self, clients: Sequence[int]) -> Row:
        """The clients' rows as (K, P) and (K, Q); copies unless `view` has them."""
        view = self.view(clients)
        if view is not None:
            return view
        return self.copy(clients)

    def copy(self, clients: Sequence[int]) -> Row:
        """Copies of the clients' rows as (K, P) and (K, Q), where the store is."""
        index = torch.tensor(self._slots(clients), device=self._place)
        return Row(self._floats.index_select(0, index), self._integers.index_select(0, index))

    def put_block(self, clients: Sequence[int], block: Row) -> None:
        """Write a block of rows that is not a view of the store."""
        index = torch.tensor(self._slots(clients), device=self._place)
        self._floats.index_copy_(0, index, block.floats.to(self._place))
        self._integers.index_copy_(0, index, block.integers.to(self._place))

    def __contains__(self, client: int) -> bool:
        return client in self.slots

    def _slot(self, client: int) -> int:
        return self.slots[client]

    def _slots(self, clients: Sequence[int]) -> list[int]:
        return [self._slot(client) for client in clients]

    def _part(self, slots: slice) -> Row:
        return Row(self._floats[slots], self._integers[slots])
