"""The steps of local training in plain torch, chunk by chunk on a CPU: twins of gpu.steps."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lightfed_kernels.layout import ALIGNMENT
from lightfed_kernels.masks import as_bytes, as_integers, select_table

# Elements that a core updates at a time: a handful of rows' chunks stays in its cache.
CHUNK = 65536


def sgd_torch(
    row: Tensor,
    gradient: Tensor,
    buffer: Tensor | None,
    anchor: Tensor | None,
    scale: Tensor | None,
    words: Tensor | None,
    lr: float,
    momentum: float,
    weight_decay: float,
    prox: float,
    nesterov: bool,
) -> None:
    """The operations of torch.optim.SGD, in its order."""
    bits = None if words is None else _Bits(words, row)
    for begin, (w, g, b, a) in _chunks(row, gradient, buffer, anchor):
        # Buffer and anchor are optional.
        assert w is not None
        assert g is not None
        wide = _wide(w)
        d = _wide(g)
        scratch, other = torch.empty_like(wide), torch.empty_like(wide)
        if scale is not None:
            d = torch.mul(d, scale.to(d.dtype), out=scratch)
        if weight_decay != 0:
            d = torch.add(d, wide, alpha=weight_decay, out=scratch)
        if a is not None:
            torch.sub(wide, _wide(a), out=other)
            d = torch.add(d, other, alpha=prox, out=scratch)
        if b is not None:
            moved = _wide(b).mul_(momentum).add_(d)
            _narrow(b, moved)
            d = torch.add(d, moved, alpha=momentum, out=scratch) if nesterov else moved
        wide.add_(d, alpha=-lr)
        _narrow(w, wide)
        if bits is not None:
            bits.select(w, begin)


def aspg_torch(
    point: Tensor,
    x: Tensor,
    gradient: Tensor,
    anchor: Tensor,
    lr: float,
    gamma: float,
    extrapolation: float,
    box: tuple[float, float] | None,
) -> None:
    for _, (p, old, g, a) in _chunks(point, x, gradient, anchor):
        assert p is not None
        assert old is not None
        assert g is not None
        assert a is not None
        wide, before = _wide(p), _wide(old)
        new = torch.sub(wide, _wide(a))
        torch.add(_wide(g), new, alpha=gamma, out=new)
        torch.add(wide, new, alpha=-lr, out=new)
        if box is not None:
            new.clamp_(*box)
        torch.sub(new, before, out=wide)
        torch.add(new, wide, alpha=extrapolation, out=wide)
        _narrow(p, wide)
        old.copy_(new)


class _Bits:
    """Zeros a chunk of a row where a bit of its mask is 0, whatever it holds there."""

    def __init__(self, words: Tensor, row: Tensor) -> None:
        self._words = words
        if not row.is_cuda:
            self._bytes = as_bytes(words)
            self._table = select_table(f"i{row.element_size()}")

    def select(self, part: Tensor, begin: int) -> None:
        if part.is_cuda:
            lanes = torch.arange(ALIGNMENT, dtype=torch.int32, device=part.device)
            bits = (self._words[:, None] >> lanes) & 1
            part.copy_(torch.where(bits.view(-1) != 0, part, 0))
            return
        chosen = self._bytes[begin // 8 : (begin + part.shape[0]) // 8]
        # Bits of values and of the table: a `where` is ten times slower.
        values = as_integers(part)
        every = np.take(self._table, chosen, axis=0, mode="clip").reshape(-1)
        np.bitwise_and(values, every, out=values)


def _chunks(*rows: Tensor | None) -> Iterator[tuple[int, tuple[Tensor | None, ...]]]:
    """The first column and the parts of all rows, chunk by chunk; None where a row is None."""
    first = rows[0]
    assert first is not None
    length = first.shape[0] if first.is_cuda else CHUNK * torch.get_num_threads()
    count = -(-first.shape[0] // length)
    parts = [[None] * count if row is None else row.split(length) for row in rows]
    for position, chunk in enumerate(zip(*parts, strict=True)):
        yield position * length, chunk


def _wide(part: Tensor) -> Tensor:
    """To compute with: bfloat16 as a float32 copy, others as they are."""
    return part.float() if part.dtype == torch.bfloat16 else part


def _narrow(part: Tensor, wide: Tensor) -> None:
    if part is not wide:
        part.copy_(wide)
