"""Multilayer perceptron."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import Tensor, nn
from typing_extensions import override

from lightfed.utils.counts import rounded_up


class MLP(nn.Module):
    """Flatten, then linear layers with ReLU between them.

    Args:
        num_classes: C.
        input_shape: of one sample.
        hidden: widths of the hidden layers at rate 1.
        dropout: after every hidden layer.
        rate: width ratio; hidden layers have ceil(rate * width) units.
    """

    packs = True  # see lightfed.packs.packing

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
        widths = [prod(input_shape), *(rounded_up(width * rate) for width in hidden)]
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, *input_shape) -> (B, C) logits."""
        return self.layers(x)
