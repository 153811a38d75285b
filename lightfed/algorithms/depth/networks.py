"""Networks with a classifier after each block, for clients of different depth (DepthFL)."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.utils.counts import rounded_up


class DepthNet(nn.Module):
    """Blocks, and a classifier after each; the prediction is the mean of their logits.

        L = sum_i [ CE(z_i, y) + c / (d - 1) sum_{j != i} KL(q_j || softmax(z_i)) ]

    Of the d classifiers z_i are the logits, and q_i = softmax(z_i) is a constant. Kim, Yu, Kim,
    Moon: DepthFL, ICLR 2023.

    Args:
        blocks: maps of the input, and of each block's output.
        heads: as many; each maps the output of its block to (B, C) logits.

    Attributes:
        consistency: () c, the weight of distillation; 0 at first.
        deepest: only the last classifier has a loss.
    """

    consistency: Tensor
    deepest: bool = False

    def __init__(self, blocks: Iterable[nn.Module], heads: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.heads = nn.ModuleList(blocks), nn.ModuleList(heads)
        self.register_buffer("consistency", torch.zeros(()), persistent=False)

    def logits(self, x: Tensor) -> list[Tensor]:
        """(B, C) of every classifier."""
        pairs = zip(self.blocks, self.heads, strict=True)
        return [head(x := block(x)) for block, head in pairs]

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, C) logits."""
        return torch.stack(self.logits(x)).mean(0)

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Of every classifier."""
        z = self.logits(x)
        q = [z_j.softmax(1).detach() + 1e-7 for z_j in z]  # as in the first author's code
        share, losses = self.consistency / max(len(z) - 1, 1), {}
        for i in range(len(z) - 1 if self.deepest else 0, len(z)):
            others, log = q[:i] + q[i + 1 :], z[i].log_softmax(1)
            kl = [(q_j * (q_j.log() - log)).sum(1).mean() for q_j in others]
            losses[f"head{i}"] = F.cross_entropy(z[i], y) + share * sum(kl)
        return losses


class DepthConv(DepthNet):
    """Blocks of conv3x3, batch normalisation, ReLU and max-pool.

    Classifiers are a global average and a linear layer. A client of a rate below 1 has the first
    blocks.

    Args:
        num_classes: C.
        input_shape: (channels, height, width).
        channels: of all blocks.
        pools: number of blocks with pooling, the first ones.
        rate: share of the blocks, rounded up.
    """

    def __init__(
        self,
        num_classes: int = 10,
        input_shape: Sequence[int] = (1, 28, 28),
        *,
        channels: Sequence[int] = (32, 64, 64, 128),
        pools: int = 2,
        rate: float = 1.0,
    ) -> None:
        depth = rounded_up(len(channels) * rate)
        blocks: list[nn.Module] = []
        heads: list[nn.Module] = []
        for inputs, outputs in list(pairwise([input_shape[0], *channels]))[:depth]:
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            block = [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
            pooling = [nn.MaxPool2d(2)] if len(blocks) < pools else []
            blocks.append(nn.Sequential(*block, *pooling))
            average = nn.AdaptiveAvgPool2d(1), nn.Flatten()
            heads.append(nn.Sequential(*average, nn.Linear(outputs, num_classes)))
        super().__init__(blocks, heads)
