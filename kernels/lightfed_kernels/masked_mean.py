"""Means over neighbors, element by element, over those that cover it (DisPFL, My-1, My-2).

    out[r, e] = sum_k w_k m_k[e] x_k[e] / sum_k w_k m_k[e]     over the neighbors k of r, in order

where m_k[e] is 1 if sender k covers element e. DisPFL (algorithm 1, line 7) counts the masks that
the senders trained with, and keeps what the receiver's own mask covers. My-2 divides by the number
of neighbors instead. Without masks it is the plain weighted mean.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightfed_kernels import _rows
from lightfed_kernels._masked_mean_cpu import by_chunks
from lightfed_kernels._memory import check_apart
from lightfed_kernels.layout import ALIGNMENT
from lightfed_kernels.neighbours import Neighbours

Over = Literal["covered", "neighbours"]


def masked_mean(
    rows: _rows.Rows,
    neighbours: Neighbours,
    *,
    masks: _rows.Rows | None = None,
    receivers: _rows.Rows | None = None,
    over: Over = "covered",
    out: Tensor | None = None,
    width: int | None = None,
) -> Tensor:
    """Return the mean of every receiver's neighbors, (R, P); 0 where none of them covers.

        out[r, e] = c_r[e] ? sum_k w_k m_k[e] x_k[e] / d : 0
        d = sum_k w_k m_k[e]  (over="covered")   or   sum_k w_k  (over="neighbours")

    Values where a mask is 0 have no influence, not even NaN; a covered NaN propagates. Rows of
    float32 and bfloat16 are summed in float32, rows of float64 in float64, in the order of the
    lists. The result is the same on all backends, except for the rounding of weighted products.

    It cannot be captured in a CUDA graph, because addresses of rows are copied from the host.

    Args:
        rows: x, (senders, P) or a sequence of rows; columns may be cut at multiples of 32.
        neighbours: The neighbors of every receiver, and their weights w.
        masks: m, packed words of 32 bits, (senders, P / 32) or a sequence; None covers everything.
        receivers: c, packed words, (R, P / 32) or a sequence: what a receiver keeps. None keeps
            everything.
        over: Whether to divide the sum by the weights that cover an element, or by all weights.
        out: (R, P) for the result. It may be a block of columns of a larger matrix, and must not
            share memory with `rows`.
        width: If given, the means replace `rows`, or the first matrix there, in blocks of so many
            columns, a multiple of 32. One call checks its arguments once; it cannot be compiled.

    Raises:
        ValueError: Shapes, devices or alignments do not fit; names the argument.
        TypeError: A dtype is not supported, or is not that of the others.
    """
    if over not in ("covered", "neighbours"):
        raise ValueError(f"over: {over!r} is not one of covered, neighbours")

    row_list = _rows.as_list(rows)
    _check_senders("rows", row_list, neighbours)
    like = row_list[0] if row_list else out
    if like is None:
        raise ValueError("rows: none; a matrix (0, P) says how long a row would be")
    size = like.shape[-1]
    _rows.check_rows("rows", row_list, size=size)

    mask_list: list[Tensor] = []
    if masks is not None:
        mask_list = _rows.as_list(masks)
        _check_senders("masks", mask_list, neighbours)
        for words in mask_list:
            _rows.check_words("masks", words, size=size)
    receiver_list: list[Tensor] = []
    if receivers is not None:
        receiver_list = _rows.as_list(receivers)
        _check_receivers("receivers", receiver_list, neighbours)
        for words in receiver_list:
            _rows.check_words("receivers", words, size=size)

    if width is not None:
        out = like
    elif out is None:
        out = torch.empty(neighbours.receivers, size, dtype=like.dtype, device=like.device)
    _check_out(out, like, neighbours)
    _rows.check_one_device(rows=row_list, masks=mask_list, receivers=receiver_list, out=out)

    lists = neighbours.first, neighbours.index, neighbours.weights
    arguments = mask_list, receiver_list, *lists, over == "neighbours"
    if width is None:
        _masked_mean(out, row_list, *arguments)
        return out
    if width < ALIGNMENT or width % ALIGNMENT:
        raise ValueError(f"width: {width}; a multiple of {ALIGNMENT} is needed")
    if out.numel():
        _replace(out, row_list, *arguments, width=min(width, size))
    return out


def masked_mean_expression(
    rows: Sequence[Tensor] | Tensor,
    words: Sequence[Tensor] | Tensor | None = None,
    receiver: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    over: Over = "covered",
) -> Tensor:
    """Return `masked_mean` of one receiver, (P,), by plain torch operations.

    It is meant for `torch.compile` to fuse.

    Args:
        rows: The neighbors' rows (P,), or a matrix of them, in the order of summation.
        words: Their packed masks (P / 32,), or a matrix of them; None covers everything.
        receiver: The receiver's packed mask (P / 32,); None keeps everything.
        weights: (neighbors,) above 0, in the dtype of the sums.
        over: As for `masked_mean`.
    """
    dtype = rows[0].dtype
    device = rows[0].device
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lanes = torch.arange(ALIGNMENT, dtype=torch.int32, device=device)

    # Elements are (P / 32, 32), as the bits of the words are.
    total = torch.zeros(rows[0].shape[0] // ALIGNMENT, ALIGNMENT, dtype=wide, device=device)
    # Over all neighbors the sum of weights is a number, over those that cover an element a matrix.
    weight_sum: Tensor = torch.zeros((), dtype=wide, device=device)
    for k in range(len(rows)):
        value = rows[k].view(-1, ALIGNMENT).to(wide)
        weight = torch.ones((), dtype=wide, device=device) if weights is None else weights[k]
        counted = weight
        if words is not None:
            bit = (words[k][:, None] >> lanes) & 1
            value = torch.where(bit != 0, value, 0.0)
            if over == "covered":
                counted = bit * weight
        if weights is not None:
            value = value * weight
        total = total + value
        weight_sum = weight_sum + counted

    # Where the weight is 0, nobody covers the element: its sum is 0, and so is 0 / 1.
    mean = total / torch.where(weight_sum > 0, weight_sum, 1.0)
    if receiver is not None:
        mean = torch.where(((receiver[:, None] >> lanes) & 1) != 0, mean, 0.0)
    return mean.view(-1).to(dtype)


@torch.library.custom_op("lightfed::masked_mean", mutates_args=("out",))
def _masked_mean(
    out: Tensor,
    rows: Sequence[Tensor],
    masks: Sequence[Tensor],
    receivers: Sequence[Tensor],
    first: Tensor,
    index: Tensor,
    weights: Tensor | None,
    over_neighbours: bool,
) -> None:
    """Write the means into `out`, (R, P), on the backend of the tensors.

    `first`, `index` and `weights` are those of `Neighbours`.
    """
    if out.numel() == 0:
        return
    row_table = _rows.addresses("rows", rows)
    # Otherwise a receiver would read what another one has written.
    check_apart(("out", [out]), ("rows", rows))

    if index.numel() == 0:
        out.zero_()
        return
    if _rows.backend(out, *rows) == "triton":
        from lightfed_kernels.gpu.masked_mean import launch

        launch(out, row_table, masks, receivers, first, index, weights, over_neighbours)
        return

    # On the host, wherever the rows are.
    result = out.cpu()
    by_chunks(
        result,
        [row.cpu() for row in rows],
        [words.cpu() for words in masks],
        [words.cpu() for words in receivers],
        first,
        index,
        weights,
        over_neighbours,
    )
    if result is not out:
        out.copy_(result)


_masked_mean.register_fake(lambda *arguments: None)


def _replace(
    out: Tensor,
    rows: Sequence[Tensor],
    masks: Sequence[Tensor],
    receivers: Sequence[Tensor],
    *further: Any,
    width: int,
) -> None:
    """Replace the first rows by the means, one block of columns after the other.

    Args:
        out: (R, P) the first rows.
        rows: All rows; the first of them are `out`.
        masks: The senders' masks.
        receivers: The receivers' masks.
        *further: The other arguments of the operator, which are the same for all blocks.
        width: The number of columns of a block.
    """
    check_apart(("rows", [out]))
    means = out.new_empty(len(out), width)
    if _rows.backend(out, *rows) == "triton":
        from lightfed_kernels.gpu.masked_mean import launch

        row_table = _rows.addresses("rows", rows)
        launch(means, row_table, masks, receivers, *further, into=out)
        return

    for begin in range(0, out.shape[1], width):
        end = min(begin + width, out.shape[1])
        columns = slice(begin, end)
        words = slice(begin // ALIGNMENT, end // ALIGNMENT)
        means_of_block = means[:, : end - begin]
        _masked_mean(
            means_of_block,
            [row[..., columns] for row in rows],
            [mask[..., words] for mask in masks],
            [mask[..., words] for mask in receivers],
            *further,
        )
        out[:, columns] = means_of_block


def _check_senders(name: str, tensors: Sequence[Tensor], neighbours: Neighbours) -> None:
    """Refuse tensors that do not have a row for each sender."""
    count = _rows.count_rows(tensors)
    if count != neighbours.senders:
        raise ValueError(f"{name}: {count} rows; neighbours is built for {neighbours.senders}")


def _check_receivers(name: str, tensors: Sequence[Tensor], neighbours: Neighbours) -> None:
    """Refuse tensors that do not have a row for each receiver."""
    count = _rows.count_rows(tensors)
    if count != neighbours.receivers:
        raise ValueError(
            f"{name}: {count} rows; one for each of {neighbours.receivers} receivers is needed"
        )


def _check_out(out: Tensor, like: Tensor, neighbours: Neighbours) -> None:
    """Refuse a tensor that cannot hold the means."""
    _rows.check_row("out", out, size=like.shape[-1])
    if out.dim() != 2:
        raise ValueError(f"out: of shape {list(out.shape)}; a matrix is needed")
    _check_receivers("out", [out], neighbours)
    if out.dtype != like.dtype:
        raise TypeError(f"out: {out.dtype} for rows of {like.dtype}")
