"""Multilayer perceptron."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import Tensor, nn
from typing_extensions import override

from lightfed.networks.layers import scaled


class MLP(nn.Module):
    """Flatten, then linear layers with ReLU between them.

    Args:
        num_classes: C.
        input_shape: Shape of one sample.
        hidden: Units of the hidden layers at rate 1.
        dropout: Probability of dropout, after every hidden layer.
        rate: Width ratio; a hidden layer has ceil(rate * units) units.
    """

    packs = True  # see lightfed.packs.packing
    sequence = "layers"  # the only part that the forward pass calls; see lightfed.packs.stacked

    def __init__(
        self,
        num_classes: int = 10,
        input_shape: Sequence[int] = (1, 28, 28),
        *,
        hidden: Sequence[int] = (200, 200),
        dropout: float = 0.0,
        rate: float = 1.0,
    ) -> None:
        super().__init__()
        widths = [prod(input_shape), *scaled(hidden, rate)]
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers.append(nn.Linear(inputs, outputs))
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(widths[-1], num_classes))
        self.layers = nn.Sequential(*layers)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map samples (B, *input_shape) to logits (B, C)."""
        return self.layers(x)
