"""`masked_mean` on the CPU: numpy on chunks of columns that stay in a core's cache."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightfed_kernels import _rows
from lightfed_kernels._bits import as_bytes, as_integers, select_table
from lightfed_kernels.layout import ALIGNMENT

# Elements of a chunk. Its values, mask and sum are read again and again; smaller chunks pay for
# more calls.
CHUNK = 65536

# Most elements to keep for later receivers, regardless of the number of senders.
KEPT = 2**23


@np.errstate(all="ignore")
def by_chunks(
    out: Tensor,
    rows: Sequence[Tensor],
    masks: Sequence[Tensor],
    receivers: Sequence[Tensor],
    first: Tensor,
    index: Tensor,
    weights: Tensor | None,
    over_neighbours: bool,
) -> None:
    """Takes the operator's arguments; neighbours are added in order, as in a kernel."""
    bounds = first.tolist()
    lists = [index[a:b].tolist() for a, b in pairwise(bounds)]
    shares: list[list[float] | None] = [None] * len(lists)
    if weights is not None:
        shares = [weights[a:b].tolist() for a, b in pairwise(bounds)]
    size = out.shape[1]
    again = np.bincount(index.numpy()) > 1
    room = KEPT // max(1, int(again.sum())) // ALIGNMENT * ALIGNMENT
    chunk = min(CHUNK, size, max(ALIGNMENT, room))
    senders = _Senders(rows, masks, again=again, chunk=chunk)
    means = _Means(senders, counted=bool(masks) and not over_neighbours, chunk=chunk)
    kept = [as_bytes(row) for row in _rows.each_row(receivers)]
    sums = np.empty(chunk, senders.wide)
    for begin in range(0, size, chunk):
        end = min(begin + chunk, size)
        senders.move(begin, end)
        for r, chosen in enumerate(lists):
            # Sums in float32 or float64 accumulate in place; only bfloat16 must be rounded.
            part = out[r, begin:end].detach()
            rounded = part.dtype == torch.bfloat16
            total = sums[: end - begin] if rounded else part.numpy()
            means.write(total, chosen, shares[r])
            if kept:
                integers = total.view(senders.table.dtype)
                stay = senders.select(kept[r][begin // 8 : end // 8])
                np.bitwise_and(integers, stay, out=integers)
            if rounded:
                part.copy_(torch.from_numpy(total))


class _Senders:
    """The senders' values and masks in one chunk of columns, unpacked on demand.

    Args:
        again: per sender, whether several receivers need it: then it is kept until `move`.
    """

    def __init__(
        self, rows: Sequence[Tensor], masks: Sequence[Tensor], *, again: np.ndarray, chunk: int
    ) -> None:
        every = _rows.each_row(rows)
        self.wide = np.float64 if every[0].dtype == torch.float64 else np.float32
        self.table = select_table(self.wide)
        self._halves = every[0].dtype == torch.bfloat16
        self._rows = [as_integers(row) for row in every]
        self._masks = [as_bytes(row) for row in _rows.each_row(masks)]
        self._again = again
        self._widened = np.empty(chunk, self.table.dtype)
        self._selected = np.empty((chunk // 8, 8), self.table.dtype)

    def move(self, begin: int, end: int) -> None:
        self._begin, self._end = begin, end
        self._values: dict[int, np.ndarray] = {}
        self._bits: dict[int, np.ndarray] = {}

    def values(self, sender: int) -> np.ndarray:
        """The sender's elements, 0 where it does not cover; valid until the next call."""
        if sender in self._values:
            return self._values[sender]
        integers = self._rows[sender][self._begin : self._end]
        if self._halves:
            # A bfloat16 is the upper half of a float32.
            widened = self._widened[: len(integers)]
            np.copyto(widened, integers)
            integers = np.left_shift(widened, 16, out=widened)
        if self._masks:
            # A product would keep NaNs (NaN times 0 is NaN), and np.where is 10 times slower.
            selected = self.select(self.words(sender))
            integers = np.bitwise_and(integers, selected, out=selected)
        found = integers.view(self.wide)
        if self._again[sender] and (self._masks or self._halves):
            found = self._values[sender] = found.copy()
        return found

    def bits(self, sender: int) -> np.ndarray:
        """The sender's mask as bytes of 0 and 1."""
        if sender in self._bits:
            return self._bits[sender]
        bits = np.unpackbits(self.words(sender), bitorder="little")
        if self._again[sender]:
            self._bits[sender] = bits
        return bits

    def words(self, sender: int) -> np.ndarray:
        return self._masks[sender][self._begin // 8 : self._end // 8]

    def select(self, words: np.ndarray) -> np.ndarray:
        """Integers of all ones where a bit is 1; valid until the next call."""
        selected = self._selected[: len(words)]
        return np.take(self.table, words, axis=0, out=selected, mode="clip").reshape(-1)


class _Means:
    """Means of a chunk; `counted` divides by those that cover an element, else by all."""

    def __init__(self, senders: _Senders, *, counted: bool, chunk: int) -> None:
        self._senders = senders
        self._counted = counted
        self._product = np.empty(chunk, senders.wide)
        self._share = np.empty((chunk // 8, 8), senders.wide)
        self._sum = np.empty(chunk, senders.wide)

    def write(self, total: np.ndarray, chosen: list[int], shares: list[float] | None) -> None:
        """The mean over the senders `chosen`, in their order, into `total`."""
        total.fill(0)
        if shares is not None:
            self._weighted(total, chosen, [self._senders.wide(share) for share in shares])
            return
        # Counts in bytes: a quarter of the memory of float32.
        count = np.zeros(total.shape, np.uint8 if len(chosen) < 256 else np.uint32)
        for sender in chosen:
            np.add(total, self._senders.values(sender), out=total)
            if self._counted:
                np.add(count, self._senders.bits(sender), out=count)
        if self._counted:
            # An element with count 0 is not covered: its sum is 0, and so is 0 / 1.
            np.add(count, (count == 0).view(np.uint8), out=count)
            np.divide(total, count, out=total, dtype=total.dtype)
        elif chosen:
            np.divide(total, total.dtype.type(len(chosen)), out=total)

    def _weighted(
        self, total: np.ndarray, chosen: list[int], shares: list[np.float32 | np.float64]
    ) -> None:
        size = len(total)
        product, weight = self._product[:size], self._sum[:size]
        whole = self._senders.wide(0)
        weight.fill(0)
        for sender, share in zip(chosen, shares, strict=True):
            np.multiply(self._senders.values(sender), share, out=product)
            np.add(total, product, out=total)
            whole += share
            if self._counted:
                np.add(weight, self._shares(sender, share), out=weight)
        if self._counted:
            weight[weight == 0] = 1
            np.divide(total, weight, out=total)
        elif chosen:
            np.divide(total, whole, out=total)

    def _shares(self, sender: int, share: np.float32 | np.float64) -> np.ndarray:
        """The sender's weight where it covers, 0 elsewhere, from a lookup table."""
        words = self._senders.words(sender)
        table = (self._senders.table & share.view(self._senders.table.dtype)).view(share.dtype)
        found = self._share[: len(words)]
        return np.take(table, words, axis=0, out=found, mode="clip").reshape(-1)
