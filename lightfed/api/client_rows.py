"""What clients keep: rows, and what an algorithm declares; saved and restored.

A rank saves one matrix per client group, with the numbers of its clients, instead of 10,000 rows.
"""

import io
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lightfed_kernels import compress, expand, popcount
from torch import Tensor
from typing_extensions import override

from lightfed.api.places import Places
from lightfed.local.client_group import GroupState
from lightfed.state.client_state import KeptStates, Saved, block, stacked
from lightfed.state.rows import Row


class ClientRows:
    """The rows of this rank's clients, in the stores of their groups, and what they keep.

    Args:
        states: The groups.
        places: Of the clients.
        kept: What they keep besides their rows.
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
        """Give those clients slots that are on this rank."""
        places = self._places
        by_group: list[list[int]] = [[] for _ in self._states]
        for client in clients:
            if places.owner[client] == places.ranks.rank:
                by_group[places.groups[client]].append(client)

        for state, members in zip(self._states, by_group, strict=True):
            state.open(members, keep=places.keeps)

    def view(self, clients: Sequence[int]) -> Row | None:
        """(K, P) and (K, Q): a view of the rows, if they are of one group and follow each other."""
        groups = {self._places.groups[client] for client in clients}
        if len(groups) != 1:
            return None
        return self._states[groups.pop()].store.view(clients)

    def saved(self) -> Saved:
        """The state in host memory of this rank's clients.

        Of masked rows only the covered values. Matrices on the host are views of the rows: write
        them before the next round.
        """
        found: Saved = defaultdict(list)
        for state in self._states:
            store = state.store
            clients = [*store.slots]
            masked = {k for k in clients if self._kept.mask(k) is not None}
            found["values"] += stacked((k, self._covered(k)) for k in clients if k in masked)
            dense = [k for k in clients if k not in masked]
            if dense:
                found["floats"].append(block(dense, store.block(dense).floats))
            if clients:
                found["integers"].append(block(clients, store.block(clients).integers))
        for name, kept in self._kept.items():
            if kept.durable:
                found[name] = stacked(kept.data.items())
        return dict(found)

    def _row(self, client: int) -> Row:
        return self._states[self._places.groups[client]].store.row(client)

    def _covered(self, client: int) -> Tensor:
        """The values of a client's row that its mask covers."""
        row, mask = self._row(client).floats, self._kept.mask(client)
        assert mask is not None
        mask = mask.to(row.device)
        return compress(row, mask, nnz=int(popcount(mask)))

    def restore(self, client: int, state: Mapping[str, Tensor]) -> None:
        """Restore a client of this rank from its saved state."""
        for name, kept in self._kept.items():
            if kept.durable:
                kept.restore(client, state.get(name))
        row, mask = self._row(client), self._kept.mask(client)
        if mask is None:
            row.floats.copy_(state["floats"])
        else:
            place = row.floats.device
            expand(state["values"].to(place), mask.to(place), out=row.floats)
        row.integers.copy_(state["integers"])


class _Pickler(pickle.Pickler):
    """Pickles a view of a row without the rows of all other clients, whose memory it shares."""

    @override
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        return obj.detach().clone().__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def pickled(values: object) -> bytes:
    """Values of clients, of which tensors may be views of their rows."""
    file = io.BytesIO()
    _Pickler(file).dump(values)
    return file.getvalue()
