"""Exchanges rows between clients: every rank fetches each row that its clients need once.

A row is sent as a package: the covered values of every tensor, and one bit per element if the mask
leaves some out. Rows are merged in place, one block of columns at a time. A block of all the rows
that a rank needs fits into a buffer of bounded size, so no rank needs memory for all clients' rows.
All receivers read the same snapshot: a block is written only when its old values are not needed.
Sums run over the clients in ascending order, so the result does not depend on ranks or blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from lightfed_kernels import (
    ALIGNMENT,
    Neighbours,
    Segments,
    compress,
    count_per_tensor,
    expand,
    masked_mean,
    popcount,
)
from torch import Tensor

from lightfed.distributed.collectives import Ranks
from lightfed.state.rows import ModelLayout, Row

Over = Literal["covered", "neighbours"]

# Bytes per column for every row in transit: a value and a bit, twice. An incoming row is held as
# received and as merged, an outgoing one in its package and next to the others'.
_ROW = 8.25
# Blocks end at a word, and are wide enough that calls do not cost more than columns.
_LEAST = 128 * ALIGNMENT


class Exchange:
    """Means over neighbours, for clients of one architecture.

    Args:
        layout: of all rows.
        ranks: of the run.
        owner: client -> rank.
        buffer: bytes on this rank for rows in transit and for a block of results.
    """

    def __init__(
        self, layout: ModelLayout, ranks: Ranks, *, owner: Mapping[int, int], buffer: int
    ) -> None:
        self._ranks = ranks
        self._owner = owner
        self._buffer = buffer
        self._integers = layout.integers
        self._tensors = Tensors(Segments.build(layout.floats, device=ranks.device))

    def mean_(
        self,
        rows: Mapping[int, Row],
        hears: Mapping[int, Sequence[int]],
        *,
        masks: Mapping[int, Tensor] | None,
        keep: Mapping[int, Tensor] | None,
        over: Over,
    ) -> dict[int, int]:
        """Replace each receiver's row by the mean over itself and its senders.

        Args:
            rows: of this rank's clients; receivers' are written.
            hears: receiver -> its senders; the same on every rank.
            masks: of this rank's clients, packed.
            keep: of this rank's receivers, packed.
            over: see `masked_mean`.

        Returns:
            sender -> bytes of its package.
        """
        if not hears:
            return {}
        lists = {k: sorted({k, *hears[k]}) for k in sorted(hears)}
        senders = sorted({sender for heard in lists.values() for sender in heard})
        counts = self._counts(senders, masks)
        traffic = Traffic.of(lists, self._owner, self._ranks.world)
        shipment = Shipment(
            self._tensors, self._ranks, traffic, dict(zip(senders, counts, strict=True)), masks
        )
        if self._integers.size:
            self._integer_maxima(rows, lists, senders)
        mine = [k for k in lists if self._owner[k] == self._ranks.rank]
        blocks = self._blocks(traffic, shipment)
        # Shared by all blocks: on a CPU, fresh memory costs as much as the sums.
        means = torch.empty(len(mine), blocks[0][1], device=self._ranks.device)
        for begin, end in blocks:
            here = {k: self._part(rows[k].floats, begin, end) for k in traffic.local(self._ranks)}
            cover = None if masks is None else {k: _words(masks[k], begin, end) for k in here}
            shipment.fetch(begin, end, here, cover)
            if mine:
                out = means[:, : end - begin]
                self._merge(rows, lists, mine, here, cover, keep, over, begin, end, out)
        whole = 8 * self._integers.numel
        sizes = [whole + self._tensors.package_bytes(n) for n in counts]
        return dict(zip(senders, sizes, strict=True))

    def _merge(
        self,
        rows: Mapping[int, Row],
        lists: Mapping[int, Sequence[int]],
        mine: Sequence[int],
        here: Mapping[int, Tensor],
        cover: Mapping[int, Tensor] | None,
        keep: Mapping[int, Tensor] | None,
        over: Over,
        begin: int,
        end: int,
        out: Tensor,
    ) -> None:
        """Merge one block of all of this rank's receivers; `out` is for its means."""
        order = sorted(here)
        position = {client: i for i, client in enumerate(order)}
        masked_mean(
            [here[k] for k in order],
            Neighbours.build([[position[j] for j in lists[k]] for k in mine], senders=len(order)),
            masks=None if cover is None else [cover[k] for k in order],
            receivers=None
            if keep is None
            else torch.stack([_words(keep[k], begin, end) for k in mine]),
            over=over,
            out=out,
        )
        for k, mean in zip(mine, out, strict=True):
            rows[k].floats[begin:end].copy_(mean)

    def _blocks(self, traffic: "Traffic", shipment: "Shipment") -> list[tuple[int, int]]:
        """Columns of every block; the same on every rank."""
        widest = max(
            _ROW * (len(traffic.needed[r]) + traffic.sent(r)) + 8 * traffic.present[r]
            for r in range(self._ranks.world)
        )
        width = int(self._buffer / widest) // ALIGNMENT * ALIGNMENT
        width = max(width, _LEAST)
        size = self._tensors.segments.size
        blocks = [(a, min(a + width, size)) for a in range(0, size, width)]
        shipment.measure(blocks)
        return blocks

    def _counts(self, senders: Sequence[int], masks: Mapping[int, Tensor] | None) -> np.ndarray:
        """(senders, tensors) covered elements, the same on every rank."""
        numel = self._tensors.numel
        if masks is None:
            return np.tile(numel, (len(senders), 1))
        counts = torch.zeros(len(senders), len(numel), dtype=torch.int64, device=self._ranks.device)
        for i, client in enumerate(senders):
            if self._owner[client] == self._ranks.rank:
                counts[i] = count_per_tensor(masks[client], self._tensors.segments)
        return self._ranks.sum_(counts).cpu().numpy()

    def _part(self, row: Tensor, begin: int, end: int) -> Tensor:
        """A block of a row, on the device."""
        return row[begin:end].to(self._ranks.device, non_blocking=True)

    def _integer_maxima(
        self, rows: Mapping[int, Row], lists: Mapping[int, Sequence[int]], senders: Sequence[int]
    ) -> None:
        """Set integer buffers to the largest over the receiver and its senders."""
        least = torch.iinfo(torch.int64).min
        every = torch.full(
            (len(senders), self._integers.size),
            least,
            dtype=torch.int64,
            device=self._ranks.device,
        )
        position = {client: i for i, client in enumerate(senders)}
        for client, row in rows.items():
            if client in position:
                every[position[client]] = row.integers.to(every.device)
        self._ranks.max_(every)
        for client, row in rows.items():
            if client in lists:
                row.integers.copy_(every[[position[j] for j in lists[client]]].amax(0))


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
        heard: list[set[int]] = [set() for _ in range(world)]
        receivers = [0] * world
        for receiver, senders in lists.items():
            heard[owner[receiver]].update(senders)
            receivers[owner[receiver]] += 1
        needed = [sorted(j for j in heard[r] if owner[j] != r) for r in range(world)]
        own = [{j for j in heard[r] if owner[j] == r} for r in range(world)]
        routes: dict[tuple[int, int], list[int]] = {}
        for receiver, clients in enumerate(needed):
            for client in clients:
                own[owner[client]].add(client)
                routes.setdefault((owner[client], receiver), []).append(client)
        present = [n + len(o) for n, o in zip(receivers, own, strict=True)]
        return cls(needed, present, [sorted(o) for o in own], owner, routes)

    def local(self, ranks: Ranks) -> list[int]:
        """This rank's clients whose rows are read."""
        return self.locals[ranks.rank]

    def sent(self, rank: int) -> int:
        """Number of rows that a rank sends; a row to several ranks counts for each."""
        return sum(len(clients) for (sender, _), clients in self.routes.items() if sender == rank)

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

    def package_bytes(self, counts: np.ndarray) -> int:
        """Bytes of a row: 4 per covered value, and a mask for each tensor with gaps.

        Args:
            counts: (tensors,) covered elements.
        """
        return int(4 * counts.sum() + 4 * self.words[counts < self.numel].sum())

    def coded(self, counts: np.ndarray) -> np.ndarray:
        """(W,) bool: mask words to send, those of tensors with gaps."""
        return np.repeat(counts < self.numel, self.words)


class Shipment:
    """The packages of one exchange.

    Args:
        tensors: of the rows.
        ranks: of the run.
        traffic: which rows are sent where.
        counts: client -> (tensors,) covered elements.
        masks: of this rank's clients; None for whole rows.
    """

    def __init__(
        self,
        tensors: Tensors,
        ranks: Ranks,
        traffic: Traffic,
        counts: Mapping[int, np.ndarray],
        masks: Mapping[int, Tensor] | None,
    ) -> None:
        self._ranks = ranks
        self._traffic = traffic
        self._live = tensors.segments.live_on(ranks.device)
        self._masks = masks
        self._travelling = sorted({k for clients in traffic.needed for k in clients})
        self._coded = {k: tensors.coded(counts[k]) for k in self._travelling}
        self._values: dict[tuple[int, int], int] = {}

    def measure(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Count the values of every package in every block, for all ranks in one collective."""
        if not self._travelling:
            return
        device = self._ranks.device
        counts = torch.zeros(len(self._travelling), len(blocks), dtype=torch.int64, device=device)
        for i, client in enumerate(self._travelling):
            if self._traffic.owner[client] != self._ranks.rank:
                continue
            words = self._live if self._masks is None else self._masks[client]
            parts = [popcount(_words(words, begin, end)) for begin, end in blocks]
            counts[i] = torch.stack(parts)
        table = self._ranks.sum_(counts).tolist()
        for client, found in zip(self._travelling, table, strict=True):
            self._values |= {(client, a): n for (a, _), n in zip(blocks, found, strict=True)}

    def fetch(
        self, begin: int, end: int, here: dict[int, Tensor], cover: dict[int, Tensor] | None
    ) -> None:
        """Add a block of other ranks' rows to those of this rank.

        Args:
            begin: first column.
            end: one past the last column.
            here: client -> columns of its row; extended in place.
            cover: client -> words of its mask; extended in place.
        """
        if not self._travelling:
            return
        me, world = self._ranks.rank, self._ranks.world
        parts = [self._pack(self._traffic.between(me, r), begin, end, here) for r in range(world)]
        coming = [self._traffic.between(r, me) for r in range(world)]
        sizes = [sum(sum(self._size(k, begin, end)) for k in clients) for clients in coming]
        for clients, package in zip(coming, self._ranks.swap(parts, sizes), strict=True):
            self._unpack(clients, package, begin, end, here, cover)

    def _size(self, client: int, begin: int, end: int) -> tuple[int, int]:
        """Number of values and of mask words in a package's block."""
        words = self._coded[client][begin // ALIGNMENT : end // ALIGNMENT]
        return self._values[client, begin], int(words.sum())

    def _pack(
        self, clients: Sequence[int], begin: int, end: int, here: Mapping[int, Tensor]
    ) -> Tensor:
        """(n,) int32: for every client its values, then its mask's words."""
        parts = [self._live.new_empty(0)]
        for client in clients:
            whole = self._live if self._masks is None else self._masks[client]
            words = _words(whole, begin, end)
            values = compress(here[client], words, nnz=self._values[client, begin])
            parts += [values.view(torch.int32), words[self._sent_words(client, begin, end)]]
        return torch.cat(parts)

    def _unpack(
        self,
        clients: Sequence[int],
        package: Tensor,
        begin: int,
        end: int,
        here: dict[int, Tensor],
        cover: dict[int, Tensor] | None,
    ) -> None:
        done = 0
        for client in clients:
            values, coded = self._size(client, begin, end)
            words = _words(self._live, begin, end).clone()
            words[self._sent_words(client, begin, end)] = package[done + values :][:coded]
            # A copy is aligned, as the kernels require.
            row = package[done : done + values].clone().view(torch.float32)
            here[client] = expand(row, words)
            if cover is not None:
                cover[client] = words
            done += values + coded

    def _sent_words(self, client: int, begin: int, end: int) -> Tensor:
        coded = self._coded[client][begin // ALIGNMENT : end // ALIGNMENT]
        return torch.from_numpy(coded).to(self._ranks.device)


def _words(words: Tensor, begin: int, end: int) -> Tensor:
    """The mask words of a block of columns."""
    return words[begin // ALIGNMENT : end // ALIGNMENT]
