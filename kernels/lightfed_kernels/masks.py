"""Masks of one bit per element: packed words, and the values that they cover.

Bit i of word w is element 32 w + i of a row, so that a mask is 32 times smaller than float32
values. Without Triton, tensors on a GPU are packed, counted, compressed and expanded on the host.
"""

import numpy as np
import torch
from torch import Tensor

from lightfed_kernels import _rows
from lightfed_kernels._bits import as_bytes, as_integers, count_ones, ones_in, select_table, view
from lightfed_kernels.layout import ALIGNMENT

# Elements that the CPU handles at a time, so that positions and values stay in cache.
CHUNK = 32768


def pack_mask(mask: Tensor) -> Tensor:
    """Pack (.., P) bool into (.., P / 32) int32: bit i of word w is `mask[.., 32 w + i]`.

    It can be captured in a CUDA graph.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: {mask.dtype}; a mask is bool")
    _rows.check_elements("mask", mask)
    if mask.shape[-1] % ALIGNMENT:
        raise ValueError(
            f"mask: {mask.shape[-1]} elements; the length of a row is a multiple of {ALIGNMENT}"
        )
    shape = (*mask.shape[:-1], mask.shape[-1] // ALIGNMENT)
    return _pack_into(torch.empty(shape, dtype=torch.int32, device=mask.device), mask)


def unpack_mask(words: Tensor) -> Tensor:
    """Unpack (.., W) int32 into (.., 32 W) bool: element 32 w + i is bit i of `words[.., w]`.

    It can be captured in a CUDA graph.
    """
    _check_words(words)
    shape = (*words.shape[:-1], words.shape[-1] * ALIGNMENT)
    return _unpack_into(torch.empty(shape, dtype=torch.bool, device=words.device), words)


def popcount(words: Tensor) -> Tensor:
    """Return how many bits of every row of (.., W) int32 are 1, as (..) int64.

    It can be captured in a CUDA graph.
    """
    _check_words(words)
    if words.numel() and _rows.backend(words) == "triton":
        from lightfed_kernels.gpu.masks import tile_counts

        return tile_counts(_matrix(words)).sum(-1).view(words.shape[:-1])
    return torch.from_numpy(np.asarray(count_ones(words.cpu()))).to(words.device)


def compress(row: Tensor, words: Tensor, *, nnz: int) -> Tensor:
    """Return the covered values of a row in order, `row[mask]`, as (nnz,).

    It can be captured in a CUDA graph.

    Args:
        row: (P,), which starts at a multiple of 16 bytes.
        words: (P / 32,) int32, the packed mask.
        nnz: The number of bits that are 1. The caller gives it, so that nothing waits for a GPU. It
            is checked on the CPU, and on a GPU under LIGHTFED_KERNELS_CHECK=1.

    Raises:
        ValueError: An argument does not fit; names it.
        TypeError: A dtype is not supported.
    """
    _rows.check_vector("row", row)
    _rows.check_single("words", words)
    _rows.check_words("words", words, size=row.shape[0])
    device = _rows.check_one_device(row=row, words=words)
    if not 0 <= nnz <= row.shape[0]:
        raise ValueError(f"nnz: {nnz} of a row of {row.shape[0]} elements")
    _check_nnz("nnz", nnz, words)
    return _compress_into(torch.empty(nnz, dtype=row.dtype, device=device), row, words)


def expand(values: Tensor, words: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a row (P,) with values in order where a bit is 1 and 0 elsewhere.

    It is the inverse of `compress`, and can be captured in a CUDA graph.

    Args:
        values: (nnz,), as many as there are bits; checked as in `compress`.
        words: (P / 32,) int32, the packed mask.
        out: The row to write; a new one by default.

    Raises:
        ValueError: An argument does not fit; names it.
        TypeError: A dtype is not supported.
    """
    _check_words(words)
    _rows.check_single("words", words)
    _rows.check_elements("values", values)
    _rows.check_single("values", values)
    if values.dtype not in _rows.DTYPES:
        raise TypeError(f"values: {values.dtype}; {', '.join(map(str, _rows.DTYPES))} are possible")
    size = words.shape[0] * ALIGNMENT
    if out is None:
        out = torch.empty(size, dtype=values.dtype, device=values.device)
    _rows.check_vector("out", out, size=size, dtype=values.dtype)
    if values.shape[0] > size:
        raise ValueError(f"values: {values.shape[0]} for a row of {size} elements")
    _rows.check_one_device(values=values, words=words, out=out)
    _check_nnz("values", values.shape[0], words)
    if values.numel() == 0:
        return out.zero_()
    if _rows.backend(out, values, words) == "triton":
        from lightfed_kernels.gpu.masks import launch_expand

        launch_expand(out, values, words)
        return out

    result = out.cpu()
    target = as_integers(result)
    source = as_integers(values.cpu())
    packed = as_bytes(words.cpu())
    done = 0
    for begin in range(0, len(target), CHUNK):
        chunk = target[begin : begin + CHUNK]
        chunk.fill(0)
        covered = ones_in(packed, begin, CHUNK)
        chunk[covered] = source[done : done + len(covered)]
        done += len(covered)
    if result is not out:
        out.copy_(result)
    return out


def apply_mask_(rows: Tensor, words: Tensor) -> Tensor:
    """Set what a mask does not cover to 0 in place, NaN included.

    It can be captured in a CUDA graph.

    Args:
        rows: (P,) or (clients, P).
        words: (P / 32,) int32, one mask for all rows, or (clients, P / 32).

    Returns:
        `rows`.

    Raises:
        ValueError: An argument does not fit; names it.
        TypeError: A dtype is not supported.
    """
    _rows.check_row("rows", rows)
    _rows.check_words("words", words, size=rows.shape[-1])
    if words.dim() == 2 and words.shape[:-1] != rows.shape[:-1]:
        raise ValueError(f"words: of shape {list(words.shape)} for rows of {list(rows.shape)}")
    _rows.check_one_device(rows=rows, words=words)
    _apply_mask(rows, words)
    return rows


def _pack_into(words: Tensor, mask: Tensor) -> Tensor:
    """Pack (.., 32 W) bool into `words`, (.., W) int32."""
    if words.numel() == 0:
        return words
    if _rows.backend(words, mask) == "triton":
        from lightfed_kernels.gpu.masks import launch_pack

        launch_pack(_matrix(words), _matrix(mask))
    else:
        packed = np.packbits(view(mask.cpu(), torch.uint8), axis=-1, bitorder="little")
        words.copy_(torch.from_numpy(packed).view(torch.int32))
    return words


def _unpack_into(mask: Tensor, words: Tensor) -> Tensor:
    """Unpack (.., W) int32 into `mask`, (.., 32 W) bool."""
    if words.numel() == 0:
        return mask
    if _rows.backend(mask, words) == "triton":
        from lightfed_kernels.gpu.masks import launch_unpack

        launch_unpack(_matrix(mask), _matrix(words))
    elif words.is_cuda:
        mask.copy_(_bits(words).flatten(-2) != 0)
    else:
        for row, packed in zip(_matrix(mask), _matrix(words), strict=True):
            target = view(row, torch.uint8)
            source = as_bytes(packed)
            for begin in range(0, len(target), CHUNK):
                chunk = source[begin // 8 : (begin + CHUNK) // 8]
                target[begin : begin + CHUNK] = np.unpackbits(chunk, bitorder="little")
    return mask


def _compress_into(values: Tensor, row: Tensor, words: Tensor) -> Tensor:
    """Write the covered values of a row into `values`, (nnz,)."""
    if values.numel() == 0:
        return values
    if _rows.backend(row, words) == "triton":
        from lightfed_kernels.gpu.masks import launch_compress

        launch_compress(values, row, words)
        return values

    result = values.cpu()
    source = as_integers(row.cpu())
    target = as_integers(result)
    packed = as_bytes(words.cpu())
    done = 0
    for begin in range(0, len(source), CHUNK):
        covered = ones_in(packed, begin, CHUNK)
        np.take(source[begin:], covered, out=target[done : done + len(covered)], mode="clip")
        done += len(covered)
    if result is not values:
        values.copy_(result)
    return values


# A custom operator, as steps are, so that tools that record or check a step see it as one.
@torch.library.custom_op("lightfed::apply_mask_", mutates_args=("rows",))
def _apply_mask(rows: Tensor, words: Tensor) -> None:
    """Set what a mask does not cover to 0, on the backend of the tensors."""
    if rows.numel() == 0:
        return
    if _rows.backend(rows, words) == "triton":
        from lightfed_kernels.gpu.masks import launch_apply

        launch_apply(_matrix(rows), _matrix(words))
    else:
        apply_torch(_matrix(rows), _matrix(words))


_apply_mask.register_fake(lambda *arguments: None)


def apply_torch(rows: Tensor, words: Tensor) -> None:
    """Do what `apply_mask_` does without Triton.

    Args:
        rows: (R, P).
        words: (R, W) int32, or (1, W), one mask for all rows.
    """
    if words.is_cuda:
        uncovered = _bits(words).flatten(-2) == 0
        rows.masked_fill_(uncovered.expand(rows.shape), 0.0)
        return

    table = select_table(f"f{rows.element_size()}")
    for row, mask in zip(rows, words.expand(rows.shape[0], -1), strict=True):
        integers = as_integers(row)
        packed = as_bytes(mask)
        for begin in range(0, len(integers), CHUNK):
            # The bits of values and of the table; a `where` is ten times slower.
            chunk_bytes = packed[begin // 8 : (begin + CHUNK) // 8]
            ones = np.take(table, chunk_bytes, axis=0, mode="clip")
            chunk = integers[begin : begin + CHUNK]
            np.bitwise_and(chunk, ones.reshape(-1), out=chunk)


def _matrix(tensor: Tensor) -> Tensor:
    """Return a matrix as it is, and one row as a matrix."""
    return tensor if tensor.dim() == 2 else tensor[None]


def _bits(words: Tensor) -> Tensor:
    """Return the bits of (.., W) int32 as (.., W, 32) of 0 and 1."""
    return (words[..., None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1


def _check_words(words: Tensor) -> None:
    """Check packed masks of rows of any length."""
    size = words.shape[-1] * ALIGNMENT if words.dim() else 0
    _rows.check_words("words", words, size=size)


def _check_nnz(name: str, nnz: int, words: Tensor) -> None:
    """Refuse a wrong number of ones; on a GPU this would wait, and is done only when asked for."""
    if words.is_cuda and not _rows.checking():
        return
    ones = int(count_ones(words.cpu()))
    if ones != nnz:
        raise ValueError(f"{name}: {nnz}; the mask covers {ones} elements")
