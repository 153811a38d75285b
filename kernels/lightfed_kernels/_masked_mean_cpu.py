"""`masked_mean` on the CPU: numpy on chunks of columns that stay in a core's cache."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightfed_kernels import _rows
from lightfed_kernels._bits import as_bytes, as_integers, select_table
from lightfed_kernels.layout import ALIGNMENT

# Elements of a chunk. Its values, mask and sum are read again and again, and should stay in the
# cache; smaller chunks pay for more calls.
CHUNK = 65536

# The largest number of elements to keep for later receivers, however many senders there are.
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
    """Write the means into `out`, chunk by chunk; the arguments are those of the operator.

    Neighbors are added in the order of their lists, as in a kernel.
    """
    bounds = first.tolist()
    lists = [index[begin:end].tolist() for begin, end in pairwise(bounds)]
    weights_of_lists: list[list[float] | None] = [None] * len(lists)
    if weights is not None:
        weights_of_lists = [weights[begin:end].tolist() for begin, end in pairwise(bounds)]

    # Senders that several receivers need are unpacked once. The more there are of them, the shorter
    # are the chunks, so that what is kept does not grow.
    size = out.shape[1]
    needed_again = np.bincount(index.numpy()) > 1
    room = KEPT // max(1, int(needed_again.sum())) // ALIGNMENT * ALIGNMENT
    chunk = min(CHUNK, size, max(ALIGNMENT, room))

    senders = _Senders(rows, masks, needed_again=needed_again, chunk=chunk)
    means = _Means(senders, counted=bool(masks) and not over_neighbours, chunk=chunk)
    receiver_masks = [as_bytes(row) for row in _rows.each_row(receivers)]
    buffer = np.empty(chunk, senders.wide)
    for begin in range(0, size, chunk):
        end = min(begin + chunk, size)
        senders.move(begin, end)
        for r, chosen in enumerate(lists):
            # Sums in float32 or float64 accumulate in place; only bfloat16 must be rounded.
            target = out[r, begin:end].detach()
            is_rounded = target.dtype == torch.bfloat16
            total = buffer[: end - begin] if is_rounded else target.numpy()
            means.write(total, chosen, weights_of_lists[r])

            if receiver_masks:
                words = receiver_masks[r][begin // 8 : end // 8]
                integers = total.view(senders.table.dtype)
                np.bitwise_and(integers, senders.select(words), out=integers)
            if is_rounded:
                target.copy_(torch.from_numpy(total))


class _Senders:
    """The senders' values and masks in one chunk of columns, unpacked when they are needed.

    Args:
        rows: The senders' rows.
        masks: Their masks; none if they cover everything.
        needed_again: By sender, whether several receivers need it. Then what is unpacked is kept
            until `move`.
        chunk: The largest number of columns in a chunk.

    Attributes:
        wide: The type of sums.
        table: (256, 8) for a byte of a mask, integers of all ones where a bit is 1.
    """

    def __init__(
        self,
        rows: Sequence[Tensor],
        masks: Sequence[Tensor],
        *,
        needed_again: np.ndarray,
        chunk: int,
    ) -> None:
        all_rows = _rows.each_row(rows)
        dtype = all_rows[0].dtype
        self.wide = np.float64 if dtype == torch.float64 else np.float32
        self.table = select_table(self.wide)
        self._is_bfloat16 = dtype == torch.bfloat16
        self._rows = [as_integers(row) for row in all_rows]
        self._masks = [as_bytes(row) for row in _rows.each_row(masks)]
        self._needed_again = needed_again
        self._widened = np.empty(chunk, self.table.dtype)
        self._selected = np.empty((chunk // 8, 8), self.table.dtype)

    def move(self, begin: int, end: int) -> None:
        """Go on to the columns from `begin` to `end`."""
        self._begin = begin
        self._end = end
        self._values: dict[int, np.ndarray] = {}
        self._bits: dict[int, np.ndarray] = {}

    def values(self, sender: int) -> np.ndarray:
        """Return the sender's elements, 0 where it does not cover; valid until the next call."""
        if sender in self._values:
            return self._values[sender]

        integers = self._rows[sender][self._begin : self._end]
        if self._is_bfloat16:
            # A bfloat16 is the upper half of a float32.
            widened = self._widened[: len(integers)]
            np.copyto(widened, integers)
            integers = np.left_shift(widened, 16, out=widened)
        if self._masks:
            # A product would keep NaNs, because NaN times 0 is NaN; np.where is 10 times slower.
            selected = self.select(self.words(sender))
            integers = np.bitwise_and(integers, selected, out=selected)

        values = integers.view(self.wide)
        if self._needed_again[sender] and (self._masks or self._is_bfloat16):
            values = values.copy()
            self._values[sender] = values
        return values

    def bits(self, sender: int) -> np.ndarray:
        """Return the sender's mask as bytes of 0 and 1."""
        if sender in self._bits:
            return self._bits[sender]
        bits = np.unpackbits(self.words(sender), bitorder="little")
        if self._needed_again[sender]:
            self._bits[sender] = bits
        return bits

    def words(self, sender: int) -> np.ndarray:
        """Return the sender's mask as packed bytes."""
        return self._masks[sender][self._begin // 8 : self._end // 8]

    def select(self, words: np.ndarray) -> np.ndarray:
        """Return integers of all ones where a bit is 1; valid until the next call."""
        selected = self._selected[: len(words)]
        return np.take(self.table, words, axis=0, out=selected, mode="clip").reshape(-1)


class _Means:
    """Makes means of a chunk.

    Args:
        senders: The senders' values.
        counted: Whether to divide by those that cover an element; otherwise by all.
        chunk: The largest number of columns in a chunk.
    """

    def __init__(self, senders: _Senders, *, counted: bool, chunk: int) -> None:
        self._senders = senders
        self._counted = counted
        self._product = np.empty(chunk, senders.wide)
        self._masked_weight = np.empty((chunk // 8, 8), senders.wide)
        self._weight_sum = np.empty(chunk, senders.wide)

    def write(self, total: np.ndarray, chosen: list[int], weights: list[float] | None) -> None:
        """Write the mean of some senders, added in their order.

        Args:
            total: Where to write it.
            chosen: The senders.
            weights: Their weights; None if all weigh the same.
        """
        total.fill(0)
        if weights is not None:
            self._write_weighted(total, chosen, [self._senders.wide(w) for w in weights])
            return

        # Counts in bytes take a quarter of the memory of float32.
        count = np.zeros(total.shape, np.uint8 if len(chosen) < 256 else np.uint32)
        for sender in chosen:
            np.add(total, self._senders.values(sender), out=total)
            if self._counted:
                np.add(count, self._senders.bits(sender), out=count)

        if self._counted:
            # Where the count is 0, nobody covers the element: its sum is 0, and so is 0 / 1.
            np.add(count, (count == 0).view(np.uint8), out=count)
            np.divide(total, count, out=total, dtype=total.dtype)
        elif chosen:
            np.divide(total, total.dtype.type(len(chosen)), out=total)

    def _write_weighted(
        self, total: np.ndarray, chosen: list[int], weights: list[np.float32 | np.float64]
    ) -> None:
        """Write the weighted mean of some senders into `total`, which holds zeros."""
        product = self._product[: len(total)]
        covering_weight = self._weight_sum[: len(total)]
        covering_weight.fill(0)
        weight_of_all = self._senders.wide(0)
        for sender, weight in zip(chosen, weights, strict=True):
            np.multiply(self._senders.values(sender), weight, out=product)
            np.add(total, product, out=total)
            weight_of_all += weight
            if self._counted:
                masked = self._weight_where_covered(sender, weight)
                np.add(covering_weight, masked, out=covering_weight)

        if self._counted:
            covering_weight[covering_weight == 0] = 1
            np.divide(total, covering_weight, out=total)
        elif chosen:
            np.divide(total, weight_of_all, out=total)

    def _weight_where_covered(self, sender: int, weight: np.float32 | np.float64) -> np.ndarray:
        """Return the sender's weight where it covers and 0 elsewhere, by a lookup of bytes."""
        words = self._senders.words(sender)
        ones = self._senders.table
        table = (ones & weight.view(ones.dtype)).view(weight.dtype)
        masked = self._masked_weight[: len(words)]
        return np.take(table, words, axis=0, out=masked, mode="clip").reshape(-1)
