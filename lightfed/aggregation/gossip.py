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
    popcount,
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
# Bytes for an exchange, at least and on a CPU.
ROOM = 2**28
# Masks that are counted in one call, of which it has copies.
_AT_ONCE = 128


def room(ranks: Ranks) -> int:
    """Bytes for an exchange: a quarter of what the fullest card has free; on a CPU ROOM.

    Rows that pass in few blocks take few calls. The result does not depend on the blocks.
    """
    device = ranks.device
    if device.type != "cuda":
        return ROOM
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    return max(ROOM, -int(ranks.max_(torch.tensor([-free // 4]))))


class Exchange:
    """Means over neighbours, for clients of one architecture.

    `owner` gives the rank of a client. `buffer` is in bytes on this rank, for rows in transit and
    for a block of results; None for what the device has, see `room`.
    """

    def __init__(
        self, layout: ModelLayout, ranks: Ranks, *, owner: Mapping[int, int], buffer: int | None
    ) -> None:
        self._ranks, self._owner = ranks, owner
        self._buffer = room(ranks) if buffer is None else buffer
        self._integers = layout.integers
        self._tensors = Tensors(Segments.build(layout.floats, device=ranks.device))
        self._live = self._tensors.segments.live_on(ranks.device)

    def mean_(
        self,
        rows: Mapping[int, Row],
        senders: Mapping[int, Sequence[int]],
        *,
        masks: Mapping[int, Tensor] | None,
        keep: Mapping[int, Tensor] | None,
        over: Over,
        block: Row | None = None,
    ) -> dict[int, int]:
        """Replace each receiver's row by the mean over itself and its senders.

        `rows` are this rank's; receivers' are written. The senders to a receiver are the same on
        every rank. `masks` of this rank's clients and `keep` of its receivers are packed. For
        `over` see `masked_mean`. `block` has `rows` in their order as one view, which takes one
        call instead of one a client. Returns the bytes of each sender's package.
        """
        if not senders:
            return {}
        lists = {k: sorted({k, *senders[k]}) for k in sorted(senders)}
        sending = sorted({sender for own in lists.values() for sender in own})
        traffic = Traffic.of(lists, self._owner, self._ranks.world)
        blocks = self._blocks(traffic)
        sent = blocks if traffic.routes else []
        counts, values = self._counts(sending, masks, sent)
        coded = {k: self._tensors.coded(counts[sending.index(k)]) for k in traffic.travelling}
        held = dict(zip(sending, values.tolist(), strict=True))
        shipment = Shipment(self._live, self._ranks, traffic, coded, held, sent, masks)
        if self._integers.size:
            self._integer_maxima(rows, lists, sending)
        sources = traffic.locals[self._ranks.rank]
        local = _LocalRows(
            rows, block, self._ranks.device, sending=sources, leaving=shipment.leaving
        )
        mine = [k for k in lists if self._owner[k] == self._ranks.rank]
        place = {client: i for i, client in enumerate([*local.clients, *shipment.coming])}
        neighbours = Neighbours.build(
            [[place[j] for j in lists[k]] for k in mine], senders=len(place)
        )
        sizes = 8 * self._integers.numel + self._tensors.package_bytes(counts)
        sent_bytes = dict(zip(sending, sizes.tolist(), strict=True))
        width = blocks[0][1]
        if local.matrix is not None and local.clients == mine and not traffic.routes:
            cover, kept = (None if m is None else [m[k] for k in mine] for m in (masks, keep))
            masked_mean(
                local.matrix, neighbours, masks=cover, receivers=kept, over=over, width=width
            )
            return sent_bytes
        # Reused by all blocks: on a CPU, new memory costs as much as the sums.
        means = torch.empty(len(mine), width, device=self._ranks.device)
        covering, keeping = _words(masks, local.clients), _words(keep, mine)
        for begin, end in blocks:
            columns = local.columns(begin, end)
            arrived, covers = shipment.fetch(begin, end, columns)
            if not mine:
                continue
            cover = [block_words(words, begin, end) for words in covering]
            means_here = masked_mean(
                [*local.sources(columns, begin, end), *arrived],
                neighbours,
                masks=None if masks is None else [*cover, *covers],
                receivers=None if keep is None else [block_words(w, begin, end) for w in keeping],
                over=over,
                out=means[:, : end - begin],
            )
            local.write(mine, means_here, begin, end)
        return sent_bytes

    def _blocks(self, traffic: Traffic) -> list[tuple[int, int]]:
        """Columns of every block; the same on every rank."""
        widest = max(
            _ROW * (len(traffic.needed[r]) + traffic.sent(r)) + 4 * traffic.present[r]
            for r in range(self._ranks.world)
        )
        width = int(self._buffer / widest) // ALIGNMENT * ALIGNMENT
        width = max(width, _LEAST)
        size = self._tensors.segments.size
        return [(a, min(a + width, size)) for a in range(0, size, width)]

    def _counts(
        self,
        senders: Sequence[int],
        masks: Mapping[int, Tensor] | None,
        blocks: Sequence[tuple[int, int]],
    ) -> list[np.ndarray]:
        """(senders, tensors) and (senders, blocks) covered elements, the same on every rank."""
        tensors = len(self._tensors.numel)
        if masks is None:
            alike = self._count(self._live[None], blocks).cpu().numpy()
            return np.split(alike.repeat(len(senders), axis=0), [tensors], axis=1)
        shape = len(senders), tensors + len(blocks)
        counts = torch.zeros(shape, dtype=torch.int64, device=self._ranks.device)
        mine = [i for i, k in enumerate(senders) if self._owner[k] == self._ranks.rank]
        for start in range(0, len(mine), _AT_ONCE):
            part = mine[start : start + _AT_ONCE]
            counts[part] = self._count(torch.stack([masks[senders[i]] for i in part]), blocks)
        return np.split(self._ranks.sum_(counts).cpu().numpy(), [tensors], axis=1)

    def _count(self, words: Tensor, blocks: Sequence[tuple[int, int]]) -> Tensor:
        """(K, tensors + blocks) covered elements of masks (K, W)."""
        of_blocks = [popcount(block_words(words, begin, end)) for begin, end in blocks]
        counts = count_per_tensor(words, self._tensors.segments)
        return torch.cat([counts, *(own[:, None] for own in of_blocks)], 1)

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


def _words(masks: Mapping[int, Tensor] | None, clients: Sequence[int]) -> list[Tensor]:
    """The masks of some clients in one copy, of which a block is one view."""
    return [torch.stack([masks[k] for k in clients])] if masks is not None and clients else []


class _LocalRows:
    """This rank's rows in an exchange; one matrix if they lie on the device as one block.

    Rows of `sending` clients are read, here or on other ranks, where those of `leaving` ones are.
    `clients` are in the order of `sources`. `matrix` has all rows, if they lie so.
    """

    def __init__(
        self,
        rows: Mapping[int, Row],
        block: Row | None,
        device: torch.device,
        *,
        sending: Sequence[int],
        leaving: Sequence[int],
    ) -> None:
        self._rows = rows
        self._block = None if block is None else block.floats
        self._device = device
        here = self._block is not None and self._block.device == device
        self.matrix = self._block if here else None
        self._apart = leaving if here else sending
        self.clients = list(rows) if here else sending

    def columns(self, begin: int, end: int) -> dict[int, Tensor]:
        """Columns on the device of the rows that are needed one by one."""
        return {
            k: self._rows[k].floats[begin:end].to(self._device, non_blocking=True)
            for k in self._apart
        }

    def sources(self, columns: Mapping[int, Tensor], begin: int, end: int) -> list[Tensor]:
        """The columns of all `clients`."""
        if self.matrix is not None:
            return [self.matrix[:, begin:end]]
        return list(columns.values())

    def write(self, clients: Sequence[int], means: Tensor, begin: int, end: int) -> None:
        """Put the means of these clients into their rows."""
        if self._block is not None and clients == list(self._rows):
            self._block[:, begin:end].copy_(means)
            return
        for client, mean in zip(clients, means, strict=True):
            self._rows[client].floats[begin:end].copy_(mean)
