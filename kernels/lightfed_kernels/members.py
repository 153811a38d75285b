"""The clients of one merge: their levels, weights and labels, as small tables on a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
from torch import Tensor

from lightfed_kernels._rows import to_device
from lightfed_kernels.slices import SliceTable

# Fixed point: a weighted mean in units of 2^-40, so |values| are below 2^22 with a resolution of
# 9e-13.
FIXED_SCALE = 2.0**40
FIXED_LIMIT = 2.0**22


@dataclass(frozen=True, eq=False)
class Members:
    """All clients of a merge on all processes, and those whose rows are local.

    The tables list the local clients by level, wide levels first, and within a level as given. A
    client of weight 0 is not in them: a NaN times 0 is a NaN.

    Attributes:
        table: what the levels cover.
        clients: number of all clients.
        sizes: row length of every local client, in the order given.
        order: local client of every line of the tables.
        first: (L + 1,) int32: where the local clients of every level begin.
        levels_of: (lines,) int32: the levels of the local clients.
        weights: (lines,) float64.
        shares: (lines,) float64: the weights in units of fixed-point sums.
        totals: (L + 1,) float64: the weights of all clients of a level; last, the unit of a
            fixed-point sum.
        label_words: (lines, ceil(labels / 32)) int32: bit k of a client: it holds label k.
        label_totals: (L, labels) float64: the weights of all clients of a level with a label.
        widest: the first rank (of SliceTable) among all clients, and among the local ones.
    """

    table: SliceTable
    clients: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    first: Tensor
    levels_of: Tensor
    weights: Tensor
    shares: Tensor
    totals: Tensor
    label_words: Tensor
    label_totals: Tensor
    widest: tuple[int, int]

    @classmethod
    def build(
        cls,
        table: SliceTable,
        levels: Sequence[int],
        *,
        weights: Sequence[float] | None = None,
        labels: Sequence[Sequence[int] | None] | None = None,
        local: Sequence[int] | None = None,
    ) -> "Members":
        """Define the clients of a merge; everything is checked here, on the host.

        Args:
            table: of the levels.
            levels: position of every client's level in the table's `sources`.
            weights: a_k >= 0; 1 for all by default. Rows of weight 0 are not read.
            labels: the labels that each client holds; None (for one client or all) means every
                label.
            local: positions of the clients whose rows are local; all by default.

        Raises:
            ValueError: names the client.
        """
        count = len(levels)
        if count == 0:
            raise ValueError("levels: no client takes part in the merge")
        a = _checked_weights(weights, count)
        ranks = np.array([table.ranks[level] for level in checked_levels(levels, table)])
        held = _held(labels, table, count)
        given = _checked_local(local, count)
        taking_part = [i for i, k in enumerate(given) if a[k] > 0]
        order = sorted(taking_part, key=lambda i: ranks[given[i]])  # stable
        mine = [given[i] for i in order]
        n_levels = len(table.ranks)
        first = np.searchsorted(ranks[mine], np.arange(n_levels + 1)).astype(np.int32)
        total = float(a.sum())
        totals = np.bincount(ranks, weights=a, minlength=n_levels + 1)
        totals[-1] = total / FIXED_SCALE
        label_totals = np.zeros((n_levels, table.num_labels))
        np.add.at(label_totals, ranks, a[:, None] * held)
        shares = a[mine] * (FIXED_SCALE / total) if total else a[mine]
        device = table.device
        return cls(
            table=table,
            clients=count,
            sizes=tuple(table.sources[levels[k]].size for k in given),
            order=tuple(order),
            first=to_device(first, device),
            levels_of=to_device(ranks[mine].astype(np.int32), device),
            weights=to_device(a[mine], device),
            shares=to_device(shares, device),
            totals=to_device(totals, device),
            label_words=to_device(_packed(held[mine]), device),
            label_totals=to_device(label_totals, device),
            widest=(int(ranks.min()), int(ranks[mine].min(initial=n_levels - 1))),
        )


def _checked_weights(weights: Sequence[float] | None, count: int) -> np.ndarray:
    if weights is None:
        return np.ones(count)
    if len(weights) != count:
        raise ValueError(f"weights: {len(weights)} for {count} clients")
    for client, weight in enumerate(weights):
        if not (isfinite(weight) and weight >= 0):
            raise ValueError(f"weights: {weight} of client {client}; weights are finite and >= 0")
    return np.asarray(weights, np.float64)


def checked_levels(levels: Sequence[int], table: SliceTable) -> Sequence[int]:
    """Levels of clients that the table has.

    Raises:
        ValueError: names the client.
    """
    for client, level in enumerate(levels):
        if not 0 <= level < len(table.ranks):
            raise ValueError(
                f"levels: {level} of client {client}; the table has 0 .. {len(table.ranks) - 1}"
            )
    return levels


def _checked_local(local: Sequence[int] | None, count: int) -> list[int]:
    if local is None:
        return list(range(count))
    if len(set(local)) != len(local) or any(not 0 <= k < count for k in local):
        raise ValueError(f"local: {list(local)}; distinct positions in 0 .. {count - 1} are needed")
    return list(local)


def _held(
    labels: Sequence[Sequence[int] | None] | None, table: SliceTable, count: int
) -> np.ndarray:
    """(clients, labels) bool."""
    held = np.ones((count, table.num_labels), bool)
    if labels is None or table.num_labels == 0:
        return held
    if len(labels) != count:
        raise ValueError(f"labels: {len(labels)} for {count} clients")
    for client, own in enumerate(labels):
        if own is None:
            continue
        index = np.asarray(own, np.int64)
        if index.size and (index.min() < 0 or index.max() >= table.num_labels):
            raise ValueError(
                f"labels: client {client} holds labels {index.min()} .. {index.max()}; "
                f"there are 0 .. {table.num_labels - 1}"
            )
        held[client] = False
        held[client, index] = True
    return held


def _packed(held: np.ndarray) -> np.ndarray:
    """(clients, labels) bool -> (clients, ceil(labels / 32)) int32, bit i of word w: 32 w + i."""
    wide = -(-held.shape[1] // 32) * 32
    padded = np.zeros((held.shape[0], wide), bool)
    padded[:, : held.shape[1]] = held
    return np.packbits(padded, axis=1, bitorder="little").view("<i4").astype(np.int32)
