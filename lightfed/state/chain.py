"""Checkpoints that write only the clients that have changed.

The first checkpoint of a chain has the state of all clients. Each later one adds shards with the
clients whose state differs from what the chain holds. Two chains take turns, so that a checkpoint
and the one before it share no file: if one is corrupt, the other is complete.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from lightfed.distributed.collectives import Ranks

LONGEST = 64  # checkpoints of a chain: a reader opens so many shards per rank
_LARGEST = 2  # bytes of a chain, over those of all clients, at which a new one begins

# State of some clients, by name: matrices (K, ...) as "values", with the numbers (K,) of their
# "clients".
Saved = dict[str, list[dict[str, Tensor]]]
_Ints = NDArray[Any]


@dataclass(frozen=True)
class Changes:
    """The clients that a checkpoint has to write.

    Attributes:
        state: of this rank's clients.
        clients: numbers of those to write; None for all.
    """

    state: Saved
    clients: _Ints | None = None

    @property
    def size(self) -> int:
        """Bytes to write."""
        return sum(
            int(self._rows(block).sum()) * block["values"][:1].nbytes
            for blocks in self.state.values()
            for block in blocks
        )

    def chosen(self, *, copy: bool = False) -> Saved:
        """The state to write; with `copy`, none of it is a view of rows."""
        return {
            name: [self._part(block, copy=copy) for block in blocks]
            for name, blocks in self.state.items()
        }

    def _rows(self, block: dict[str, Tensor]) -> NDArray[np.bool_]:
        """(K,) which of a block's clients to write."""
        own = block["clients"].numpy()
        return np.full(len(own), True) if self.clients is None else np.isin(own, self.clients)

    def _part(self, block: dict[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
        index, values = torch.from_numpy(np.flatnonzero(self._rows(block))), block["values"]
        if len(index) == len(values) and not (copy and values._is_view()):
            return block
        return {"clients": block["clients"][index], "values": values.index_select(0, index)}


class Chain:
    """What the checkpoints of one chain hold of this rank's clients.

    Attributes:
        tags: of its shards, oldest first.
    """

    def __init__(self) -> None:
        self.tags: list[str] = []
        self._bytes = 0
        self._held = _digests({})
        self._next = (0, self._held)

    def changes(self, state: Saved, folder: Path, ranks: Ranks) -> Changes:
        """The clients whose state differs from what the chain holds, or is not in it.

        Those are all clients if the chain has ended on any rank. Called by every rank.

        Args:
            state: of this rank's clients.
            folder: of the chain's shards.
            ranks: of the run.
        """
        clients, digests = found = _digests(state)
        known, held = self._held
        # Clients may have come from other ranks, where older shards have them.
        _, place, before = np.intersect1d(clients, known, assume_unique=True, return_indices=True)
        new = np.full(len(clients), True)
        new[place] = digests[place] != held[before]
        chosen, whole = Changes(state, clients[new]), Changes(state)
        if ranks.any(self._ends(chosen.size, whole.size, folder)):
            self.tags, self._bytes, chosen = [], 0, whole
        self._next = (chosen.size, found)
        return chosen

    def extend(self, tag: str) -> None:
        """Note that the checkpoint with these changes is complete."""
        more, self._held = self._next
        self._bytes += more
        self.tags.append(tag)

    def _ends(self, more: int, full: int, folder: Path) -> bool:
        if len(self.tags) == LONGEST or (full and self._bytes + more >= _LARGEST * full):
            return True
        return not all((folder / tag).is_dir() for tag in self.tags)


class Chains:
    """The two chains of a main file that is written again and again."""

    def __init__(self) -> None:
        self._folder = Path()
        self._chains = [Chain(), Chain()]

    def next(self, folder: Path) -> Chain:
        """The chain whose turn it is, with shards in this folder."""
        if folder != self._folder:
            self._folder, self._chains = folder, [Chain(), Chain()]
        self._chains.reverse()
        return self._chains[0]


def _digests(state: Saved) -> tuple[_Ints, _Ints]:
    """The clients, ascending, and a 64-bit digest of the names, shapes and values of each."""
    blocks = [(name, block) for name, blocks in state.items() for block in blocks]
    everyone = [block["clients"].numpy() for _, block in blocks]
    sorted_ = np.sort(np.concatenate([*everyone, np.empty(0, np.int64)]))
    clients = sorted_[np.diff(sorted_, prepend=-1) > 0]  # np.unique takes ten times as long
    sums = np.zeros(len(clients), np.uint64)
    for some, (name, block) in zip(everyone, blocks, strict=True):
        values = block["values"]
        seed = xxh3_64_intdigest(f"{name} {tuple(values.shape[1:])}".encode())
        digests = np.full(len(some), seed, np.uint64)
        if values.numel():
            rows = values.reshape(len(some), -1).view(torch.uint8).numpy()
            digests[:] = [xxh3_64_intdigest(row, seed) for row in rows]
        sums[np.searchsorted(clients, some)] += digests
    return clients, sums
