"""A network as a client.

Any LightningModule is one, and `ClientModule` makes one of any classifier.
"""

import lightning.pytorch as L
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

Batch = tuple[Tensor, Tensor]


class ClientModule(L.LightningModule):
    """A classifier as a client: cross-entropy to train, accuracy and loss to evaluate.

    Args:
        net: maps (B, ...) inputs to (B, num_classes) logits.
        num_classes: C.
    """

    def __init__(self, net: nn.Module, *, num_classes: int) -> None:
        super().__init__()
        self.net = net
        self.accuracy = MulticlassAccuracy(
            num_classes, average="micro", validate_args=False, sync_on_compute=False
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.accuracy.update(logits, y)
        self.log("loss", F.cross_entropy(logits, y))
        self.log("accuracy", self.accuracy)
