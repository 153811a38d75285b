"""What several networks share: checks of sizes, HeteroFL's Scaler, initial values."""

from collections.abc import Sequence

from torch import Tensor, nn
from typing_extensions import override

from lightfed.utils.counts import rounded_up
from lightfed.utils.errors import UserError


def image_shape(input_shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the shape of one image, (channels, height, width).

    Raises:
        UserError: The samples are not images.
    """
    if len(input_shape) != 3:
        raise UserError(
            key="input_shape",
            found=f"samples of shape {tuple(input_shape)}",
            fix="use images: (channels, height, width)",
        )
    channels, height, width = input_shape
    return channels, height, width


def scaled(sizes: Sequence[int], width: float) -> list[int]:
    """Return numbers of channels or units times `width`, rounded up."""
    return [rounded_up(size * width) for size in sizes]


def he_normal_(model: nn.Module) -> None:
    """Draw the weights of convolutions from N(0, sqrt(2 / (k^2 outputs))); set their biases to 0.

    He et al. 2015, by the outputs: section 2.2, eq. (14).
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class Scaler(nn.Module):
    """x / rate in training, x in evaluation.

    With it, narrow and wide models give activations of one magnitude (HeteroFL, section 3.3).

    Args:
        rate: The width ratio of the model.
    """

    packs = True  # see lightfed.packs.packing

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        if self.training and self.rate != 1.0:
            return x / self.rate
        return x
