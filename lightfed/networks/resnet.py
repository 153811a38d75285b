"""HeteroFL's pre-activation residual network."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.networks.cnn import Norm, make_norm
from lightfed.networks.layers import Scaler, scaled

MakeActivation: TypeAlias = "Callable[[int], Activation]"
"""Makes the activation for a number of channels."""


class PreActResNet(nn.Module):
    """Pre-activation ResNet for small images: norm and ReLU before every convolution.

    The stem is a conv3x3 of stride 1. The first stage keeps the size, and each later one halves it.
    Scaler, norm, ReLU, global average and a linear layer follow. He et al. 2016; Diao et al. 2021
    add a Scaler before every norm. On CIFAR-10 at rate 1 the released code's [2, 2, 2, 2] blocks
    have 11,172,170 parameters, the [1, 1, 1, 2] of the paper's table 9,622,090.

    Args:
        num_classes: C.
        input_shape: (channels, height, width).
        hidden: Channels of the stages at rate 1.
        blocks: Number of blocks of each stage.
        norm: Batch, instance, layer or group normalization (of 4 groups), or none.
        scaler: Divide by the rate in training.
        rate: Width ratio; a stage has ceil(rate * channels) channels.

    Raises:
        ValueError: `hidden` and `blocks` do not describe the same stages; or group norm, and a
            layer without 4 whole groups.
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
        make_activation = partial(Activation, norm=norm, scale=rate if scaler else 1.0)
        channels = scaled(hidden, rate)
        self.stem = nn.Conv2d(input_shape[0], channels[0], 3, 1, 1, bias=False)

        self.stages = nn.Sequential()
        inputs = channels[0]
        for stage, (outputs, count) in enumerate(zip(channels, blocks, strict=True)):
            blocks_of_stage = nn.Sequential()
            for block in range(count):
                halves = stage > 0 and block == 0
                stride = 2 if halves else 1
                blocks_of_stage.append(PreActBlock(inputs, outputs, stride, make_activation))
                inputs = outputs
            self.stages.append(blocks_of_stage)

        self.activate = make_activation(inputs)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.linear = nn.Linear(inputs, num_classes)
        nn.init.zeros_(self.linear.bias)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, channels, H, W) to logits (B, C)."""
        return self.linear(self.pool(self.activate(self.stages(self.stem(x)))))


class Activation(nn.Module):
    """Scaler, norm, ReLU.

    Args:
        channels: Channels of its input.
        norm: See PreActResNet.
        scale: What the Scaler divides by in training.
    """

    packs = True  # see lightfed.packs.packing

    def __init__(self, channels: int, *, norm: Norm, scale: float) -> None:
        super().__init__()
        # A division by 1 would read and write the network's largest tensors for nothing.
        self.scaler = nn.Identity() if scale == 1.0 else Scaler(scale)
        self.norm = make_norm(norm, channels)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (B, channels, H, W)."""
        return F.relu(self.norm(self.scaler(x)))


class PreActBlock(nn.Module):
    """Two conv3x3, each after an activation, and a shortcut around them.

    Where the shape changes, the shortcut is a conv1x1 of the first activation's output. Elsewhere
    it is the input itself, unscaled.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        stride: Stride of the first convolution.
        make_activation: Makes the activation for a number of channels.
    """

    packs = True  # see lightfed.packs.packing

    def __init__(
        self, inputs: int, outputs: int, stride: int, make_activation: MakeActivation
    ) -> None:
        super().__init__()
        self.activate = make_activation(inputs)
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            make_activation(outputs),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
        )
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        activated = self.activate(x)
        # The body first: modules are called in the order in which they are registered.
        y = self.body(activated)
        if self.shortcut is None:
            return y + x
        return y + self.shortcut(activated)
