"""Packed masks and compressed rows in plain torch, bit by bit."""

import torch
from torch import Tensor


def pack_mask(mask: Tensor) -> Tensor:
    """Return words[w] = sum_i 2^i mask[32 w + i], as signed 32-bit numbers."""
    bits = mask.unflatten(-1, (-1, 32)).to(torch.int64)
    total = sum(bits[..., i] << i for i in range(32))
    assert isinstance(total, Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def unpack_mask(words: Tensor) -> Tensor:
    """Return mask[32 w + i] = bit i of words[w]."""
    bits = [(words.to(torch.int64) >> i) & 1 for i in range(32)]
    return torch.stack(bits, -1).flatten(-2).to(torch.bool)


def popcount(words: Tensor) -> Tensor:
    """Return the number of ones of every row."""
    return unpack_mask(words).sum(-1)


def compress(row: Tensor, words: Tensor) -> Tensor:
    """Return the covered values of a row, in order."""
    return row[unpack_mask(words)]


def expand(values: Tensor, words: Tensor) -> Tensor:
    """Return a row with the values, in order, where a bit is 1, and 0 elsewhere."""
    mask = unpack_mask(words)
    row = torch.zeros(mask.shape, dtype=values.dtype)
    row[mask] = values
    return row


def apply_mask(rows: Tensor, words: Tensor) -> Tensor:
    """Return rows with 0 where a mask does not cover."""
    return torch.where(unpack_mask(words), rows, 0.0)
