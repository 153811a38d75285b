"""Random numbers of many clients at once, each from a stream of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightfed_kernels._dispatch import backend
from lightfed_kernels._rows import check_one_device
from lightfed_kernels.select import expand_seed

_LOW = 0xFFFFFFFF


def stream_keys(seeds: Sequence[int]) -> Tensor:
    """(K,) int64 keys of the streams with these seeds, 0 <= seed < 2^63."""
    halves = (expand_seed(seed) for seed in seeds)
    return torch.tensor([(high << 32) | (low & _LOW) for low, high in halves], dtype=torch.int64)


def uniform_(out: Tensor, keys: Tensor, offsets: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2^-24, from the next elements of K streams.

        out[k, i] = floor(h(key_k, offset_k + i) / 2^8) / 2^24,  with the hash h of `select_random`

    The same bits on every device. Can be captured in a CUDA graph: offsets are read there.

    Args:
        out: (K, N) float32, contiguous.
        keys: (K,) int64, see `stream_keys`.
        offsets: (K,) int64, elements of each stream that have been drawn; not advanced.

    Raises:
        ValueError: shapes or devices that do not fit, or memory that is not contiguous.
        TypeError: another dtype.
    """
    if out.dim() != 2 or not out.is_contiguous():
        raise ValueError(f"out: of shape {list(out.shape)}; a contiguous matrix is needed")
    if out.dtype != torch.float32:
        raise TypeError(f"out: {out.dtype}; float32 is needed")
    for name, tensor in (("keys", keys), ("offsets", offsets)):
        if tensor.dtype != torch.int64:
            raise TypeError(f"{name}: {tensor.dtype}; int64 is needed")
        if tensor.shape != out.shape[:1] or not tensor.is_contiguous():
            raise ValueError(f"{name}: of shape {list(tensor.shape)} for {len(out)} streams")
    check_one_device(out=out, keys=keys, offsets=offsets)
    _uniform(out, keys, offsets)
    return out


@torch.library.custom_op("lightfed::uniform", mutates_args=("out",))
def _uniform(out: Tensor, keys: Tensor, offsets: Tensor) -> None:
    if out.numel() == 0:
        return
    if backend(out) == "triton":
        from lightfed_kernels.gpu.draws import launch_uniform as fill
    else:
        fill = _uniform_torch
    fill(out, keys, offsets)


_uniform.register_fake(lambda *arguments: None)


def _uniform_torch(out: Tensor, keys: Tensor, offsets: Tensor) -> None:
    element = offsets[:, None] + torch.arange(out.shape[1], device=out.device)
    key = keys[:, None]
    low, high = _mix((element ^ key) & _LOW), _mix(((element >> 32) ^ (key >> 32)) & _LOW)
    out.copy_(_mix(low ^ high) >> 8).mul_(2.0**-24)


def _mix(h: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser of numbers in 64 bits; products may wrap above bit 31."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B & _LOW
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & _LOW
    return h ^ (h >> 16)
