"""HeteroFL's pre-activation residual network."""

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.networks.cnn import Norm, make_norm
from lightfed.networks.layers import Scaler
from lightfed.utils.counts import rounded_up


class PreActResNet(nn.Module):
    """Pre-activation ResNet for small images: norm and ReLU before every convolution.

    The stem is a conv3x3 of stride 1. The first stage keeps the size, and each later one halves it.
    Scaler, norm, ReLU, global average and a linear layer follow. He et al. 2016; Diao et al. 2021
    add a Scaler before every norm. On CIFAR-10 at rate 1 the released code's [2, 2, 2, 2] blocks
    have 11,172,170 parameters, the [1, 1, 1, 2] of the paper's table 9,622,090.

    Args:
        num_classes: C.
        input_shape: (channels, height, width).
        hidden: channels of the stages at rate 1.
        blocks: number of blocks of the stages.
        norm: batch, instance, layer or group normalisation (of 4 groups), or none.
        scaler: divide by the rate in training.
        rate: width ratio; a stage has ceil(rate * channels) channels.

    Raises:
        ValueError: hidden and blocks do not describe the same stages; or group norm, and a layer
            without 4 whole groups.
    """

    packs = True  # see lightfed.packs.packing

    def __init__(
        self,
        num_classes: int = 10,
        input_shape: Sequence[int] = (3, 32, 32),
        *,
        hidden: Sequence[int] = (64, 128, 256, 512),
        blocks: Sequence[int] = (2, 2, 2, 2),
        norm: Norm = "bn",
        scaler: bool = True,
        rate: float = 1.0,
    ) -> None:
        super().__init__()
        activation = partial(Activation, norm=norm, scale=rate if scaler else 1.0)
        channels = [rounded_up(width * rate) for width in hidden]
        self.stem = nn.Conv2d(input_shape[0], channels[0], 3, 1, 1, bias=False)
        self.stages = nn.Sequential()
        inputs = channels[0]
        for stage, (width, count) in enumerate(zip(channels, blocks, strict=True)):
            parts = nn.Sequential()
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                parts.append(PreActBlock(inputs, width, stride, activation))
                inputs = width
            self.stages.append(parts)
        self.activate = activation(inputs)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.linear = nn.Linear(inputs, num_classes)
        nn.init.zeros_(self.linear.bias)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) -> (B, C) logits."""
        return self.linear(self.pool(self.activate(self.stages(self.stem(x)))))


class Activation(nn.Module):
    """Scaler (none for a divisor of 1), norm, ReLU."""

    packs = True  # see lightfed.packs.packing

    def __init__(self, channels: int, *, norm: Norm, scale: float) -> None:
        super().__init__()
        # A division by 1 would read and write the network's largest tensors for nothing.
        self.scaler = nn.Identity() if scale == 1.0 else Scaler(scale)
        self.norm = make_norm(norm, channels)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.scaler(x)))


class PreActBlock(nn.Module):
    """Two conv3x3, each after an activation, and a shortcut around them.

    Where the shape changes, the shortcut is a conv1x1 of the first activation's output. Elsewhere
    it is the input itself, unscaled. `stride` is that of the first convolution. `activation` makes
    the activation for a number of channels.
    """

    packs = True  # see lightfed.packs.packing

    def __init__(
        self, inputs: int, outputs: int, stride: int, activation: partial[Activation]
    ) -> None:
        super().__init__()
        self.activate = activation(inputs)
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            activation(outputs),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
        )
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    @override
    def forward(self, x: Tensor) -> Tensor:
        activated = self.activate(x)
        return self.body(activated) + (x if self.shortcut is None else self.shortcut(activated))
