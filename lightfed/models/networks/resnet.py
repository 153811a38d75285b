"""HeteroFL's pre-activation residual network."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.models.networks.cnn import Norm, make_norm
from lightfed.models.networks.layers import Scaler
from lightfed.utils.counts import rounded_up
from lightfed.utils.errors import require

Block = Literal["basic", "bottleneck"]

# Output channels of a block, as a multiple of those inside it.
EXPANSION: dict[Block, int] = {"basic": 1, "bottleneck": 4}


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
        block: basic has two conv3x3; bottleneck has conv1x1, conv3x3 and a conv1x1 to four times
            the channels.
        norm: batch, instance, layer or group normalisation (of 4 groups), or none.
        scaler: divide by the rate in training.
        rate: width ratio; a stage has ceil(rate * channels) channels.

    Raises:
        UserError: hidden and blocks do not describe the same stages.
        ValueError: group norm, and a layer without 4 whole groups; names the layer.
    """

    packs = True  # see lightfed.local.pack_rules

    def __init__(
        self,
        num_classes: int = 10,
        input_shape: Sequence[int] = (3, 32, 32),
        *,
        hidden: Sequence[int] = (64, 128, 256, 512),
        blocks: Sequence[int] = (2, 2, 2, 2),
        block: Block = "basic",
        norm: Norm = "bn",
        scaler: bool = True,
        rate: float = 1.0,
    ) -> None:
        super().__init__()
        fits = len(blocks) == len(hidden) and min(blocks, default=0) >= 1
        found = f"{list(blocks)}, for the {len(hidden)} stages that hidden describes"
        require(fits, "blocks", found, "give a number of at least 1 for every stage")
        activation = partial(Activation, norm=norm, scale=rate if scaler else 1.0)
        channels = [rounded_up(width * rate) for width in hidden]
        self.stem = nn.Conv2d(input_shape[0], channels[0], 3, 1, 1, bias=False)
        self.stages = nn.Sequential()
        inputs = channels[0]
        for stage, (width, count) in enumerate(zip(channels, blocks, strict=True)):
            parts = nn.Sequential()
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                layer = f"stages.{stage}.{index}"
                parts.append(PreActBlock(inputs, width, stride, block, activation, layer=layer))
                inputs = width * EXPANSION[block]
            self.stages.append(parts)
        self.activate = activation(inputs, layer="activate")
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.linear = nn.Linear(inputs, num_classes)
        nn.init.zeros_(self.linear.bias)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) -> (B, C) logits."""
        return self.linear(self.pool(self.activate(self.stages(self.stem(x)))))


class Activation(nn.Module):
    """Scaler (none for a divisor of 1), norm, ReLU; `layer` is its name in errors."""

    packs = True  # see lightfed.local.pack_rules

    def __init__(self, channels: int, *, norm: Norm, scale: float, layer: str) -> None:
        super().__init__()
        # A division by 1 would read and write the network's largest tensors for nothing.
        self.scaler = nn.Identity() if scale == 1.0 else Scaler(scale)
        self.norm = make_norm(norm, channels, layer=f"{layer}.norm")

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.scaler(x)))


class PreActBlock(nn.Module):
    """Two or three convolutions, each after an activation, and a shortcut around them.

    Where the shape changes, the shortcut is a conv1x1 of the first activation's output. Elsewhere
    it is the input itself, unscaled. `width` is the number of channels inside, `stride` that of the
    first conv3x3. `activation` makes the activation for a number of channels. `layer` names this
    module in errors.
    """

    packs = True  # see lightfed.local.pack_rules

    def __init__(
        self,
        inputs: int,
        width: int,
        stride: int,
        block: Block,
        activation: partial[Activation],
        *,
        layer: str,
    ) -> None:
        super().__init__()
        outputs = width * EXPANSION[block]
        if block == "basic":
            widths, kernels, strides = [inputs, width, outputs], [3, 3], [stride, 1]
        else:
            widths, kernels, strides = [inputs, width, width, outputs], [1, 3, 1], [1, stride, 1]
        self.activate = activation(inputs, layer=f"{layer}.activate")
        self.body = nn.Sequential()
        for (before, after), size, step in zip(pairwise(widths), kernels, strides, strict=True):
            if len(self.body):
                self.body.append(activation(before, layer=f"{layer}.body.{len(self.body)}"))
            self.body.append(nn.Conv2d(before, after, size, step, size // 2, bias=False))
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    @override
    def forward(self, x: Tensor) -> Tensor:
        activated = self.activate(x)
        return self.body(activated) + (x if self.shortcut is None else self.shortcut(activated))
