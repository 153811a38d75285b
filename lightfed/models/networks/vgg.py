"""VGG for images of 32x32 pixels: FlexiFed's family of four depths, and DisPFL's VGG-11.

Simonyan and Zisserman 2015; configurations A, B, D and E as in torchvision. Parameter names and
initial values follow the released code of both papers: weights of convolutions are drawn from
N(0, sqrt(2 / (k^2 outputs))), and their biases are 0.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from torch import Tensor, nn
from typing_extensions import override

from lightfed.models.networks.layers import he_normal_, image_shape, scaled

Depth = Literal[11, 13, 16, 19]

_LETTERS: dict[Depth, str] = {11: "A", 13: "B", 16: "D", 19: "E"}
_SHRINKS = 32  # five poolings, each by 2
_MOST = 512  # channels of the last convolution at width 1


class VGG(nn.Module):
    """FlexiFed's VGG-11, -13, -16 and -19 with batch normalisation.

    The head is dropout, linear, ReLU, dropout, linear, ReLU, linear. On CIFAR-10 they have
    28,149,514, 28,334,410, 33,646,666 and 38,958,922 parameters (released code). Modules are
    registered in the order of the forward pass, and any two depths begin with the same ones.

    Args:
        num_classes: C.
        input_shape: (channels, height, width); at least 32x32.
        depth: number of convolutions and linear layers.
        width: factor of the channels, rounded up.
        hidden: units of the two hidden linear layers.
        dropout: probability, in front of both hidden layers.

    Raises:
        UserError: the samples are not images.
    """

    packs = True  # see lightfed.local.packing

    def __init__(
        self,
        num_classes: int = 10,
        input_shape: Sequence[int] = (3, 32, 32),
        *,
        depth: Depth,
        width: float = 1.0,
        hidden: int = 4096,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        channels, height, across = image_shape(input_shape)
        self.features = _features(depth, channels, width=width, norm=nn.BatchNorm2d)
        pixels = (height // _SHRINKS) * (across // _SHRINKS)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(scaled([_MOST], width)[0] * pixels, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, num_classes),
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) -> (B, C) logits."""
        return self.classifier(self.features(x).flatten(1))


class VGG11GN(nn.Module):
    """DisPFL's VGG-11: group normalisation and a linear classifier, hence no buffers.

    9,231,114 parameters on CIFAR-10 (released code).

    Args:
        num_classes: C.
        input_shape: (channels, height, width); at least 32x32.
        width: channels of the first convolution; the last one has eight times as many.
        groups: of every normalisation.

    Raises:
        UserError: the samples are not images.
        ValueError: the groups do not divide the channels of a layer.
    """

    packs = True  # see lightfed.local.packing

    def __init__(
        self,
        num_classes: int = 10,
        input_shape: Sequence[int] = (3, 32, 32),
        *,
        width: int = 64,
        groups: int = 32,
    ) -> None:
        super().__init__()
        channels, height, across = image_shape(input_shape)
        norm = partial(nn.GroupNorm, groups)
        self.features = _features(11, channels, width=width / 64, norm=norm)
        pixels = (height // _SHRINKS) * (across // _SHRINKS)
        linear = nn.Linear(8 * width * pixels, num_classes)
        nn.init.normal_(linear.weight, std=0.01)
        nn.init.zeros_(linear.bias)
        self.classifier = nn.Sequential(linear)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) -> (B, C) logits."""
        return self.classifier(self.features(x).flatten(1))


def _features(
    depth: Depth, channels: int, *, width: float, norm: Callable[[int], nn.Module]
) -> nn.Sequential:
    """Blocks of conv3x3, norm, ReLU, and five poolings: (B, channels, H, W) -> (B, C, H/32, W/32).

    C is 512 times the width, rounded up. torchvision's `make_layers` supports neither other norms
    nor other widths.
    """
    from torchvision.models.vgg import cfgs

    layers: list[nn.Module] = []
    inputs = channels
    for item in cfgs[_LETTERS[depth]]:
        if item == "M":
            layers.append(nn.MaxPool2d(2))
            continue
        (outputs,) = scaled([item], width)
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), norm(outputs), nn.ReLU(inplace=True)]
        inputs = outputs
    features = nn.Sequential(*layers)
    he_normal_(features)
    return features
