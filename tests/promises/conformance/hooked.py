"""Users' modules that override Lightning's hooks, on digits."""

from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LinearLR
from typing_extensions import override

from lightfed.testing.case import NormNet

Batch = tuple[Tensor, Tensor]


class Gan(L.LightningModule):
    """A generator and a discriminator, each with an optimizer of its own."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 64))
        self.discriminator = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))

    def judged(self, x: Tensor, real: float) -> Tensor:
        found = self.discriminator(x)
        return F.binary_cross_entropy_with_logits(found, torch.full_like(found, real))

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        x = batch[0].flatten(1)
        optimizers: Any = self.optimizers()
        fake = self.generator(torch.randn(len(x), 4, device=x.device))
        losses = (
            self.judged(fake, 1.0),
            self.judged(x, 1.0) + self.judged(fake.detach(), 0.0),
        )
        for optimizer, loss in zip(optimizers, losses, strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss, retain_graph=True)
            self.untoggle_optimizer(optimizer)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.log_dict({"generator": losses[0], "discriminator": losses[1]})

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("judged", self.judged(batch[0].flatten(1), 1.0))

    @override
    def configure_optimizers(self) -> Any:
        return (
            Adam(self.generator.parameters(), lr=0.01),
            AdamW(self.discriminator.parameters(), lr=0.01),
        )


class Classifier(L.LightningModule):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.net = NormNet(num_classes)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    @override
    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


class Mean(Callback):
    """Pulls the weights of a client to their mean over all its steps, which it keeps."""

    def __init__(self) -> None:
        self.mean: dict[str, Tensor] = {}
        self.steps = 0

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.steps += 1
        for name, p in pl_module.named_parameters():
            self.mean.setdefault(name, p.detach().clone()).lerp_(p.detach(), 1 / self.steps)
            p.data.lerp_(self.mean[name], 0.1)


class Averaged(Classifier):
    """It brings its callback along."""

    @override
    def configure_callbacks(self) -> Callback:
        return Mean()


class Falling(Classifier):
    """Its rate falls over the steps of a session, however long that is."""

    @override
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        falls = LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
        return [optimizer], [{"scheduler": falls, "interval": "step"}]

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("rate", self.optimizers().param_groups[0]["lr"] / (1 + self.global_step))  # type: ignore[union-attr]
