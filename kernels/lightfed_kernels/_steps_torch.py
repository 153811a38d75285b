"""FedBCD's step in plain torch, chunk by chunk on a CPU: the twin of gpu.steps."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Elements that a core updates at a time: a handful of rows' chunks stays in its cache.
CHUNK = 65536


def aspg_torch(
    point: Tensor, x: Tensor, gradient: Tensor, anchor: Tensor, lr: float, gamma: float,
    extrapolation: float, box: tuple[float, float] | None,
) -> None:  # fmt: skip
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
