"""Means over neighbours, element by element over those that cover the element (DisPFL, My-1, My-2).

    out[r, e] = sum_k w_k m_k[e] x_k[e] / sum_k w_k m_k[e]      k in the neighbours of r, in order

where m_k[e] is 1 if sender k covers element e. DisPFL, algorithm 1, line 7, counts the masks that
the senders trained with and keeps what the receiver's own mask covers; My-2 divides by the number
of neighbours instead. Without masks it is the plain weighted mean.
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
    """The mean of every receiver's neighbours, (R, P); 0 where none of them covers.

        out[r, e] = c_r[e] ? sum_k w_k m_k[e] x_k[e] / d : 0
        d = sum_k w_k m_k[e]  (over="covered")   or   sum_k w_k  (over="neighbours")

    Values where a mask is 0 have no influence, even NaN; a covered NaN propagates. float32 and
    bfloat16 rows are summed in float32, float64 rows in float64, in the order of the lists. The
    result is the same on all backends, except for the rounding of weighted products.

    Cannot be captured in a CUDA graph: addresses of rows are copied from the host.

    Args:
        rows: x, (senders, P) or a sequence of rows; columns may be cut at multiples of 32.
        neighbours: those of every receiver, and their weights w.
        masks: m, packed words of 32 bits, (senders, P / 32) or a sequence; None covers everything.
        receivers: c, packed words, (R, P / 32) or a sequence: what a receiver keeps; None keeps
            everything.
        over: whether to divide the sum by the weights that cover an element, or by all.
        out: (R, P) for the result; it may be a block of columns of a larger matrix and must not
            share memory with `rows`.
        width: if given, the means replace `rows`, or the first matrix there, in blocks of so many
            columns, a multiple of 32. One call checks its arguments once; it cannot be compiled.

    Raises:
        ValueError: shapes, devices or alignments that do not fit.
        TypeError: of an unsupported dtype, or dtypes that differ.
    """
    row_list = _rows.as_list(rows)
    mask_list = [] if masks is None else _rows.as_list(masks)
    if over not in ("covered", "neighbours"):
        raise ValueError(f"over: {over!r} is not one of covered, neighbours")
    _check_senders("rows", row_list, neighbours)
    like = row_list[0] if row_list else out
    if like is None:
        raise ValueError("rows: none; a matrix (0, P) says how long a row would be")
    size = like.shape[-1]
    _rows.check_rows("rows", row_list, size=size)
    if masks is not None:
        _check_senders("masks", mask_list, neighbours)
        for mask in mask_list:
            _rows.check_words("masks", mask, size=size)
    kept_list = [] if receivers is None else _rows.as_list(receivers)
    if receivers is not None:
        _check_receivers("receivers", kept_list, neighbours)
        for words in kept_list:
            _rows.check_words("receivers", words, size=size)
    if width is not None:
        out = like
    elif out is None:
        out = torch.empty(neighbours.receivers, size, dtype=like.dtype, device=like.device)
    _check_out(out, like, neighbours)
    _rows.check_one_device(rows=row_list, masks=mask_list, receivers=kept_list, out=out)
    tables = neighbours.first, neighbours.index, neighbours.weights
    how = mask_list, kept_list, *tables, over == "neighbours"
    if width is None:
        _masked_mean(out, row_list, *how)
    elif width < ALIGNMENT or width % ALIGNMENT:
        raise ValueError(f"width: {width}; a multiple of {ALIGNMENT} is needed")
    elif out.numel():
        _replace(out, row_list, *how, width=min(width, size))
    return out


def masked_mean_expression(
    rows: Sequence[Tensor] | Tensor,
    words: Sequence[Tensor] | Tensor | None = None,
    receiver: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    over: Over = "covered",
) -> Tensor:
    """`masked_mean` of one receiver as plain torch operations, for `torch.compile` to fuse.

    Args:
        rows: the neighbours' rows (P,), or a matrix of them, in the order of summation.
        words: their packed masks (P / 32,), or a matrix of them; None covers everything.
        receiver: the receiver's packed mask (P / 32,); None keeps everything.
        weights: (neighbours,) above 0, in the dtype of the sums.
        over: as there.
    """
    wide = torch.float64 if rows[0].dtype == torch.float64 else torch.float32
    lanes = torch.arange(ALIGNMENT, dtype=torch.int32, device=rows[0].device)
    total = torch.zeros(rows[0].shape[0] // ALIGNMENT, ALIGNMENT, dtype=wide, device=lanes.device)
    # A sum over all neighbours is a number, a sum over those that cover an element a row.
    weight: Tensor = torch.zeros((), dtype=wide, device=lanes.device)
    for k in range(len(rows)):
        value = rows[k].view(-1, ALIGNMENT).to(wide)
        share = torch.ones((), dtype=wide, device=lanes.device) if weights is None else weights[k]
        if words is not None:
            bit = (words[k][:, None] >> lanes) & 1
            value = torch.where(bit != 0, value, 0.0)
        total = total + (value if weights is None else value * share)
        weight = weight + (bit * share if words is not None and over == "covered" else share)
    # An element of weight 0 is not covered: its sum is 0, and so is 0 / 1.
    mean = total / torch.where(weight > 0, weight, 1.0)
    if receiver is not None:
        mean = torch.where(((receiver[:, None] >> lanes) & 1) != 0, mean, 0.0)
    return mean.view(-1).to(rows[0].dtype)


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
    if out.numel() == 0:
        return
    row_table = _rows.addresses("rows", rows)
    # Receivers would read what others have written.
    check_apart(("out", [out]), ("rows", rows))
    if index.numel() == 0:
        out.zero_()
    elif _rows.backend(out, *rows) == "triton":
        from lightfed_kernels.gpu.masked_mean import launch

        launch(out, row_table, masks, receivers, first, index, weights, over_neighbours)
    else:  # on the host, wherever the rows are
        host = out.cpu()
        x, m, c = ([tensor.cpu() for tensor in own] for own in (rows, masks, receivers))
        by_chunks(host, x, m, c, first, index, weights, over_neighbours)
        if host is not out:
            out.copy_(host)


_masked_mean.register_fake(lambda *arguments: None)


def _replace(
    out: Tensor,
    rows: Sequence[Tensor],
    masks: Sequence[Tensor],
    receivers: Sequence[Tensor],
    *how: Any,
    width: int,
) -> None:
    """Replace the first rows by the means, one block of columns after the other."""
    check_apart(("rows", [out]))
    means = out.new_empty(len(out), width)
    if _rows.backend(out, *rows) == "triton":
        from lightfed_kernels.gpu.masked_mean import launch

        launch(means, _rows.addresses("rows", rows), masks, receivers, *how, into=out)
        return
    for begin in range(0, out.shape[1], width):
        end = min(begin + width, out.shape[1])
        block, words = slice(begin, end), slice(begin // ALIGNMENT, end // ALIGNMENT)
        kinds = (rows, block), (masks, words), (receivers, words)
        _masked_mean(
            means[:, : end - begin], *[[x[..., cut] for x in given] for given, cut in kinds], *how
        )
        out[:, block] = means[:, : end - begin]


def _check_senders(name: str, tensors: Sequence[Tensor], neighbours: Neighbours) -> None:
    found = _rows.count_rows(tensors)
    if found != neighbours.senders:
        raise ValueError(f"{name}: {found} rows; neighbours is built for {neighbours.senders}")


def _check_receivers(name: str, tensors: Sequence[Tensor], neighbours: Neighbours) -> None:
    found = _rows.count_rows(tensors)
    if found != neighbours.receivers:
        raise ValueError(
            f"{name}: {found} rows; one for each of {neighbours.receivers} receivers is needed"
        )


def _check_out(out: Tensor, like: Tensor, neighbours: Neighbours) -> None:
    _rows.check_row("out", out, size=like.shape[-1])
    if out.dim() != 2:
        raise ValueError(f"out: of shape {list(out.shape)}; a matrix is needed")
    _check_receivers("out", [out], neighbours)
    if out.dtype != like.dtype:
        raise TypeError(f"out: {out.dtype} for rows of {like.dtype}")
