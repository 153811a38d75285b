"""A session is a bare training loop: same batches, same draws, same bits."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.data.datamodule import FederatedDataModule
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.local.logbook import batch_size
from lightfed.local.optimizer import make_stepper
from lightfed.local.session import LocalSession, Runtime, Work
from lightfed.networks.mlp import MLP
from lightfed.state.rows import LiveModule, ModelLayout, Row
from lightfed.utils.rng import derive_seed, torch_generator
from tests.small import fit, fleet_of, random_data, row_held, run_round, state_dict

SEED = 5
EPOCHS: list[tuple[int, int]] = []  # what the module of a test sees
Batch = tuple[Tensor, Tensor]
Net = partial(MLP, hidden=(9,), dropout=0.4)


class Own(L.LightningModule):
    """A module as a user wrote it for a Trainer; nothing in it knows of federations."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(8, num_classes),
        )
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y, label_smoothing=0.1)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("size", float(len(y)))
        EPOCHS.append((self.current_epoch, self.global_step))
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log_dict({"loss": F.cross_entropy(logits, y), "accuracy": self.accuracy})

    @override
    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=0.02, weight_decay=0.1)
        schedule = CosineAnnealingLR(optimizer, T_max=3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "epoch"},
        }


def initial(factory: Any, **arguments: Any) -> nn.Module:
    """A group's model before training: a function of the run's seed and its position."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(SEED, "init", client=0))
        return factory(**arguments)


def session_batches(data: FederatedDataModule, t: int, client: int, epochs: int) -> Iterator[Batch]:
    """The batches of a session, drawn as the documentation says: one stream of orders a session."""
    order = torch_generator(SEED, "order", t, client)
    owned = torch.from_numpy(data.partition_.train(client)).long()
    samples = data.dataset.load("train")
    for _ in range(epochs):
        shuffled = owned[torch.randperm(len(owned), generator=order)]
        for index in shuffled.split(data.batch_size):
            yield samples.x[index], samples.y[index]


def seed_dropout(t: int, client: int) -> None:
    torch.manual_seed(derive_seed(SEED, "session", t, client))


def trained(federation: Federation, client: int = 0) -> dict[str, Tensor]:
    return state_dict(*row_held(federation.fleet, client))


def assert_state(module: nn.Module, found: dict[str, Tensor], prefix: str = "") -> None:
    state = module.state_dict()
    assert {prefix + name for name in found} == set(state)
    for name, value in found.items():
        assert torch.equal(value.to(state[prefix + name].dtype), state[prefix + name]), name


@pytest.mark.parametrize("algorithm", [FedAvg, Standalone])
def test_one_client_is_a_bare_loop(algorithm: Any, tmp_path: Path) -> None:
    data = random_data([23], batch_size=5)
    optimizer = partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
    federation = Federation(
        algorithm(), [ClientGroup(1, Net)], optimizer=optimizer, local_epochs=2, seed=SEED
    )
    fit(federation, data, tmp_path, rounds=3, gradient_clip_val=1.0)

    net = initial(Net, num_classes=3, input_shape=(4,))
    net.train()
    for t in range(3):
        sgd = optimizer(net.parameters())
        seed_dropout(t, 0)
        for x, y in session_batches(data, t, 0, epochs=2):
            sgd.zero_grad()
            F.cross_entropy(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            sgd.step()
    # FedAvg of one client: n w / n in float64 is w.
    assert_state(net, trained(federation))


def test_a_users_module_trains_as_it_is(tmp_path: Path) -> None:
    EPOCHS.clear()
    data = random_data([23], batch_size=5)
    federation = Federation(FedAvg(), [ClientGroup(1, Own)], local_epochs=3, seed=SEED)
    trainer = fit(federation, data, tmp_path, rounds=2)

    own = initial(Own, num_classes=3)
    losses: list[Tensor] = []
    sizes: list[int] = []
    for t in range(2):
        assert isinstance(own, Own)
        configured = own.configure_optimizers()
        optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
        own.train()
        seed_dropout(t, 0)
        losses, sizes = [], []
        for index, (x, y) in enumerate(session_batches(data, t, 0, epochs=3)):
            optimizer.zero_grad()
            loss = F.cross_entropy(own(x), y, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach() * len(y))
            sizes.append(len(y))
            if (index + 1) % 5 == 0:
                schedule.step()
    assert sizes == [5, 5, 5, 5, 3] * 3
    assert_state(own, {f"net.{k}": v for k, v in trained(federation).items()})
    metrics = trainer.callback_metrics
    # Means over samples, in float32 here and in float32 and float64 there.
    assert float(metrics["train_loss"]) == pytest.approx(float(sum(losses)) / 69, rel=1e-5)
    assert float(metrics["size"]) == pytest.approx(sum(n * n for n in sizes) / 69, rel=1e-6)
    own.eval()
    x, y = data.dataset.load("test").x, data.dataset.load("test").y
    hits = (own(x).argmax(1) == y).float().mean()
    assert float(metrics["global/accuracy"]) == pytest.approx(float(hits), abs=1e-6)
    module = federation.fleet.groups[0].module
    assert module.trainer.run_logger is trainer.run_logger
    # Epochs are those of a session, and steps those of the client's life.
    session = [0] * 5 + [1] * 5 + [2] * 5
    assert list(zip(session + session, range(30), strict=True)) == EPOCHS


def session_of(module: L.LightningModule) -> tuple[LocalSession, Row]:
    live = LiveModule(module, ModelLayout.of(module))
    optimizer: Optimizer = SGD(live.trainable, lr=0.1)
    stepper = make_stepper(optimizer, schedulers=[], clipping=None)
    return LocalSession(module, Runtime(), live=live, stepper=stepper), live.row_of_module()


def work_of(batches: list[Any]) -> Work:
    return Work(4, batches, epoch_batches=len(batches), lr=None, seed=1, hook=None)


class Returning(L.LightningModule):
    """Returns what the test says from `training_step`."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.returns = returns

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = (batch[0] @ self.w).sum()
        if self.returns == "skip second" and batch_idx == 1:
            return None
        return {"loss": loss, "extra": 1} if self.returns == "dict" else loss


def line_batches() -> list[Batch]:
    return [(torch.full((n, 2), float(n)), torch.zeros(n)) for n in (1, 2, 4)]


def test_a_training_step_may_return_a_dict() -> None:
    reports, rows = [], []
    for returns in ("loss", "dict"):
        session, row = session_of(Returning(returns))
        reports.append(session.train(row, work_of(line_batches())).resolve())
        rows.append(row.floats)
    assert torch.equal(rows[0], rows[1])
    assert reports[0] == reports[1]
    assert (reports[0].client, reports[0].samples, reports[0].steps) == (4, 7, 3)


def test_a_batch_whose_step_returns_none_is_skipped() -> None:
    session, row = session_of(Returning("skip second"))
    report = session.train(row, work_of(line_batches())).resolve()
    # w - .1 x (1 + 4 x 4): the second batch of 2 is left out.
    assert row.floats[:2].tolist() == pytest.approx([1 - 1.7, 1 - 1.7], rel=1e-6)
    assert (report.samples, report.steps) == (5, 2)
    assert report.norm == pytest.approx(0.7 * 2**0.5, rel=1e-6)


def test_the_train_loss_is_the_mean_over_samples() -> None:
    session, row = session_of(Returning("loss"))
    report = session.train(row, work_of(line_batches())).resolve()
    # Losses 2, then 4 of w = .9 x (2, 2), then of w = .5 on 4 x (4, 4), worked out by hand:
    # 1 x 2 + 2 x 2 x 2 x 2 x .9 + 4 x 4 x 4 x 2 x .5, each times its size over 7.
    by_hand = (1 * 2.0 + 2 * 7.2 + 4 * 16.0) / 7
    assert report.metrics == {"train_loss": pytest.approx(by_hand, rel=1e-6)}


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(3, 2),
        (torch.zeros(3, 2), torch.zeros(4)),
        {"x": [torch.zeros(3)], "y": torch.zeros(1)},
        [[torch.zeros(3, 1), torch.zeros(9)], torch.zeros(9)],
    ],
)
def test_the_size_of_a_batch_is_that_of_its_first_tensor(batch: Any) -> None:
    assert batch_size(batch) == 3


FOUND: list[bool] = []  # whether a step has found the gradient of its own tensor


class Perturbed(L.LightningModule):
    """Trains against a perturbation, whose gradient a step leaves for the next one."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.net = nn.Linear(input_shape[0], num_classes)
        self.delta = torch.zeros(input_shape, requires_grad=True)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        FOUND.append(self.delta.grad is not None)
        if self.delta.grad is not None:
            self.delta.data += 0.1 * self.delta.grad.sign()
            self.delta.grad = None
        return F.cross_entropy(self.net(x + self.delta), y)


def test_a_users_step_finds_the_gradients_of_its_own_tensors() -> None:
    data = random_data([8], features=4, batch_size=2)
    fleet = fleet_of([ClientGroup(1, Perturbed)], FedAvg(), data)
    FOUND.clear()
    run_round(fleet, 0)
    assert FOUND == [False, True, True, True]
