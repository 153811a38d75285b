"""Convolutions of images of one pixel."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override


class OnePixelConv2d(nn.Conv2d):
    """A convolution that takes images of one pixel to images of one pixel.

    The centre of a kernel alone meets the image, its other weights meet padding. So this is a
    linear layer of the centres, in a fifth of the time. The other weights get gradients of zero, as
    from `nn.Conv2d`, of which it has parameters, names and initial values.

    Args:
        inputs: channels.
        outputs: channels.
        kernel: an odd size.
    """

    packs = True  # see lightfed.local.pack_rules

    def __init__(self, inputs: int, outputs: int, kernel: int = 3) -> None:
        super().__init__(inputs, outputs, kernel, padding=kernel // 2)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, 1, 1) -> (B, outputs, 1, 1); larger images as `nn.Conv2d` does."""
        if x.shape[-2:] != (1, 1):
            return super().forward(x)
        return F.linear(x.flatten(1), self.centre(self.weight), self.bias)[..., None, None]

    def centre(self, weight: Tensor) -> Tensor:
        """(..., kernel, kernel) -> (...), contiguous: the centres of kernels."""
        row, column = (size // 2 for size in self.kernel_size)
        return weight[..., row, column].contiguous()


@contextmanager
def as_convolutions(module: nn.Module) -> Iterator[None]:
    """Let the `OnePixelConv2d` layers of a module run as the convolutions that they stand for."""
    layers = [part for part in module.modules() if isinstance(part, OnePixelConv2d)]
    for layer in layers:
        layer.forward = partial(nn.Conv2d.forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
