"""Packed masks and compressed rows in plain torch, bit by bit."""

import torch
from torch import Tensor


def pack_mask(mask: Tensor) -> Tensor:
    """words[w] = sum_i 2^i mask[32 w + i], as a signed 32-bit number."""
    bits = mask.unflatten(-1, (-1, 32)).to(torch.int64)
    total = sum(bits[..., i] << i for i in range(32))
    assert isinstance(total, Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def unpack_mask(words: Tensor) -> Tensor:
    """mask[32 w + i] = bit i of words[w]."""
    bits = [(words.to(torch.int64) >> i) & 1 for i in range(32)]
    return torch.stack(bits, -1).flatten(-2).to(torch.bool)


def popcount(words: Tensor) -> Tensor:
    return unpack_mask(words).sum(-1)


def compress(row: Tensor, words: Tensor) -> Tensor:
    return row[unpack_mask(words)]


def expand(values: Tensor, words: Tensor) -> Tensor:
    mask = unpack_mask(words)
    row = torch.zeros(mask.shape, dtype=values.dtype)
    row[mask] = values
    return row


def apply_mask(rows: Tensor, words: Tensor) -> Tensor:
    return torch.where(unpack_mask(words), rows, 0.0)
