"""Modules, callbacks and data modules as their users wrote them for Lightning's Trainer."""

# Signatures are those of Lightning's users: not all of their arguments are needed here.
# mypy: disable-error-code="override, no-untyped-def, no-untyped-call"
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks as stock
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim import lr_scheduler as rates
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.promises.parity.harness import BATCH, FEATURES, Case


def draw(module: nn.Module, seed: int = 1) -> nn.Module:
    """Give a module the same values wherever it is built."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return module


class Net(L.LightningModule):
    """Two layers, trained by SGD with momentum."""

    def __init__(self, num_classes: int = 2, lr: float = 0.1) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, 8), nn.Linear(8, num_classes)
        self.lr, self.factor = lr, 1.0
        draw(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return self.factor * F.cross_entropy(self(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=self.lr, momentum=0.9)


CASES: dict[str, Case] = {}


def case(**settings: Any) -> Callable[[type], type]:
    """Enter a module under the name of its class."""

    def enter(kind: type) -> type:
        CASES[kind.__name__] = Case(kind, **settings)
        return kind

    return enter


CASES["Net"] = Case(Net)
CASES["ClippedByNorm"] = Case(Net, flags={"gradient_clip_val": 0.05})
CASES["ClippedByValue"] = Case(
    Net, flags={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
)


# Each hook of a module once.


@case()
class BeforeTransfer(Net):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0] / 3, batch[1]


@case()
class Transfer(Net):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch[0].to(device) / 3, batch[1].to(device)


@case()
class AfterTransfer(Net):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.training:
            return batch[0] * 2, batch[1]
        return batch


@case()
class Doubles(Net):
    """Its batches are twice as long as those of the loader: what is logged counts so."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return tuple(torch.cat([part, part]) for part in batch)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("size", float(len(batch[0])), on_epoch=True, on_step=False)
        return loss


@case()
class OwnBackward(Net):
    def backward(self, loss, *args, **kwargs):
        (0.3 * loss).backward()


@case()
class FreezesInSetup(Net):
    def setup(self, stage):
        self.a.requires_grad_(stage != "fit")


@case()
class BuildsInSetup(Net):
    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(num_classes)
        self.c = None

    def setup(self, stage):
        self.c = draw(nn.Linear(FEATURES, FEATURES), 5)

    def forward(self, x):
        return super().forward(self.c(x))


@case()
class ConfiguresModel(Net):
    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(num_classes)
        self.c = None

    def configure_model(self):
        if self.c is None:
            self.c = draw(nn.Linear(FEATURES, FEATURES), 5)
            self.b.requires_grad_(False)

    def forward(self, x):
        return super().forward(self.c(x))


@case()
class PreparesData(Net):
    prepared = False

    def prepare_data(self):
        type(self).prepared = True

    def setup(self, stage):
        self.factor = 0.5 if type(self).prepared else 1.0

    def teardown(self, stage):
        type(self).prepared = False


@case()
class FreezesInFitStart(Net):
    def on_fit_start(self):
        self.a.requires_grad_(False)

    def on_fit_end(self):
        self.a.requires_grad_(True)


@case()
class TrainStart(Net):
    def on_train_start(self):
        self.factor = 0.2

    def on_train_end(self):
        self.factor = 1.0


@case()
class EpochStart(Net):
    def on_train_epoch_start(self):
        self.factor = 1.0 / (1 + self.current_epoch)

    def on_train_epoch_end(self):
        self.lr = 0.0


@case()
class BatchStart(Net):
    def on_train_batch_start(self, batch, batch_idx):
        self.factor = 1.0 + batch_idx


@case()
class SkipsRestOfEpoch(Net):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 1 else None


@case()
class BatchEnd(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.b.weight.clamp_(-0.2, 0.2).mul_(1 - 0.1 * float(outputs["loss"] > 0.5))


@case()
class BeforeZeroGrad(Net):
    def on_before_zero_grad(self, optimizer):
        for p in self.parameters():
            if p.grad is not None:
                optimizer.param_groups[0]["lr"] *= 0.99


@case()
class BeforeBackward(Net):
    def on_before_backward(self, loss):
        self.factor = 0.5 + float(loss.detach())


@case()
class AfterBackward(Net):
    def on_after_backward(self):
        for p in self.a.parameters():
            p.grad.mul_(0.1)


@case()
class BeforeOptimizerStep(Net):
    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad = p.grad.sign() * 0.01


@case(flags={"gradient_clip_val": 0.02})
class OwnClipping(Net):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        value = gradient_clip_val * (1 + self.current_epoch)
        nn.utils.clip_grad_norm_(self.a.parameters(), value)


@case()
class ClippingByHook(Net):
    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.clip_gradients(optimizer, gradient_clip_val=0.03, gradient_clip_algorithm="norm")


@case()
class WarmsUp(Net):
    """The example of Lightning's documentation."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 4:
            scale = min(1.0, float(self.trainer.global_step + 1) / 4.0)
            for group in optimizer.param_groups:
                group["lr"] = scale * self.lr


@case()
class AccumulatesByHand(Net):
    """Steps on every second batch, with the sum of two gradients."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


@case()
class ZeroGrad(Net):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


@case()
class OwnSchedulerStep(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": rates.StepLR(optimizer, 1, 0.5), "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):
        if self.global_step % 2 == 0:
            scheduler.step()


class Everything(Net):
    """All hooks of training, none of which does anything."""

    def configure_callbacks(self):
        return []

    def prepare_data(self):
        pass

    def setup(self, stage):
        pass

    def configure_model(self):
        pass

    def teardown(self, stage):
        pass

    def on_fit_start(self):
        pass

    def on_train_start(self):
        pass

    def on_train_epoch_start(self):
        pass

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch

    def on_train_batch_start(self, batch, batch_idx):
        pass

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def on_before_zero_grad(self, optimizer):
        pass

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def on_before_backward(self, loss):
        pass

    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, **kwargs)

    def on_after_backward(self):
        pass

    def on_before_optimizer_step(self, optimizer):
        pass

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler, metric):
        super().lr_scheduler_step(scheduler, metric)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass

    def on_train_epoch_end(self):
        pass

    def on_train_end(self):
        pass

    def on_fit_end(self):
        pass

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        steps = {"scheduler": rates.StepLR(optimizer, 2, 0.5), "interval": "step"}
        return [optimizer], [steps, rates.ExponentialLR(optimizer, 0.9)]


class EveryHook(Callback):
    """All hooks of a callback in training, none of which does anything."""

    def setup(self, trainer, pl_module, stage):
        pass

    def teardown(self, trainer, pl_module, stage):
        pass

    def on_fit_start(self, trainer, pl_module):
        pass

    def on_fit_end(self, trainer, pl_module):
        pass

    def on_train_start(self, trainer, pl_module):
        pass

    def on_train_end(self, trainer, pl_module):
        pass

    def on_train_epoch_start(self, trainer, pl_module):
        pass

    def on_train_epoch_end(self, trainer, pl_module):
        pass

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pass

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pass

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        pass

    def on_before_backward(self, trainer, pl_module, loss):
        pass

    def on_after_backward(self, trainer, pl_module):
        pass

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pass


CASES["Everything"] = Case(Everything)
CASES["EveryHook"] = Case(Net, [EveryHook])
CASES["EverythingWithEveryHook"] = Case(Everything, [EveryHook], rounds=2)
CASES["EverythingOnce"] = Case(Everything, [EveryHook], epochs=1)


# Callbacks that act on steps.


class EMA(Callback):
    """Ends every fit with the mean of the weights that its steps have had."""

    def __init__(self, decay: float = 0.8) -> None:
        self.decay = decay
        self.mean: dict[str, Tensor] = {}

    def on_train_start(self, trainer, pl_module):
        if not self.mean:
            self.mean = {n: p.detach().clone() for n, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, p in pl_module.named_parameters():
            self.mean[name].lerp_(p.detach(), 1 - self.decay)

    def on_train_end(self, trainer, pl_module):
        for name, p in pl_module.named_parameters():
            p.data.copy_(self.mean[name])


class Anchors(Callback):
    """Pulls the weights to their mean over all steps."""

    def __init__(self) -> None:
        self.mean: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, p in pl_module.named_parameters():
            self.mean.setdefault(name, p.detach().clone()).lerp_(p.detach(), 0.2)
            p.data.lerp_(self.mean[name], 0.5)


class SavedAnchors(Anchors):
    """As above, with a state that it saves itself."""

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state_dict):
        self.mean = state_dict["mean"]


class GradientNorms(Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        norm = nn.utils.get_total_norm([p.grad for p in pl_module.parameters()])
        pl_module.log("norm", norm, on_step=False, on_epoch=True)


class Shrinks(Callback):
    def on_after_backward(self, trainer, pl_module):
        for p in pl_module.parameters():
            p.grad.mul_(0.5)


class Stops(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step == 4


class Thaws(stock.BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.a)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.a, optimizer, lr=0.05)


class HeadFirst(Net):
    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return SGD(trained, lr=self.lr, momentum=0.9)


class Backboned(Net):
    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(num_classes)
        self.backbone = self.a
        del self.a

    def forward(self, x):
        return self.b(self.backbone(x).relu())

    def configure_optimizers(self):
        return SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


@case()
class ConfiguresCallbacks(Net):
    def configure_callbacks(self):
        return [EMA(0.5), Shrinks()]


def every_other(trainer, pl_module):
    for p in pl_module.b.parameters():
        p.grad = p.grad * float(trainer.global_step % 2)


CASES["EMA"] = Case(Net, [EMA])
CASES["Anchors"] = Case(Net, [Anchors], rounds=2)
CASES["EMATwice"] = Case(Net, [EMA], rounds=2)
CASES["GradientNorms"] = Case(Net, [GradientNorms], epochs=1)
CASES["Shrinks"] = Case(Net, [Shrinks])
CASES["TwoCallbacks"] = Case(Net, [Shrinks, EMA])
CASES["Stops"] = Case(Net, [Stops])
CASES["Thaws"] = Case(HeadFirst, [Thaws])
CASES["BackboneFinetuning"] = Case(
    Backboned, [partial(stock.BackboneFinetuning, unfreeze_backbone_at_epoch=1)]
)
CASES["LambdaCallback"] = Case(Net, [partial(stock.LambdaCallback, on_after_backward=every_other)])


# Schedules and counts.


class Scheduled(Net):
    """A schedule, by its maker."""

    def __init__(self, make, num_classes: int = 2, **config: Any) -> None:
        super().__init__(num_classes)
        self.make, self.config = make, config

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=self.lr, momentum=0.9)
        schedule = self.make(self, optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **self.config}}


def scheduled(name: str, make, *, case: dict[str, Any] | None = None, **config: Any) -> None:
    CASES[name] = Case(partial(Scheduled, make, **config), **(case or {}))


scheduled("StepByEpoch", lambda m, o: rates.StepLR(o, 1, 0.3))
scheduled("StepByStep", lambda m, o: rates.StepLR(o, 2, 0.3), interval="step")
scheduled("EverySecondStep", lambda m, o: rates.ExponentialLR(o, 0.5), interval="step", frequency=2)
scheduled("CosineOverEpochs", lambda m, o: rates.CosineAnnealingLR(o, m.trainer.max_epochs))
scheduled(
    "LinearOverSteps",
    lambda m, o: rates.LinearLR(o, 1.0, 0.0, int(m.trainer.estimated_stepping_batches)),
    interval="step",
)
scheduled(
    "OneCycle",
    lambda m, o: rates.OneCycleLR(o, 0.2, total_steps=int(m.trainer.estimated_stepping_batches)),
    interval="step",
)
scheduled(
    "WarmUp", lambda m, o: rates.LambdaLR(o, lambda step: min(1, (step + 1) / 4)), interval="step"
)
scheduled(
    "WarmUpThenCosine",
    lambda m, o: rates.SequentialLR(
        o, [rates.LinearLR(o, 0.1, 1.0, 3), rates.CosineAnnealingLR(o, 3)], [3]
    ),
    interval="step",
)
scheduled(
    "ScheduleOfTwoRounds",
    lambda m, o: rates.StepLR(o, 1, 0.3),
    case={"rounds": 2, "hooks": False},  # one configure_optimizers serves all sessions
)
scheduled(
    "KeptSchedule",
    lambda m, o: rates.StepLR(o, 2, 0.5),
    case={"rounds": 3, "keep": True, "epochs": 1, "hooks": False},
    interval="step",
)


@case()
class RateBySteps(Net):
    """Reads the counts of the session in a step, and sets the rate there."""

    def training_step(self, batch, batch_idx):
        share = self.global_step / self.trainer.estimated_stepping_batches
        for group in self.optimizers().param_groups:
            group["lr"] = self.lr * (1 - share)
        return self.loss(batch)


@case()
class CountsBatches(Net):
    def training_step(self, batch, batch_idx):
        last = 10.0 if self.trainer.is_last_batch else 1.0
        share = (batch_idx + 1) / self.trainer.num_training_batches
        return self.loss(batch) * last * share / (1 + self.current_epoch)


@case()
class ReadsSchedulers(Net):
    def training_step(self, batch, batch_idx):
        (rate,) = self.lr_schedulers().get_last_lr()
        return self.loss(batch) * (1 + rate)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": rates.StepLR(optimizer, 2, 0.5), "interval": "step"}]


@case()
class NumberOfBatches(Net):
    def configure_optimizers(self):
        return SGD(self.parameters(), lr=1.0 / self.trainer.estimated_stepping_batches)


@case(rounds=3, keep=True, epochs=1, hooks=False)
class KeptSteps(Net):
    """Its rate follows from the steps of the client's whole life."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / (1 + self.global_step)


# Manual optimisation, and several optimizers.


class Manual(Net):
    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(num_classes)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss


CASES["Manual"] = Case(Manual)


@case()
class ManualAccumulation(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2 or self.trainer.is_last_batch:
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            optimizer.zero_grad()


@case()
class ManualClosure(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


@case()
class ManualSchedule(Manual):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=self.lr)
        return [optimizer], [rates.ExponentialLR(optimizer, 0.8)]


class GAN(L.LightningModule):
    """A generator of samples and a discriminator, each with an optimizer of its own."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(3, FEATURES)
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, 1))
        draw(self)

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def judged(self, x: Tensor, real: bool) -> Tensor:
        found = self.discriminator(x)
        return F.binary_cross_entropy_with_logits(found, torch.full_like(found, float(real)))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        of_generator, of_discriminator = self.optimizers()
        z = torch.randn(len(x), 3, device=x.device)

        self.toggle_optimizer(of_generator)
        loss = self.judged(self(z), True)
        self.manual_backward(loss)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)

        self.toggle_optimizer(of_discriminator)
        other = self.judged(x, True) + self.judged(self(z).detach(), False)
        self.manual_backward(other)
        of_discriminator.step()
        of_discriminator.zero_grad()
        self.untoggle_optimizer(of_discriminator)
        self.log_dict({"generator": loss, "discriminator": other}, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        return (
            Adam(self.generator.parameters(), lr=0.02),
            AdamW(self.discriminator.parameters(), lr=0.05),
        )


CASES["GAN"] = Case(GAN, epochs=1)
CASES["GANTwice"] = Case(GAN, rounds=2, hooks=False)


@case()
class GANWithHooks(GAN):
    def on_before_optimizer_step(self, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.generator.weight.mul_(0.99)


@case(rounds=3, keep=True, epochs=1, hooks=False)
class KeptManual(Manual):
    def configure_optimizers(self):
        return Adam(self.a.parameters(), lr=0.05), SGD(self.b.parameters(), lr=0.1, momentum=0.9)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()


# What belongs to a client.


@case()
class OwnEMA(Net):
    """Pulls its weights to their mean, which an attribute holds."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(num_classes)
        self.mean = None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        own = [p.detach().clone() for p in self.parameters()]
        self.mean = own if self.mean is None else [
            0.9 * old + 0.1 * new for old, new in zip(self.mean, own, strict=True)
        ]  # fmt: skip
        with torch.no_grad():
            for p, mean in zip(self.parameters(), self.mean, strict=True):
                p.lerp_(mean, 0.5)


@case(rounds=3, keep=True, epochs=1, hooks=False)
class KeptCounter(Net):
    """Counts its batches in an attribute; a kept client goes on to count."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(num_classes)
        self.seen = 0

    def on_train_batch_start(self, batch, batch_idx):
        self.seen += 1
        self.factor = 1.0 / self.seen


@case(rounds=2, keep=True, epochs=1, hooks=False)
class KeptAdam(Net):
    def on_train_start(self):
        pass

    def configure_optimizers(self):
        return Adam(self.parameters(), lr=0.05)


CASES["KeptAnchors"] = Case(Net, [Anchors], rounds=3, keep=True, epochs=1, hooks=False)
CASES["KeptSavedAnchors"] = Case(Net, [SavedAnchors], rounds=2, keep=True, epochs=1, hooks=False)


@case()
class Teacher(Net):
    """Distils from what it was at the start of the fit."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(num_classes)
        self.teacher = [nn.Identity()]

    def on_train_start(self):
        self.teacher = [deepcopy(nn.Sequential(self.a, nn.ReLU(), self.b))]

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + F.mse_loss(self(batch[0]), self.teacher[0](batch[0]).detach())


# Logging.


@case(epochs=1)
class Logs(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log_dict({"twice": 2 * loss, "one": 1.0}, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("after", outputs["loss"], on_step=False, on_epoch=True)

    def on_train_epoch_end(self):
        self.log("norm", self.a.weight.detach().norm())


@case()
class LogsInPlainSteps(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return {"loss": loss, "extra": batch_idx}


@case(epochs=1)
class LogsMetrics(Net):
    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(num_classes)
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.mean.update(loss.detach(), len(batch[0]))
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_train_start(self):
        pass


@case()
class ReadsItsMetrics(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_start(self):
        self.factor = float(self.trainer.callback_metrics.get("loss", 1.0))


@case()
class LogsToLoggers(Net):
    def training_step(self, batch, batch_idx):
        for logger in self.loggers:
            logger.log_metrics({"x": 1.0}, step=self.global_step)
        self.print("", end="")
        return self.loss(batch)


# Steps, batches and networks.


@case()
class SkipsABatch(Net):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else self.loss(batch)

    def on_train_start(self):
        pass


@case()
class NoIndex(Net):
    def training_step(self, batch):
        return self.loss(batch)


@case(hooks=False)
class ReadsLoader(Net):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


@case(columns=True)
class Columns(Net):
    def loss(self, batch):
        return super().loss((batch["x"], batch["label"]))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {"x": batch["x"] / 2, "label": batch["label"]}


@case(columns=True)
class PlainColumns(Net):
    def loss(self, batch):
        return super().loss((batch["x"], batch["label"]))


@case()
class Drops(Net):
    def forward(self, x):
        return self.b(F.dropout(self.a(x), 0.4, self.training))

    def on_train_start(self):
        pass


@case()
class Normalises(Net):
    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(num_classes)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.b(self.norm(self.a(x)).relu())

    def on_train_start(self):
        pass


@case()
class Compiled(Net):
    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(num_classes)
        self.part = torch.compile(lambda x: x.sin() + x, backend="eager")

    def forward(self, x):
        return self.b(self.part(self.a(x)))


@case()
class Hyperparameters(Net):
    def __init__(self, num_classes: int = 2, decay: float = 0.01) -> None:
        super().__init__(num_classes)
        self.save_hyperparameters()

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=self.lr, weight_decay=self.hparams.decay)

    def on_train_start(self):
        pass


@case()
class FrozenPart(Net):
    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(num_classes)
        self.a.requires_grad_(False)

    def on_train_start(self):
        pass


@case()
class Tied(Net):
    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(num_classes)
        self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 8)
        self.d.weight = self.c.weight
        draw(self)

    def forward(self, x):
        return self.b(self.d(self.c(self.a(x))))

    def on_train_start(self):
        pass


@case()
class Groups(Net):
    def configure_optimizers(self):
        return SGD([{"params": self.a.parameters(), "lr": 0.01},
                    {"params": self.b.parameters()}], lr=0.1)  # fmt: skip

    def on_train_start(self):
        pass


@case()
class Gathers(Net):
    """Of one process there is nothing else to gather."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * self.all_gather(torch.tensor(2.0)).mean() / self.trainer.world_size


@case()
class Inner(Net):
    """A module in a module."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(num_classes)
        self.inner = Net(num_classes)

    def forward(self, x):
        return self.inner(x) * self.inner.trainer.max_epochs

    def on_train_start(self):
        pass


# Data modules.


class Data(L.LightningDataModule):
    def __init__(self, train: Any, test: Any) -> None:
        super().__init__()
        self.sets = train, test
        self.scale = 1.0

    def train_dataloader(self):
        return DataLoader(self.sets[0], BATCH, shuffle=True)

    def test_dataloader(self):
        return DataLoader(self.sets[1], BATCH)


class DataBefore(Data):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0] / 3, batch[1]


class DataTransfer(Data):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch[0].to(device) / 3, batch[1].to(device)


class DataAfter(Data):
    def setup(self, stage):
        self.scale = 2.0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * self.scale, batch[1]


@case(datamodule=DataAfter)
class BothTransfer(Net):
    """The data module's hook goes before the module's own, as in Lightning."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        raise AssertionError("the data module has this hook")

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + 1, batch[1]


@case(datamodule=Data)
class ReadsDataModule(Net):
    def setup(self, stage):
        self.factor = 3 * self.trainer.datamodule.scale


CASES["Data"] = Case(Net, datamodule=Data)
CASES["DataBefore"] = Case(Net, datamodule=DataBefore)
CASES["DataTransfer"] = Case(Net, datamodule=DataTransfer)
CASES["DataAfter"] = Case(Net, datamodule=DataAfter)
