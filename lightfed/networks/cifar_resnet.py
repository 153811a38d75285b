"""Residual networks for small images, with the activation after the addition.

He et al. 2016, section 4.2: the stem is a conv3x3 of stride 1, every stage after the first halves
the size, then come the global average and a linear layer. FlexiFed and FedBCD use the family of
three stages, DisPFL a ResNet-18 with group normalization.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.networks.layers import he_normal_, image_shape, scaled

Shortcut = Literal["conv", "pad"]

MakeNorm: TypeAlias = Callable[[int], nn.Module]
"""Makes the normalization layer for a number of channels."""


class _ResNet(nn.Module):
    """Stem, stages, global average, linear; modules in the order of the forward pass.

    Args:
        num_classes: C.
        input_shape: (channels, height, width).
        channels: Channels of the stages; the stem has those of the first.
        blocks: Number of blocks of each stage.
        norm: Makes the normalization layer for a number of channels.
        shortcut: See CIFARResNet.
        conv_bias: See CIFARResNet.
    """

    def __init__(
        self,
        num_classes: int,
        input_shape: Sequence[int],
        *,
        channels: Sequence[int],
        blocks: Sequence[int],
        norm: MakeNorm,
        shortcut: Shortcut = "conv",
        conv_bias: bool = False,
    ) -> None:
        super().__init__()
        make_block = partial(ResidualBlock, norm=norm, shortcut=shortcut, conv_bias=conv_bias)
        image_channels, _, _ = image_shape(input_shape)
        self.stem = nn.Sequential(
            nn.Conv2d(image_channels, channels[0], 3, padding=1, bias=conv_bias),
            norm(channels[0]),
            nn.ReLU(inplace=True),
        )

        self.stages = nn.Sequential()
        inputs = channels[0]
        for stage, (outputs, count) in enumerate(zip(channels, blocks, strict=True)):
            blocks_of_stage = nn.Sequential()
            for block in range(count):
                halves = stage > 0 and block == 0
                stride = 2 if halves else 1
                blocks_of_stage.append(make_block(inputs, outputs, stride))
                inputs = outputs
            self.stages.append(blocks_of_stage)

        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.linear = nn.Linear(inputs, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, channels, H, W) to logits (B, C)."""
        return self.linear(self.pool(self.stages(self.stem(x))))


class CIFARResNet(_ResNet):
    """ResNet-20, -32, -44 and -56 with batch normalization, 16-32-64 channels.

    With conv1x1 shortcuts, as in FlexiFed, they have 272,474, 466,906, 661,338 and 855,770
    parameters on CIFAR-10. FedBCD's ResNet-20 has padded shortcuts (option A of He et al.) and
    biases in its convolutions: 270,410 parameters. Weights of convolutions are drawn from
    N(0, sqrt(2 / (k^2 outputs))); their biases are 0.

    Args:
        num_classes: C.
        input_shape: (channels, height, width).
        depth: Number of layers with weights, without the shortcuts.
        width: Factor of the channels, rounded up.
        shortcut: Where the shape changes: a conv1x1 with a norm (conv), or every second pixel,
            padded with channels of zeros (pad).
        conv_bias: Whether the convolutions have biases.

    Raises:
        UserError: The samples are not images.
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
        # The stem, the linear layer, and three stages of blocks with two convolutions each.
        blocks_per_stage = (depth - 2) // 6
        super().__init__(
            num_classes,
            input_shape,
            channels=scaled((16, 32, 64), width),
            blocks=[blocks_per_stage] * 3,
            norm=nn.BatchNorm2d,
            shortcut=shortcut,
            conv_bias=conv_bias,
        )
        he_normal_(self)


class ResNet18GN(_ResNet):
    """DisPFL's ResNet-18: group normalization everywhere, hence no buffers.

    It is torchvision's ResNet-18 with another norm, a conv3x3 as stem and no pooling after it;
    11,173,962 parameters on CIFAR-10. Initial values are PyTorch's defaults, as in the released
    code.

    Args:
        num_classes: C.
        input_shape: (channels, height, width).
        width: Channels of the first stage; the others have 2, 4 and 8 times as many.
        groups: Groups of every normalization.

    Raises:
        UserError: The samples are not images.
        ValueError: The groups do not divide the width.
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

    Args:
        inputs: Input channels.
        outputs: Output channels.
        stride: Stride of the first convolution.
        norm: Makes the normalization layer for a number of channels.
        shortcut: See CIFARResNet.
        conv_bias: See CIFARResNet.
    """

    packs = True  # see lightfed.packs.packing

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        *,
        norm: MakeNorm,
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
                self.shortcut = nn.Sequential(
                    nn.Conv2d(inputs, outputs, 1, stride, bias=conv_bias),
                    norm(outputs),
                )
            else:
                self.shortcut = PadShortcut(stride, outputs - inputs)
        self.activate = nn.ReLU(inplace=True)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        # The body first: modules are called in the order in which they are registered.
        y = self.body(x)
        if self.shortcut is None:
            return self.activate(y + x)
        return self.activate(y + self.shortcut(x))


class PadShortcut(nn.Module):
    """Every `stride`-th pixel, with channels of zeros appended.

    Args:
        stride: Distance of the pixels that are kept.
        channels: Number of channels to append.
    """

    packs = True  # see lightfed.packs.packing

    def __init__(self, stride: int, channels: int) -> None:
        super().__init__()
        self.stride = stride
        self.channels = channels

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, inputs + channels, H / stride, W / stride)."""
        pixels = x[:, :, :: self.stride, :: self.stride]
        # The padding is given from the last axis to the first: behind the channels only.
        return F.pad(pixels, (0, 0, 0, 0, 0, self.channels))
