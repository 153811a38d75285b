"""VGG for images of 32x32 pixels: FlexiFed's family of four depths.

Simonyan and Zisserman 2015; configurations A, B, D and E as in torchvision. Parameter names and
initial values follow the released code: weights of convolutions are drawn from
N(0, sqrt(2 / (k^2 outputs))), and their biases are 0.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from typing_extensions import override

from lightfed.networks.layers import he_normal_, image_shape, scaled

Depth = Literal[11, 13, 16, 19]

_LETTERS: dict[Depth, str] = {11: "A", 13: "B", 16: "D", 19: "E"}
_SHRINKS_BY = 32  # five poolings, each by 2
_LAST_CHANNELS = 512  # channels of the last convolution at width 1


class VGG(nn.Module):
    """FlexiFed's VGG-11, -13, -16 and -19 with batch normalization.

    The head is dropout, linear, ReLU, dropout, linear, ReLU, linear. On CIFAR-10 they have
    28,149,514, 28,334,410, 33,646,666 and 38,958,922 parameters (released code). Modules are
    registered in the order of the forward pass, and any two depths begin with the same ones.

    Args:
        num_classes: C.
        input_shape: (channels, height, width); at least 32x32.
        depth: Number of convolutions and linear layers.
        width: Factor of the channels, rounded up.
        hidden: Units of the two hidden linear layers.
        dropout: Probability of dropout, in front of both hidden layers.

    Raises:
        UserError: The samples are not images.
    """

    packs = True  # see lightfed.packs.packing

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
        image_channels, image_height, image_width = image_shape(input_shape)
        self.features = _features(depth, image_channels, width)
        pixels = (image_height // _SHRINKS_BY) * (image_width // _SHRINKS_BY)
        (channels,) = scaled([_LAST_CHANNELS], width)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(channels * pixels, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, num_classes),
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, channels, H, W) to logits (B, C)."""
        return self.classifier(self.features(x).flatten(1))


def _features(depth: Depth, image_channels: int, width: float) -> nn.Sequential:
    """Return the blocks of conv3x3, norm and ReLU, with five poolings between them.

    They map (B, image_channels, H, W) to (B, channels, H / 32, W / 32). torchvision's `make_layers`
    cannot change the width.
    """
    from torchvision.models.vgg import cfgs  # slow to import

    layers: list[nn.Module] = []
    inputs = image_channels
    for item in cfgs[_LETTERS[depth]]:
        if item == "M":
            layers.append(nn.MaxPool2d(2))
            continue
        (outputs,) = scaled([item], width)
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
        layers.append(nn.BatchNorm2d(outputs))
        layers.append(nn.ReLU(inplace=True))
        inputs = outputs
    features = nn.Sequential(*layers)
    he_normal_(features)
    return features
