"""Exchanges rows between clients: every rank fetches each row that its clients need once.

A row is sent as a package: the covered values of every tensor, and one bit per element if the mask
leaves some out. All receivers read the same snapshot. Sums run over the clients in ascending order,
so the result does not depend on ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
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
)
from torch import Tensor

from lightfed.distributed.collectives import Ranks
from lightfed.state.rows import ModelLayout, Row

Over = Literal["covered", "neighbours"]

_ROOM = 2**28  # bytes of means that have not replaced their rows yet
_LEAST = 128 * ALIGNMENT  # columns of them, so that the cost of calls does not dominate


class Exchange:
    """Means over neighbours, for clients of one architecture.

    Args:
        layout: of the rows.
        ranks: of the run.
        owner: the rank of a client.
        device: where rows are, on every rank. The exchange takes place there.
    """

    def __init__(
        self, layout: ModelLayout, ranks: Ranks, *, owner: Mapping[int, int], device: torch.device
    ) -> None:
        self._ranks, self._owner, self._device = ranks, owner, device
        self._integers = layout.integers
        self._segments = Segments.build(layout.floats, device=device)
        self._live = self._segments.live_on(device)
        self._numel = self._segments.bounds[:, 1].numpy()  # (tensors,) elements
        self._words = -(-self._numel // ALIGNMENT)  # (tensors,) words of a mask

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
        lists = {k: sorted({k, *senders[k]}) for k in sorted(senders)}
        sending = sorted({sender for own in lists.values() for sender in own})
        if not sending:
            return {}
        counts = self._counts(sending, masks)
        if self._integers.size:
            self._integer_maxima(rows, lists, sending)
        arrived = self._fetch(lists, rows, masks, counts)
        mine = [k for k in lists if self._owner[k] == self._ranks.rank]
        if mine:
            self._means(rows, block, {k: lists[k] for k in mine}, arrived, masks, keep, over)
        return {k: self._bytes(own) + 8 * self._integers.numel for k, own in counts.items()}

    def _means(
        self,
        rows: Mapping[int, Row],
        block: Row | None,
        lists: Mapping[int, Sequence[int]],
        arrived: Mapping[int, tuple[Tensor, Tensor]],
        masks: Mapping[int, Tensor] | None,
        keep: Mapping[int, Tensor] | None,
        over: Over,
    ) -> None:
        """Write the means of this rank's receivers."""
        own = torch.stack([row.floats for row in rows.values()]) if block is None else block.floats
        place = {client: i for i, client in enumerate([*rows, *arrived])}
        heard = [[place[j] for j in theirs] for theirs in lists.values()]
        covers = [words for _, words in arrived.values()]
        everyone = [*rows] == [*lists]
        width = _ROOM // (4 * len(rows)) // ALIGNMENT * ALIGNMENT
        means = masked_mean(
            [own, *(row for row, _ in arrived.values())],
            Neighbours.build(heard, senders=len(place)),
            masks=None if masks is None else [*self._stacked(masks, rows), *covers],
            receivers=None if keep is None else self._stacked(keep, lists),
            over=over,
            width=max(width, _LEAST) if everyone else None,
        )
        if block is None or not everyone:
            for client, mean in zip(lists, means, strict=True):
                rows[client].floats.copy_(mean)

    def _stacked(self, masks: Mapping[int, Tensor], clients: Iterable[int]) -> list[Tensor]:
        """The masks of some clients as one matrix."""
        return [torch.stack([masks[k].to(self._device) for k in clients])]

    def _counts(
        self, senders: Sequence[int], masks: Mapping[int, Tensor] | None
    ) -> dict[int, np.ndarray]:
        """(tensors,) covered elements of each sender, the same on every rank."""
        if masks is None:
            return dict.fromkeys(senders, self._numel)
        shape = len(senders), len(self._numel)
        counts = torch.zeros(shape, dtype=torch.int64, device=self._device)
        mine = [i for i, k in enumerate(senders) if self._owner[k] == self._ranks.rank]
        if mine:
            words = self._stacked(masks, [senders[i] for i in mine])[0]
            counts[mine] = count_per_tensor(words, self._segments)
        return dict(zip(senders, self._ranks.sum_(counts).cpu().numpy(), strict=True))

    def _bytes(self, counts: np.ndarray) -> int:
        """Bytes of a package: 4 per covered value, and a mask for each tensor with gaps."""
        return 4 * int(counts.sum() + self._words[counts < self._numel].sum())

    def _gaps(self, counts: np.ndarray) -> Tensor:
        """Places of the mask words to send, those of tensors with gaps.

        A device would have to be waited for if they were booleans there.
        """
        places = np.flatnonzero(np.repeat(counts < self._numel, self._words))
        return torch.from_numpy(places).to(self._device, non_blocking=True)

    def _fetch(
        self,
        lists: Mapping[int, Sequence[int]],
        rows: Mapping[int, Row],
        masks: Mapping[int, Tensor] | None,
        counts: Mapping[int, np.ndarray],
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """The rows of other ranks' clients that this rank's receivers need, and their masks."""
        me, world, owner = self._ranks.rank, range(self._ranks.world), self._owner
        routes: dict[tuple[int, int], set[int]] = defaultdict(set)
        for receiver, theirs in lists.items():
            for client in theirs:
                if owner[client] != owner[receiver]:
                    routes[owner[client], owner[receiver]].add(client)
        if not routes:
            return {}
        leaving = [sorted(routes[me, rank]) for rank in world]
        coming = [sorted(routes[rank, me]) for rank in world]
        # Of a row that several ranks need, the package is made once.
        packages = {
            k: self._package(rows[k].floats, self._live if masks is None else masks[k], counts[k])
            for k in sorted({*chain(*leaving)})
        }
        empty = self._live.new_empty(0)
        parts = [torch.cat([empty, *(packages[k] for k in clients)]) for clients in leaving]
        sizes = [[self._bytes(counts[k]) // 4 for k in clients] for clients in coming]
        found: dict[int, tuple[Tensor, Tensor]] = {}
        received = self._ranks.swap(parts, [sum(own) for own in sizes])
        for clients, part, own in zip(coming, received, sizes, strict=True):
            for client, package in zip(clients, part.split(own), strict=True):
                found[client] = self._unpacked(package, counts[client])
        return found

    def _package(self, row: Tensor, words: Tensor, counts: np.ndarray) -> Tensor:
        """(n,) int32: a client's covered values, and words of its mask."""
        words = words.to(self._device)
        values = compress(row, words, nnz=int(counts.sum()))
        return torch.cat([values.view(torch.int32), words[self._gaps(counts)]])

    def _unpacked(self, package: Tensor, counts: np.ndarray) -> tuple[Tensor, Tensor]:
        """A client's row, and the words of its mask."""
        words, nnz = self._live.clone(), int(counts.sum())
        words[self._gaps(counts)] = package[nnz:]
        return expand(package[:nnz].view(torch.float32), words), words

    def _integer_maxima(
        self, rows: Mapping[int, Row], lists: Mapping[int, Sequence[int]], senders: Sequence[int]
    ) -> None:
        """Set integer buffers to the largest over the receiver and its senders."""
        least = torch.iinfo(torch.int64).min
        shape = len(senders), self._integers.size
        every = torch.full(shape, least, dtype=torch.int64, device=self._device)
        position = {client: i for i, client in enumerate(senders)}
        for client, row in rows.items():
            if client in position:
                every[position[client]] = row.integers
        self._ranks.max_(every)
        for client, row in rows.items():
            if client in lists:
                row.integers.copy_(every[[position[j] for j in lists[client]]].amax(0))
