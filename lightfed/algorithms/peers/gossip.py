"""Exchanges rows between clients, each client receiving the mean of its neighbors.

Every rank fetches each row that its clients need exactly once. A row travels as a package: the
covered values of every tensor and, for tensors where the mask leaves something out, one bit per
element. All receivers read the rows as they were before the exchange. Sums run over the clients in
ascending order, so that the result does not depend on which rank holds which client.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

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

# If all clients of a rank receive, means replace the rows block by block, so that they take little
# memory besides the rows. A block has about this many bytes ...
BLOCK_BYTES = 2**28
# ... but at least this many columns, so that the cost of a call does not dominate.
LEAST_BLOCK_COLUMNS = 128 * ALIGNMENT

ForeignRows: TypeAlias = dict[int, tuple[Tensor, Tensor]]
"""Rows of other ranks' clients: client -> its values (P,) and the packed words of its mask."""


class Exchange:
    """Means over neighbors, for clients of one architecture.

    Args:
        layout: The layout of the rows.
        ranks: The ranks of the run.
        owner: The rank of each client.
        device: Where the rows are, on every rank. The exchange takes place there.
    """

    def __init__(
        self, layout: ModelLayout, ranks: Ranks, *, owner: Mapping[int, int], device: torch.device
    ) -> None:
        self._ranks = ranks
        self._owner = owner
        self._device = device
        self._integers = layout.integers

        self._segments = Segments.build(layout.floats, device=device)
        self._all_covered = self._segments.live_on(device)  # packed mask of a dense row
        self._numel = self._segments.bounds[:, 1].numpy()  # (tensors,) elements of each tensor
        self._num_words = -(-self._numel // ALIGNMENT)  # (tensors,) mask words, rounded up

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

        Args:
            rows: The rows of this rank's clients; those of receivers are written.
            senders: Receiver -> the clients that it receives from; the same on every rank.
            masks: Packed masks (P / 32,) of what this rank's clients cover; None if they are dense.
            keep: Packed masks of the elements of the mean that this rank's receivers keep; None if
                they keep all of it.
            over: What sums are divided by; see `masked_mean`.
            block: All of `rows`, in their order, as one view. It takes one call instead of one for
                each client.

        Returns:
            The bytes of each sender's package.
        """
        members_of = {}  # receiver -> the clients in its mean, ascending
        for receiver in sorted(senders):
            members_of[receiver] = sorted({receiver, *senders[receiver]})

        every_member = sorted({member for members in members_of.values() for member in members})
        if not every_member:
            return {}

        # Every rank takes part in these collectives, whether or not it has a receiver.
        counts = self._counts(every_member, masks)
        if self._integers.size:
            self._integer_maxima(rows, members_of, every_member)
        foreign = self._fetch(members_of, rows, masks, counts)

        members_of_mine = {
            receiver: members
            for receiver, members in members_of.items()
            if self._owner[receiver] == self._ranks.rank
        }
        if members_of_mine:
            self._means(rows, block, members_of_mine, foreign, masks, keep, over)

        integer_bytes = 8 * self._integers.numel
        return {
            client: self._package_bytes(of_client) + integer_bytes
            for client, of_client in counts.items()
        }

    def _means(
        self,
        rows: Mapping[int, Row],
        block: Row | None,
        members_of: Mapping[int, Sequence[int]],
        foreign: ForeignRows,
        masks: Mapping[int, Tensor] | None,
        keep: Mapping[int, Tensor] | None,
        over: Over,
    ) -> None:
        """Write the means of this rank's receivers."""
        # The kernel reads one matrix of this rank's rows and then the foreign rows, and knows a
        # client by its position in this order.
        if block is None:
            own_rows = torch.stack([row.floats for row in rows.values()])
        else:
            own_rows = block.floats
        position = {client: i for i, client in enumerate([*rows, *foreign])}
        positions = [[position[member] for member in members] for members in members_of.values()]

        covers = None
        if masks is not None:
            covers = [self._stacked(masks, rows), *(words for _, words in foreign.values())]
        kept = None if keep is None else [self._stacked(keep, members_of)]

        # If every client of this rank receives, the means may overwrite the matrix in blocks of
        # columns: no row that is still needed is lost.
        all_receive = list(rows) == list(members_of)
        width = None
        if all_receive:
            columns = BLOCK_BYTES // (4 * len(rows)) // ALIGNMENT * ALIGNMENT
            width = max(columns, LEAST_BLOCK_COLUMNS)

        means = masked_mean(
            [own_rows, *(values for values, _ in foreign.values())],
            Neighbours.build(positions, senders=len(position)),
            masks=covers,
            receivers=kept,
            over=over,
            width=width,
        )

        # With a block of which all rows receive, the means are in place already.
        if block is None or not all_receive:
            for receiver, mean in zip(members_of, means, strict=True):
                rows[receiver].floats.copy_(mean)

    def _stacked(self, masks: Mapping[int, Tensor], clients: Iterable[int]) -> Tensor:
        """Return the masks of some clients as one matrix (clients, P / 32)."""
        return torch.stack([masks[client].to(self._device) for client in clients])

    def _counts(
        self, clients: Sequence[int], masks: Mapping[int, Tensor] | None
    ) -> dict[int, np.ndarray]:
        """Return how many elements of every tensor each client covers, as arrays (tensors,).

        They are the same on every rank. Without masks no rank has to ask the others.
        """
        if masks is None:
            return dict.fromkeys(clients, self._numel)

        counts = torch.zeros(len(clients), len(self._numel), dtype=torch.int64, device=self._device)
        positions_on_this_rank = [
            position
            for position, client in enumerate(clients)
            if self._owner[client] == self._ranks.rank
        ]
        if positions_on_this_rank:
            words = self._stacked(masks, [clients[i] for i in positions_on_this_rank])
            counts[positions_on_this_rank] = count_per_tensor(words, self._segments)

        # Each client is counted on one rank and 0 on the others.
        of_all_ranks = self._ranks.sum_(counts).cpu().numpy()
        return dict(zip(clients, of_all_ranks, strict=True))

    def _package_bytes(self, counts: np.ndarray) -> int:
        """Return the bytes of a package: 4 per covered value and per word of a sent mask.

        The mask of a tensor is sent if the tensor has a gap.
        """
        num_words = self._num_words[counts < self._numel].sum()
        return 4 * int(counts.sum() + num_words)

    def _sent_words(self, counts: np.ndarray) -> Tensor:
        """Return the positions of the mask words to send: those of tensors with gaps.

        Positions and not booleans: a device would have to count booleans, and the host to wait.
        """
        has_gaps = np.repeat(counts < self._numel, self._num_words)
        return torch.from_numpy(np.flatnonzero(has_gaps)).to(self._device, non_blocking=True)

    def _fetch(
        self,
        members_of: Mapping[int, Sequence[int]],
        rows: Mapping[int, Row],
        masks: Mapping[int, Tensor] | None,
        counts: Mapping[int, np.ndarray],
    ) -> ForeignRows:
        """Send the rows that other ranks need, and return those that this rank's receivers need."""
        routes = self._routes(members_of)
        if not routes:
            return {}

        this_rank = self._ranks.rank
        every_rank = range(self._ranks.world)
        leaving = [sorted(routes.get((this_rank, rank), ())) for rank in every_rank]
        coming = [sorted(routes.get((rank, this_rank), ())) for rank in every_rank]

        # A row that several ranks need is packed once.
        packages = {}
        for client in sorted({client for clients in leaving for client in clients}):
            mask = self._all_covered if masks is None else masks[client]
            packages[client] = self._pack(rows[client].floats, mask, counts[client])

        nothing = self._all_covered.new_empty(0)
        parcels = []
        for clients in leaving:
            parcels.append(torch.cat([nothing, *(packages[client] for client in clients)]))

        sizes = [
            [self._package_bytes(counts[client]) // 4 for client in clients] for clients in coming
        ]
        received = self._ranks.swap(parcels, [sum(of_a_rank) for of_a_rank in sizes])

        foreign: ForeignRows = {}
        for clients, parcel, of_a_rank in zip(coming, received, sizes, strict=True):
            for client, package in zip(clients, parcel.split(of_a_rank), strict=True):
                foreign[client] = self._unpack(package, counts[client])
        return foreign

    def _routes(self, members_of: Mapping[int, Sequence[int]]) -> dict[tuple[int, int], set[int]]:
        """Return the clients whose rows go from one rank to another: (sender, receiver) -> clients.

        Every rank computes the same routes.
        """
        routes: dict[tuple[int, int], set[int]] = {}
        for receiver, members in members_of.items():
            to_rank = self._owner[receiver]
            for member in members:
                from_rank = self._owner[member]
                if from_rank != to_rank:
                    routes.setdefault((from_rank, to_rank), set()).add(member)
        return routes

    def _pack(self, row: Tensor, words: Tensor, counts: np.ndarray) -> Tensor:
        """Return a package (n,) int32: a client's covered values, then words of its mask."""
        words = words.to(self._device)
        values = compress(row, words, nnz=int(counts.sum()))
        return torch.cat([values.view(torch.int32), words[self._sent_words(counts)]])

    def _unpack(self, package: Tensor, counts: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the row of a client (P,) and the words of its mask, from a package."""
        num_values = int(counts.sum())
        words = self._all_covered.clone()
        words[self._sent_words(counts)] = package[num_values:]
        return expand(package[:num_values].view(torch.float32), words), words

    def _integer_maxima(
        self,
        rows: Mapping[int, Row],
        members_of: Mapping[int, Sequence[int]],
        clients: Sequence[int],
    ) -> None:
        """Set integer buffers to the largest over the receiver and its senders."""
        smallest = torch.iinfo(torch.int64).min  # loses against what another rank has
        integers = torch.full(
            (len(clients), self._integers.size), smallest, dtype=torch.int64, device=self._device
        )
        position = {client: i for i, client in enumerate(clients)}
        for client, row in rows.items():
            if client in position:
                integers[position[client]] = row.integers
        self._ranks.max_(integers)

        for client, row in rows.items():
            if client in members_of:
                positions = [position[member] for member in members_of[client]]
                row.integers.copy_(integers[positions].amax(0))
