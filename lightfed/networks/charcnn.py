"""Convolutions over characters, in FlexiFed's four depths."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.networks.layers import scaled
from lightfed.utils.errors import UserError

LETTERS = 70
"""Size of the alphabet. A character is the number of its letter, 1 to 70, or 0 if it is none."""


class CharCNN(nn.Module):
    """CharCNN-3 to -6: three to six convolutions over one-hot characters, then three linear layers.

    The layers are a frozen one-hot embedding, whose row 0 (padding) is zero; conv7-BN-ReLU-pool3
    twice; conv3-BN-ReLU, `layers - 3` times; conv3-ReLU-pool3; linear-ReLU-dropout twice; linear.
    With four classes and 1,014 characters there are 11,279,470, 11,214,702, 11,149,934 and
    11,347,310 parameters, including 4,970 of the embedding, which are not trained.

    The family goes back to Zhang et al. 2015. There, and in FlexiFed's published reproduction,
    weights are drawn from N(0, 0.05). The first logits then have a magnitude of 15, and FlexiFed's
    learning rate of 0.01 kills all units below the classifier. So initial values here are PyTorch's
    defaults.

    Args:
        layers: Number of convolutions.
        num_classes: C.
        input_shape: (characters,).
        width: Channels of a convolution, as a multiple of 256.
        hidden: Units of both hidden linear layers.
        dropout: Probability of dropout, behind both hidden layers.
        letters: Size of the alphabet, whose characters are 1 to `letters`. 255 for the bytes of
            `Hub(alphabet="bytes")`.
    """

    def __init__(
        self,
        layers: Literal[3, 4, 5, 6] = 3,
        num_classes: int = 4,
        input_shape: Sequence[int] = (1014,),
        *,
        width: float = 1.0,
        hidden: int = 1024,
        dropout: float = 0.5,
        letters: int = LETTERS,
    ) -> None:
        super().__init__()
        (channels,) = scaled([256], width)
        one_hot = torch.eye(letters + 1)[:, 1:].contiguous()  # row 0 is zero
        self.embedding = nn.Embedding.from_pretrained(one_hot, freeze=True, padding_idx=0)

        self.features = nn.Sequential(
            *_conv(letters, channels, 7, norm=True, pool=True),
            *_conv(channels, channels, 7, norm=True, pool=True),
        )
        for _ in range(layers - 3):
            self.features.extend(_conv(channels, channels, 3, norm=True, pool=False))
        self.features.extend(_conv(channels, channels, 3, norm=False, pool=True))

        # Characters that are left: a convolution of 7 takes 6, one of 3 takes 2, a pooling divides.
        if len(input_shape) != 1:
            raise UserError(
                key="input_shape",
                found=f"samples of shape {tuple(input_shape)}",
                fix="use texts as sequences of characters: (characters,)",
            )
        (length,) = input_shape
        positions = (length - 6) // 3
        positions = (positions - 6) // 3
        positions = (positions - 2 * (layers - 2)) // 3
        self.classifier = nn.Sequential(
            nn.Flatten(),
            *_hidden(channels * positions, hidden, dropout),
            *_hidden(hidden, hidden, dropout),
            nn.Linear(hidden, num_classes),
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map characters (B, characters) of any type, 0..letters, to logits (B, C)."""
        embedded = self.embedding(x.long()).transpose(1, 2)  # (B, letters, characters)
        return self.classifier(self.features(embedded))


def _conv(inputs: int, outputs: int, kernel: int, *, norm: bool, pool: bool) -> list[nn.Module]:
    """Return a convolution with its norm, ReLU and pooling."""
    layers: list[nn.Module] = [nn.Conv1d(inputs, outputs, kernel)]
    if norm:
        layers.append(nn.BatchNorm1d(outputs))
    layers.append(nn.ReLU(inplace=True))
    if pool:
        layers.append(nn.MaxPool1d(3))
    return layers


def _hidden(inputs: int, units: int, dropout: float) -> list[nn.Module]:
    """Return a hidden linear layer with its ReLU and dropout."""
    return [nn.Linear(inputs, units), nn.ReLU(inplace=True), nn.Dropout(dropout)]
