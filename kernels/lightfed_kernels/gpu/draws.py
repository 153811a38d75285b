"""The kernel that draws from many streams."""

import triton
import triton.language as tl
from torch import Tensor

from lightfed_kernels._rows import check_grid
from lightfed_kernels.gpu.masks import on_device
from lightfed_kernels.gpu.select import mix

BLOCK = 1024  # elements that a program draws


@triton.jit(do_not_specialize=["size", "blocks"])
def uniform_kernel(out_ptr, keys_ptr, offsets_ptr, size, blocks, BLOCK: tl.constexpr):
    """A program draws a block of one stream: out[k, i] = (h(key_k, offset_k + i) >> 8) * 2^-24."""
    stream = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + stream)
    element = tl.load(offsets_ptr + stream) + at
    low = mix(element.to(tl.uint32) ^ key.to(tl.uint32))
    high = mix((element >> 32).to(tl.uint32) ^ (key >> 32).to(tl.uint32))
    drawn = (mix(low ^ high) >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    tl.store(out_ptr + stream * size + at, drawn, mask=at < size)


def launch_uniform(out: Tensor, keys: Tensor, offsets: Tensor) -> None:
    blocks = -(-out.shape[1] // BLOCK)
    check_grid("out", blocks * len(out))
    with on_device(out):
        uniform_kernel[(blocks * len(out),)](out, keys, offsets, out.shape[1], blocks, BLOCK=BLOCK)
