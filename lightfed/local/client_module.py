"""A network as a client.

Any LightningModule is one; `ClientModule` makes one of any classifier, and `MaskedLanguageClient`
of any masked language model.
"""

import math
from typing import Protocol

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

Batch = tuple[Tensor, Tensor]


class NetworkClient(L.LightningModule):
    """A client made of a network, `net`, that maps inputs to logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class ClientModule(NetworkClient):
    """A classifier as a client: cross-entropy to train, accuracy and loss to evaluate.

    Args:
        net: maps (B, ...) inputs to (B, num_classes) logits. If it has a method `losses`, of
            (inputs, labels), training minimises the sum of what that gives by name; `figures`, of
            the same, gives numbers that an evaluation reports as well.
        num_classes: C.
    """

    def __init__(self, net: nn.Module, *, num_classes: int) -> None:
        super().__init__(net)
        self.accuracy = MulticlassAccuracy(num_classes, average="micro", validate_args=False)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        losses = getattr(self.net, "losses", None)
        if losses is None:
            return F.cross_entropy(self.net(x), y)
        return torch.stack(list(losses(x, y).values())).sum()

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.accuracy.update(logits, y)
        self.log("loss", F.cross_entropy(logits, y))
        self.log("accuracy", self.accuracy)
        figures = getattr(self.net, "figures", None)
        if figures is not None:
            self.log_dict(figures(x, y))


class MasksTokens(Protocol):
    """A masked language model: it replaces some tokens itself, in training and evaluation.

    Attributes:
        masked: (B, T) bool, the positions that its last forward pass replaced.
    """

    masked: Tensor


class MaskedLanguageClient(NetworkClient):
    """A masked language model as a client: it predicts all tokens of a window, masked or not.

    Evaluation reports two perplexities, exp of the mean cross-entropy: over all positions, as
    HeteroFL's released code does, and over the masked ones alone. The mean over the masked ones
    weighs batches by their windows.

    Args:
        net: maps (B, T) int64 tokens to (B, T, V) logits and keeps `masked`, see MasksTokens.
    """

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        tokens, target = batch
        return F.cross_entropy(self.net(tokens).flatten(0, 1), target.flatten())

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        tokens, target = batch
        losses = F.cross_entropy(
            self.net(tokens).flatten(0, 1), target.flatten(), reduction="none"
        ).view_as(target)
        self.log("loss", losses.mean())
        self.log(LOG_PERPLEXITY, losses.mean())
        net: MasksTokens = self.net  # type: ignore[assignment]
        if net.masked.any():
            self.log(f"{LOG_PERPLEXITY}_masked", losses[net.masked].mean())


# A metric that starts with this is the mean of a logarithm: what is reported is exp of it, without
# the `log_`.
LOG_PERPLEXITY = "log_perplexity"


def reported(metrics: dict[str, float]) -> dict[str, float]:
    """Means of a client, or of the global model, as they are reported."""
    return {
        name.removeprefix("log_") if name.startswith(LOG_PERPLEXITY) else name: (
            math.exp(min(value, 700.0)) if name.startswith(LOG_PERPLEXITY) else value
        )
        for name, value in metrics.items()
    }
