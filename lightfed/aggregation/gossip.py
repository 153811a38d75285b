"""Exchanges rows between clients: every rank fetches each row that its clients need once.

Rows are merged in place, one block of columns at a time. A block of all the rows that a rank needs
fits into a buffer of bounded size, so no rank needs memory for all clients' rows. All receivers
read the same snapshot: a block is written only when its old values are not needed. Sums run over
the clients in ascending order, so the result does not depend on ranks or blocks.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from lightfed_kernels import (
    ALIGNMENT,
    Neighbours,
    Segments,
    count_per_tensor,
    masked_mean,
)
from torch import Tensor

from lightfed.aggregation.shipment import Shipment, Tensors, Traffic, block_words
from lightfed.distributed.collectives import Ranks
from lightfed.state.rows import ModelLayout, Row

Over = Literal["covered", "neighbours"]

# Bytes per column for every row in transit: a value and a bit, twice. An incoming row is held as
# received and as merged, an outgoing one in its package and in the send buffer.
_ROW = 8.25
# Blocks end at a mask word, and are wide enough that the cost of calls does not dominate.
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
        senders: Mapping[int, Sequence[int]],
        *,
        masks: Mapping[int, Tensor] | None,
        keep: Mapping[int, Tensor] | None,
        over: Over,
    ) -> dict[int, int]:
        """Replace each receiver's row by the mean over itself and its senders.

        Args:
            rows: of this rank's clients; receivers' are written.
            senders: receiver -> its senders; the same on every rank.
            masks: of this rank's clients, packed.
            keep: of this rank's receivers, packed.
            over: see `masked_mean`.

        Returns:
            sender -> bytes of its package.
        """
        if not senders:
            return {}
        lists = {k: sorted({k, *senders[k]}) for k in sorted(senders)}
        sending = sorted({sender for own in lists.values() for sender in own})
        counts = self._counts(sending, masks)
        traffic = Traffic.of(lists, self._owner, self._ranks.world)
        shipment = Shipment(
            self._tensors, self._ranks, traffic, dict(zip(sending, counts, strict=True)), masks
        )
        if self._integers.size:
            self._integer_maxima(rows, lists, sending)
        mine = [k for k in lists if self._owner[k] == self._ranks.rank]
        blocks = self._blocks(traffic, shipment)
        # Reused by all blocks: on a CPU, new memory costs as much as the sums.
        means = torch.empty(len(mine), blocks[0][1], device=self._ranks.device)
        for begin, end in blocks:
            here = {
                k: rows[k].floats[begin:end].to(self._ranks.device, non_blocking=True)
                for k in traffic.locals[self._ranks.rank]
            }
            cover = None if masks is None else {k: block_words(masks[k], begin, end) for k in here}
            shipment.fetch(begin, end, here, cover)
            if mine:
                out = means[:, : end - begin]
                self._merge(rows, lists, mine, here, cover, keep, over, begin, end, out)
        whole = 8 * self._integers.numel
        sizes = [whole + self._tensors.package_bytes(n) for n in counts]
        return dict(zip(sending, sizes, strict=True))

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
            else torch.stack([block_words(keep[k], begin, end) for k in mine]),
            over=over,
            out=out,
        )
        for k, mean in zip(mine, out, strict=True):
            rows[k].floats[begin:end].copy_(mean)

    def _blocks(self, traffic: Traffic, shipment: Shipment) -> list[tuple[int, int]]:
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

    def _integer_maxima(
        self, rows: Mapping[int, Row], lists: Mapping[int, Sequence[int]], senders: Sequence[int]
    ) -> None:
        """Set integer buffers to the largest over the receiver and its senders."""
        least = torch.iinfo(torch.int64).min
        shape, device = (len(senders), self._integers.size), self._ranks.device
        every = torch.full(shape, least, dtype=torch.int64, device=device)
        position = {client: i for i, client in enumerate(senders)}
        for client, row in rows.items():
            if client in position:
                every[position[client]] = row.integers.to(every.device)
        self._ranks.max_(every)
        for client, row in rows.items():
            if client in lists:
                row.integers.copy_(every[[position[j] for j in lists[client]]].amax(0))
