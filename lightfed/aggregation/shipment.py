"""Rows in transit between ranks: which ones, and how they are packed.

A row is sent as a package: the covered values of every tensor, and one bit per element if the mask
leaves some out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from lightfed_kernels import ALIGNMENT, Segments, compress, expand
from torch import Tensor

from lightfed.distributed.collectives import Ranks


@dataclass(frozen=True)
class Traffic:
    """Which rows are sent from which rank to which.

    Attributes:
        needed: by rank, senders on other ranks to its receivers, ascending.
        present: by rank, the number of its receivers plus that of its `locals`.
        locals: by rank, its own clients that send to its receivers or to other ranks.
        owner: client -> rank.
        routes: (sending rank, receiving rank) -> clients whose rows are sent, ascending.
    """

    needed: list[list[int]]
    present: list[int]
    locals: list[list[int]]
    owner: Mapping[int, int]
    routes: dict[tuple[int, int], list[int]]

    @classmethod
    def of(
        cls, lists: Mapping[int, Sequence[int]], owner: Mapping[int, int], world: int
    ) -> "Traffic":
        read: list[set[int]] = [set() for _ in range(world)]
        receivers = [0] * world
        for receiver, senders in lists.items():
            read[owner[receiver]].update(senders)
            receivers[owner[receiver]] += 1
        needed = [sorted(j for j in read[r] if owner[j] != r) for r in range(world)]
        own = [{j for j in read[r] if owner[j] == r} for r in range(world)]
        routes: dict[tuple[int, int], list[int]] = {}
        for receiver, clients in enumerate(needed):
            for client in clients:
                own[owner[client]].add(client)
                routes.setdefault((owner[client], receiver), []).append(client)
        present = [n + len(o) for n, o in zip(receivers, own, strict=True)]
        return cls(needed, present, [sorted(o) for o in own], owner, routes)

    def sent(self, rank: int) -> int:
        """Number of rows that a rank sends; a row to several ranks counts for each."""
        return sum(len(clients) for (sender, _), clients in self.routes.items() if sender == rank)

    @property
    def travelling(self) -> set[int]:
        """Clients whose rows are sent to another rank."""
        return {client for clients in self.routes.values() for client in clients}

    def between(self, sender: int, receiver: int) -> list[int]:
        """Clients whose rows are sent from one rank to another."""
        return self.routes.get((sender, receiver), [])


@dataclass(frozen=True)
class Tensors:
    """The tensors of a layout, for packing."""

    segments: Segments

    @property
    def numel(self) -> np.ndarray:
        """(tensors,) elements."""
        return self.segments.bounds[:, 1].numpy()

    @property
    def words(self) -> np.ndarray:
        """(tensors,) number of mask words."""
        return -(-self.numel // ALIGNMENT)

    def package_bytes(self, counts: np.ndarray) -> np.ndarray:
        """(rows,) bytes of a row: 4 per covered value, and a mask for each tensor with gaps.

        `counts` are (rows, tensors) covered elements.
        """
        found: np.ndarray = 4 * (counts.sum(1) + (counts < self.numel) @ self.words)
        return found

    def coded(self, counts: np.ndarray) -> np.ndarray:
        """(W,) bool: mask words to send, those of tensors with gaps."""
        return np.repeat(counts < self.numel, self.words)


class Shipment:
    """The packages of one exchange.

    This rank receives the rows of `coming`, in the order of `fetch`, and sends those of `leaving`.

    Args:
        live: (W,) the words of a row without a mask.
        ranks: of the run.
        traffic: which rows are sent.
        coded: (W,) by client: see `Tensors.coded`.
        values: by client, the number of covered elements in every block.
        blocks: columns, of those that are sent.
        masks: of this rank's clients; None for all elements.
    """

    def __init__(
        self,
        live: Tensor,
        ranks: Ranks,
        traffic: Traffic,
        coded: Mapping[int, np.ndarray],
        values: Mapping[int, Sequence[int]],
        blocks: Sequence[tuple[int, int]],
        masks: Mapping[int, Tensor] | None,
    ) -> None:
        self._ranks, self._traffic = ranks, traffic
        self._live, self._coded, self._masks = live, coded, masks
        begins = [begin for begin, _ in blocks]
        self._values = {k: dict(zip(begins, own, strict=True)) for k, own in values.items()}
        me, world = ranks.rank, range(ranks.world)
        self.coming = [k for r in world for k in traffic.between(r, me)]
        self.leaving = sorted({k for r in world for k in traffic.between(me, r)})

    def fetch(
        self, begin: int, end: int, leaving: Mapping[int, Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The columns begin to end - 1 of the rows `coming`, and the words of their masks.

        `leaving` are columns of rows of this rank, by client.
        """
        if not self._traffic.routes:
            return [], []
        me, world = self._ranks.rank, self._ranks.world
        # Of a row that several ranks need, the package is made once.
        packages = {k: self._package(k, begin, end, leaving[k]) for k in self.leaving}
        empty = [self._live.new_empty(0)]
        parts = [
            torch.cat(empty + [x for k in self._traffic.between(me, r) for x in packages[k]])
            for r in range(world)
        ]
        coming = [self._traffic.between(r, me) for r in range(world)]
        sizes = [sum(sum(self._size(k, begin, end)) for k in clients) for clients in coming]
        rows: list[Tensor] = []
        words: list[Tensor] = []
        for clients, package in zip(coming, self._ranks.swap(parts, sizes), strict=True):
            self._unpack(clients, package, begin, end, rows, words)
        return rows, words

    def _size(self, client: int, begin: int, end: int) -> tuple[int, int]:
        """Number of values and of mask words in a package's block."""
        words = self._coded[client][begin // ALIGNMENT : end // ALIGNMENT]
        return self._values[client][begin], int(words.sum())

    def _package(self, client: int, begin: int, end: int, row: Tensor) -> list[Tensor]:
        """A client's values and its mask's words, both int32."""
        whole = self._live if self._masks is None else self._masks[client]
        words = block_words(whole, begin, end)
        values = compress(row, words, nnz=self._values[client][begin])
        return [values.view(torch.int32), words[self._sent_words(client, begin, end)]]

    def _unpack(
        self,
        clients: Sequence[int],
        package: Tensor,
        begin: int,
        end: int,
        rows: list[Tensor],
        words: list[Tensor],
    ) -> None:
        done = 0
        for client in clients:
            values, coded = self._size(client, begin, end)
            own = block_words(self._live, begin, end).clone()
            own[self._sent_words(client, begin, end)] = package[done + values :][:coded]
            rows.append(expand(package[done : done + values].view(torch.float32), own))
            words.append(own)
            done += values + coded

    def _sent_words(self, client: int, begin: int, end: int) -> Tensor:
        """Places of the words in a block: with booleans a device would have to be waited for."""
        coded = self._coded[client][begin // ALIGNMENT : end // ALIGNMENT]
        return torch.from_numpy(np.flatnonzero(coded)).to(self._ranks.device, non_blocking=True)


def block_words(words: Tensor, begin: int, end: int) -> Tensor:
    """The mask words of a block of columns, of one row or of several."""
    return words[..., begin // ALIGNMENT : end // ALIGNMENT]
