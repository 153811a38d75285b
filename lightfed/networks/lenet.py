"""Two convolutions of 5x5 and linear layers: DisPFL's CNN and the five of pFedMoE."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn
from typing_extensions import override

from lightfed.networks.layers import image_shape, scaled

Variant = Literal[1, 2, 3, 4, 5]

# Channels of both convolutions, units of the first hidden layer.
_WIDTHS: dict[Variant, tuple[int, int, int]] = {
    1: (16, 32, 2000),
    2: (16, 16, 2000),
    3: (16, 32, 1000),
    4: (16, 32, 800),
    5: (16, 32, 500),
}


class LeNet(nn.Module):
    """Two blocks of conv5x5 without padding, ReLU and max-pool, then linear layers with ReLU.

    The defaults are DisPFL's CNN (released code): 797,962 parameters on CIFAR-10. LG-FedAvg's has
    channels [6, 16] and hidden [120, 100].

    Attributes:
        extractor: All layers but the last: (B, channels, H, W) -> (B, feature_dim).
        head: The last layer, which is linear: (B, feature_dim) -> (B, C) logits.
        feature_dim: Units of the last hidden layer.

    Args:
        num_classes: C.
        input_shape: (channels, height, width); at least 16x16.
        channels: Output channels of the two convolutions.
        hidden: Units of the hidden linear layers.

    Raises:
        UserError: The samples are not images.
    """

    packs = True  # see lightfed.packs.packing

    def __init__(
        self,
        num_classes: int = 10,
        input_shape: Sequence[int] = (3, 32, 32),
        *,
        channels: Sequence[int] = (64, 64),
        hidden: Sequence[int] = (384, 192),
    ) -> None:
        super().__init__()
        image_channels, height, width = image_shape(input_shape)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise([image_channels, *channels]):
            layers.append(nn.Conv2d(inputs, outputs, 5))
            # Pooling first: the same values and gradients, a quarter of the work for the ReLU.
            layers.append(nn.MaxPool2d(2))
            layers.append(nn.ReLU(inplace=True))
            height = (height - 4) // 2
            width = (width - 4) // 2

        layers.append(nn.Flatten())
        flat = channels[-1] * height * width
        for inputs, outputs in pairwise([flat, *hidden]):
            layers.append(nn.Linear(inputs, outputs))
            layers.append(nn.ReLU(inplace=True))

        self.extractor = nn.Sequential(*layers)
        self.feature_dim = hidden[-1]
        self.head = nn.Linear(self.feature_dim, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, channels, H, W) to logits (B, C)."""
        return self.head(self.extractor(x))


class MoECNN(LeNet):
    """pFedMoE's CNN-1 to CNN-5, which differ in their widths and all give 500 features.

    They have 2,621,558, 1,815,142, 1,320,558, 1,060,358 and 670,058 parameters on CIFAR-10. The
    small extractor that pFedMoE shares is that of CNN-5.

    Args:
        num_classes: C.
        input_shape: (channels, height, width); at least 16x16.
        variant: Which of the five; 1 has the most parameters, 5 the fewest.
        width: Factor of all channels, units and features, rounded up.
    """

    packs = True  # see lightfed.packs.packing

    def __init__(
        self,
        num_classes: int = 10,
        input_shape: Sequence[int] = (3, 32, 32),
        *,
        variant: Variant,
        width: float = 1.0,
    ) -> None:
        first_channels, second_channels, units = _WIDTHS[variant]
        super().__init__(
            num_classes,
            input_shape,
            channels=scaled((first_channels, second_channels), width),
            hidden=scaled((units, 500), width),
        )
