"""Networks with a classifier after each block, for clients of different depth (DepthFL)."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.models.labelled import mean_of_labelled
from lightfed.utils.counts import rounded_up


class DepthNet(nn.Module):
    """Blocks, and a classifier after each; the prediction is the mean of their logits.

        L = sum_i [ CE(z_i, y) + c / (d - 1) sum_{j != i} KL(q_j || softmax(z_i)) ]

    z_i are the logits of the i-th of d classifiers, and q_i = softmax(z_i) is a constant. Kim, Yu,
    Kim, Moon: DepthFL, ICLR 2023.

    Args:
        blocks: Map the input, and then each block's output.
        heads: As many; each maps the output of its block to (B, C) logits.

    Attributes:
        consistency: () c, the weight of distillation; 0 at first.
        deepest: Whether only the last classifier has a loss.
    """

    packs = True
    packs_losses = True
    consistency: Tensor
    deepest: bool = False

    def __init__(self, blocks: Iterable[nn.Module], heads: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.heads = nn.ModuleList(heads)
        self.register_buffer("consistency", torch.zeros(()), persistent=False)

    def logits(self, x: Tensor) -> list[Tensor]:
        """Return the logits (B, C) of every classifier, from samples (B, ...)."""
        logits = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            logits.append(head(x))
        return logits

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map samples (B, ...) to logits (B, C)."""
        return torch.stack(self.logits(x)).mean(0)

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the loss of every classifier that has one, as "head0", "head1", and so on.

        Args:
            x: Samples (B, ...).
            y: Labels (B,).
        """
        z = self.logits(x)
        depth = len(z)
        q = [z_i.softmax(1).detach() + 1e-7 for z_i in z]  # 1e-7 as in the first author's code
        weight = self.consistency / max(depth - 1, 1)  # c / (d - 1)

        losses = {}
        first = depth - 1 if self.deepest else 0
        for i in range(first, depth):
            log_p = z[i].log_softmax(1)
            others = q[:i] + q[i + 1 :]
            divergences = []
            for q_j in others:
                of_samples = (q_j * (q_j.log() - log_p)).sum(1)
                divergences.append(mean_of_labelled(of_samples, y))
            losses[f"head{i}"] = F.cross_entropy(z[i], y) + weight * sum(divergences)
        return losses


class DepthConv(DepthNet):
    """Blocks of conv3x3, batch normalization, ReLU and max-pool.

    Classifiers are a global average and a linear layer. A client of a rate below 1 has the first
    blocks.

    Args:
        num_classes: C.
        input_shape: (channels, height, width).
        channels: Output channels of each block of the deepest client.
        pools: Number of blocks with pooling, the first ones.
        rate: Share of the blocks, rounded up.
    """

    packs = True
    packs_losses = True

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
        inputs = input_shape[0]
        for position, outputs in enumerate(channels[:depth]):
            block = nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            )
            if position < pools:
                block.append(nn.MaxPool2d(2))
            head = nn.Sequential(
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(outputs, num_classes),
            )
            blocks.append(block)
            heads.append(head)
            inputs = outputs
        super().__init__(blocks, heads)
