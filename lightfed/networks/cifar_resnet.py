"""Residual networks for small images, with the activation after the addition.

He et al. 2016, section 4.2: the stem is a conv3x3 of stride 1, every stage after the first halves
the size, then come the global average and a linear layer. FlexiFed and FedBCD use the family of
three stages, DisPFL a ResNet-18 with group normalisation.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.networks.layers import he_normal_, image_shape, scaled

Shortcut = Literal["conv", "pad"]
Norm = Callable[[int], nn.Module]


class _ResNet(nn.Module):
    """Stem, stages, global average, linear; modules in the order of the forward pass.

    `channels` and `blocks` are those of the stages; the stem has the channels of the first. `norm`
    makes the normalisation layer for a number of channels. For the rest see CIFARResNet.
    """

    def __init__(
        self,
        num_classes: int,
        input_shape: Sequence[int],
        *,
        channels: Sequence[int],
        blocks: Sequence[int],
        norm: Norm,
        shortcut: Shortcut = "conv",
        conv_bias: bool = False,
    ) -> None:
        super().__init__()
        block = partial(ResidualBlock, norm=norm, shortcut=shortcut, conv_bias=conv_bias)
        inputs = channels[0]
        stem = nn.Conv2d(image_shape(input_shape)[0], inputs, 3, padding=1, bias=conv_bias)
        self.stem = nn.Sequential(stem, norm(inputs), nn.ReLU(inplace=True))
        self.stages = nn.Sequential()
        for stage, (width, count) in enumerate(zip(channels, blocks, strict=True)):
            parts = nn.Sequential()
            for index in range(count):
                parts.append(block(inputs, width, 2 if stage > 0 and index == 0 else 1))
                inputs = width
            self.stages.append(parts)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.linear = nn.Linear(inputs, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) -> (B, C) logits."""
        return self.linear(self.pool(self.stages(self.stem(x))))


class CIFARResNet(_ResNet):
    """ResNet-20, -32, -44 and -56 with batch normalisation, 16-32-64 channels.

    With conv1x1 shortcuts, as in FlexiFed, they have 272,474, 466,906, 661,338 and 855,770
    parameters on CIFAR-10. FedBCD's ResNet-20 has padded shortcuts (option A of He et al.) and
    biases in its convolutions: 270,410 parameters. Weights of convolutions are drawn from
    N(0, sqrt(2 / (k^2 outputs))); their biases are 0.

    Args:
        num_classes: C.
        input_shape: (channels, height, width).
        depth: number of layers with weights, without the shortcuts.
        width: factor of the channels, rounded up.
        shortcut: where the shape changes, a conv1x1 with a norm, or every second pixel, padded
            with channels of zeros.
        conv_bias: whether the convolutions have biases.

    Raises:
        UserError: the samples are not images.
    """

    packs = True  # see lightfed.packs.packing

    def __init__(
        self,
        num_classes: int = 10,
        input_shape: Sequence[int] = (3, 32, 32),
        *,
        depth: Literal[20, 32, 44, 56],
        width: float = 1.0,
        shortcut: Shortcut = "conv",
        conv_bias: bool = False,
    ) -> None:
        super().__init__(
            num_classes,
            input_shape,
            channels=scaled((16, 32, 64), width),
            blocks=[(depth - 2) // 6] * 3,
            norm=nn.BatchNorm2d,
            shortcut=shortcut,
            conv_bias=conv_bias,
        )
        he_normal_(self)


class ResNet18GN(_ResNet):
    """DisPFL's ResNet-18: group normalisation everywhere, hence no buffers.

    It is torchvision's ResNet-18 with another norm, a conv3x3 as stem and no pooling after it;
    11,173,962 parameters on CIFAR-10. Initial values are PyTorch's defaults, as in the released
    code.

    Args:
        num_classes: C.
        input_shape: (channels, height, width).
        width: channels of the first stage; the others have 2, 4 and 8 times as many.
        groups: of every normalisation.

    Raises:
        UserError: the samples are not images.
        ValueError: the groups do not divide the width.
    """

    packs = True  # see lightfed.packs.packing

    def __init__(
        self,
        num_classes: int = 10,
        input_shape: Sequence[int] = (3, 32, 32),
        *,
        width: int = 64,
        groups: int = 32,
    ) -> None:
        super().__init__(
            num_classes,
            input_shape,
            channels=[width, 2 * width, 4 * width, 8 * width],
            blocks=[2, 2, 2, 2],
            norm=partial(nn.GroupNorm, groups),
        )


class ResidualBlock(nn.Module):
    """Two conv3x3 with norms, a shortcut around them, and a ReLU after the sum.

    `stride` is that of the first convolution. For `norm` see _ResNet, for the rest CIFARResNet.
    """

    packs = True  # see lightfed.packs.packing

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        *,
        norm: Norm,
        shortcut: Shortcut,
        conv_bias: bool,
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=conv_bias),
            norm(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=conv_bias),
            norm(outputs),
        )
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            if shortcut == "conv":
                conv = nn.Conv2d(inputs, outputs, 1, stride, bias=conv_bias)
                self.shortcut = nn.Sequential(conv, norm(outputs))
            else:
                self.shortcut = PadShortcut(stride, outputs - inputs)
        self.activate = nn.ReLU(inplace=True)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, outputs, H / stride, W / stride)."""
        y = self.body(x)  # before the shortcut, whose modules are registered later
        return self.activate(y + (x if self.shortcut is None else self.shortcut(x)))


class PadShortcut(nn.Module):
    """Every `stride`-th pixel, with so many channels of zeros appended."""

    packs = True  # see lightfed.packs.packing

    def __init__(self, stride: int, channels: int) -> None:
        super().__init__()
        self.stride, self.channels = stride, channels

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.channels))
