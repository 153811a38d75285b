"""Convolutional networks of the papers' smaller experiments."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.networks.layers import Scaler, scaled
from lightfed.utils.counts import rounded_up

Norm = Literal["bn", "in", "ln", "gn", "none"]


class Conv(nn.Module):
    """HeteroFL's convolutional model: blocks of conv3x3, Scaler, norm, ReLU and max-pool.

    The last block has no pooling. The global average and a linear layer follow. Diao et al. 2021,
    released code (`conv`); 1,556,874 parameters on MNIST at rate 1.

    Args:
        num_classes: C.
        input_shape: (channels, height, width).
        hidden: Channels of the blocks at rate 1.
        norm: Batch, instance, layer or group normalization (of 4 groups), or none.
        scaler: Divide by the rate in training.
        rate: Width ratio; a block has ceil(rate * channels) channels.

    Raises:
        ValueError: Group norm, and a block without 4 whole groups.
    """

    packs = True  # see lightfed.packs.packing

    def __init__(
        self,
        num_classes: int = 10,
        input_shape: Sequence[int] = (1, 28, 28),
        *,
        hidden: Sequence[int] = (64, 128, 256, 512),
        norm: Norm = "bn",
        scaler: bool = True,
        rate: float = 1.0,
    ) -> None:
        super().__init__()
        channels = [input_shape[0], *scaled(hidden, rate)]
        blocks: list[nn.Module] = []
        for inputs, outputs in pairwise(channels):
            blocks.append(nn.Conv2d(inputs, outputs, 3, 1, 1))
            blocks.append(Scaler(rate) if scaler else nn.Identity())
            blocks.append(make_norm(norm, outputs))
            blocks.append(nn.ReLU(inplace=True))
            blocks.append(nn.MaxPool2d(2))
        blocks.pop()  # the last pooling

        blocks.append(nn.AdaptiveAvgPool2d(1))
        blocks.append(nn.Flatten())
        blocks.append(nn.Linear(channels[-1], num_classes))
        self.blocks = nn.Sequential(*blocks)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, channels, H, W) to logits (B, C)."""
        return self.blocks(x)


class SimpleCNN(nn.Module):
    """Two blocks of conv3x3, max-pool, ReLU, then a hidden linear layer and a linear classifier.

    Args:
        num_classes: C.
        input_shape: (channels, height, width).
        channels: Output channels of the convolutions at rate 1.
        hidden: Units of the hidden linear layer at rate 1.
        rate: Width ratio.
    """

    packs = True  # see lightfed.packs.packing

    def __init__(
        self,
        num_classes: int = 10,
        input_shape: Sequence[int] = (3, 32, 32),
        *,
        channels: Sequence[int] = (32, 64),
        hidden: int = 128,
        rate: float = 1.0,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise([input_shape[0], *scaled(channels, rate)]):
            layers.append(nn.Conv2d(inputs, outputs, 3, 1, 1))
            # Pooling first: the same values and gradients, a quarter of the work for the ReLU.
            layers.append(nn.MaxPool2d(2))
            layers.append(nn.ReLU(inplace=True))
        self.features = nn.Sequential(*layers)

        with torch.no_grad():
            flat = prod(self.features(torch.zeros(1, *input_shape)).shape)
        units = rounded_up(hidden * rate)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(flat, units),
            nn.ReLU(inplace=True),
            nn.Linear(units, num_classes),
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, channels, H, W) to logits (B, C)."""
        return self.classifier(self.features(x))


def make_norm(norm: Norm, channels: int) -> nn.Module:
    """Return a normalization layer of HeteroFL's ablation.

    All but batch normalization are GroupNorms.

    Args:
        norm: Batch, instance, layer or group normalization (of 4 groups), or none.
        channels: Channels of its input.

    Raises:
        ValueError: Group norm, and the channels do not form 4 whole groups.
    """
    if norm == "bn":
        return nn.BatchNorm2d(channels)
    if norm == "none":
        return nn.Identity()
    groups = {"in": channels, "ln": 1, "gn": 4}[norm]
    return nn.GroupNorm(groups, channels)
