"""The rows of clients, and what else they keep: opened, saved and restored.

A rank saves one matrix for each group, with the numbers of its clients, instead of 10,000 rows.
"""

import io
import pickle
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from lightfed_kernels import compress, expand, popcount
from torch import Tensor
from typing_extensions import override

from lightfed.api.places import Places
from lightfed.local.group_state import GroupState
from lightfed.state.client_state import KeptStates, Saved, block, stacked
from lightfed.state.rows import Row

T = TypeVar("T")


class ClientRows:
    """The rows of this rank's clients, in the stores of their groups, and what they keep.

    Args:
        states: The groups.
        places: The group and the rank of each client.
        kept: What clients keep besides their rows.
    """

    def __init__(self, states: Sequence[GroupState], places: Places, kept: KeptStates) -> None:
        self._states = states
        self._places = places
        self._kept = kept
        if places.keeps:
            self.open(range(len(places.groups)))
            for state in states:
                state.store.fill(state.initial)

    def open(self, clients: Sequence[int]) -> None:
        """Give slots of the row stores to those of the clients that are on this rank."""
        places = self._places
        by_group: list[list[int]] = [[] for _ in self._states]
        for client in clients:
            if places.owner[client] == places.ranks.rank:
                by_group[places.groups[client]].append(client)

        for state, members in zip(self._states, by_group, strict=True):
            state.open(members, keep=places.keeps)

    def view(self, clients: Sequence[int]) -> Row | None:
        """Return rows as one view, of shapes (K, P) and (K, Q); None if there is no such view.

        There is one if the clients are of one group, and their rows follow each other.
        """
        groups = {self._places.groups[client] for client in clients}
        if len(groups) != 1:
            return None
        return self._states[groups.pop()].store.view(clients)

    def saved(self, under_way: Collection[int] = ()) -> Saved:
        """Return the state of this rank's clients, in host memory.

        Of masked rows it has only the covered values. Matrices on the host are views of the rows:
        write them before the next round begins.

        Args:
            under_way: Clients whose updates have not arrived. What they keep until then is saved
                as well.
        """
        saved: Saved = defaultdict(list)
        for state in self._states:
            store = state.store
            clients = list(store.slots)
            masked = [client for client in clients if self._kept.mask(client) is not None]
            dense = [client for client in clients if self._kept.mask(client) is None]
            saved["values"] += stacked((client, self._covered(client)) for client in masked)
            if dense:
                saved["floats"].append(block(dense, store.block(dense).floats))
            if clients:
                saved["integers"].append(block(clients, store.block(clients).integers))

        for name, kept in self._kept.items():
            lasting = kept.lasting(under_way)
            if kept.durable or lasting:
                saved[name] = stacked(lasting.items())
        return dict(saved)

    def _row(self, client: int) -> Row:
        """Return the row of a client of this rank."""
        group = self._places.groups[client]
        return self._states[group].store.row(client)

    def _covered(self, client: int) -> Tensor:
        """Return the values of a client's row that its mask covers, of shape (nnz,)."""
        values = self._row(client).floats
        mask = self._kept.mask(client)
        assert mask is not None
        mask = mask.to(values.device)
        return compress(values, mask, nnz=int(popcount(mask)))

    def restore(self, client: int, state: Mapping[str, Tensor]) -> None:
        """Restore a client of this rank from its saved state."""
        # First, because the mask, which says how the row was saved, is one of them.
        for name, kept in self._kept.items():
            kept.restore(client, state.get(name))

        row = self._row(client)
        mask = self._kept.mask(client)
        if mask is None:
            row.floats.copy_(state["floats"])
        else:
            device = row.floats.device
            expand(state["values"].to(device), mask.to(device), out=row.floats)
        row.integers.copy_(state["integers"])


class _Pickler(pickle.Pickler):
    """Pickles a view of a row without the rows of all other clients, whose memory it shares."""

    @override
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        return obj.detach().clone().__reduce_ex__(pickle.DEFAULT_PROTOCOL)


class _Copier(pickle.Pickler):
    """Pickles everything but tensors, of which it keeps copies.

    Attributes:
        tensors: The copies, in the order in which they were met.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    @override
    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj.detach().clone())
        return len(self.tensors) - 1


class _Copied(pickle.Unpickler):
    """Puts tensors back where `_Copier` has met them."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    @override
    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def copied(values: T) -> T:
    """Return a deep copy of values of clients; tensors among them may be views of rows.

    It is what `pickled` and `pickle.loads` give, without writing the tensors as bytes.
    """
    file = io.BytesIO()
    copier = _Copier(file)
    copier.dump(values)
    file.seek(0)
    copies: T = _Copied(file, copier.tensors).load()
    return copies


def pickled(values: object) -> bytes:
    """Return values of clients as bytes; tensors among them may be views of rows."""
    file = io.BytesIO()
    _Pickler(file).dump(values)
    return file.getvalue()
