"""The steps of local training in plain torch, chunk by chunk on a CPU: twins of gpu.steps."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lightfed_kernels.layout import ALIGNMENT
from lightfed_kernels.masks import apply_torch

# Elements that a core updates at a time: a handful of rows' chunks stays in its cache.
CHUNK = 65536


def sgd_torch(
    row: Tensor, gradient: Tensor, buffer: Tensor | None, anchor: Tensor | None,
    scale: Tensor | None, rate: Tensor | None, words: Tensor | None, lr: float, momentum: float,
    weight_decay: float, prox: float, nesterov: bool,
) -> None:  # fmt: skip
    """The operations of torch.optim.SGD, in its order."""
    lr = lr if rate is None else float(rate)
    for chunk in _chunks(row):
        w = row[chunk]
        wide, d = _wide(w), _wide(gradient[chunk])
        scratch, other = torch.empty_like(wide), torch.empty_like(wide)
        if scale is not None:
            d = torch.mul(d, _scales(row, scale, chunk).to(d.dtype), out=scratch)
        if weight_decay != 0:
            d = torch.add(d, wide, alpha=weight_decay, out=scratch)
        if anchor is not None:
            torch.sub(wide, _wide(anchor[chunk]), out=other)
            d = torch.add(d, other, alpha=prox, out=scratch)
        if buffer is not None:
            b = buffer[chunk]
            moved = _wide(b).mul_(momentum).add_(d)
            _narrow(b, moved)
            d = torch.add(d, moved, alpha=momentum, out=scratch) if nesterov else moved
        wide.add_(d, alpha=-lr)
        _narrow(w, wide)
        if words is not None:
            first, last = chunk.start // ALIGNMENT, chunk.stop // ALIGNMENT
            apply_torch(w[None], words[None, first:last])


def adam_torch(
    row: Tensor, gradient: Tensor, average: Tensor, square: Tensor, scale: Tensor | None,
    numbers: Tensor, words: Tensor | None, beta1: float, beta2: float, eps: float,
    weight_decay: float,
) -> None:  # fmt: skip
    """The operations of torch.optim.Adam, in its order."""
    size, root, keep = numbers.tolist()
    for chunk in _chunks(row):
        w, a, s = row[chunk], average[chunk], square[chunk]
        wide, mean, spread, d = _wide(w), _wide(a), _wide(s), _wide(gradient[chunk])
        if scale is not None:
            d = d * _scales(row, scale, chunk).to(d.dtype)
        if weight_decay != 0:
            d = torch.add(d, wide, alpha=weight_decay)
        if keep != 1:
            wide.mul_(keep)
        mean.lerp_(d, 1 - beta1)
        spread.mul_(beta2).addcmul_(d, d, value=1 - beta2)
        wide.addcdiv_(mean, spread.sqrt().div_(root).add_(eps), value=-size)
        for part, found in ((w, wide), (a, mean), (s, spread)):
            _narrow(part, found)
        if words is not None:
            first, last = chunk.start // ALIGNMENT, chunk.stop // ALIGNMENT
            apply_torch(w[None], words[None, first:last])


def aspg_torch(
    point: Tensor, x: Tensor, gradient: Tensor, anchor: Tensor, rate: Tensor | None, lr: float,
    gamma: float, extrapolation: float, box: tuple[float, float] | None,
) -> None:  # fmt: skip
    lr = lr if rate is None else float(rate)
    for chunk in _chunks(x):
        p, old, g, a = (row[chunk] for row in (point, x, gradient, anchor))
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


def _scales(row: Tensor, scale: Tensor, chunk: slice) -> Tensor:
    """Of every element of a chunk."""
    span = row.shape[0] // scale.numel()
    places = torch.arange(chunk.start, chunk.stop, device=row.device) // span
    return scale.reshape(-1)[places]


def _chunks(row: Tensor) -> Iterator[slice]:
    size = row.shape[0]
    length = size if row.is_cuda else CHUNK * torch.get_num_threads()
    for begin in range(0, size, length):
        yield slice(begin, min(begin + length, size))


def _wide(part: Tensor) -> Tensor:
    """To compute with: bfloat16 as a float32 copy, others as they are."""
    return part.float() if part.dtype == torch.bfloat16 else part


def _narrow(part: Tensor, wide: Tensor) -> None:
    if part is not wide:
        part.copy_(wide)
