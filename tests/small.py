"""Federations small enough to follow by hand: data made in the test, models of a few parameters."""

import logging
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.dataset import Dataset, Samples, Split, Transform
from lightfed.data.partition.schemes import Partitioner
from lightfed.devices.devices import Devices
from lightfed.devices.policy import Policy
from lightfed.devices.timing import Timing
from lightfed.distributed.collectives import Ranks
from lightfed.engine.session_setup import OptimizerFactory, client_stepper, single_optimizer
from lightfed.federation import Federation
from lightfed.lightning_fits.session_trainer import SessionHost
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import LocalWork
from lightfed.local.optimizer import Clipping
from lightfed.local.rank_sessions import Waves
from lightfed.local.session import Autocast, Runtime
from lightfed.packs.packing import Packs, SideBySide
from lightfed.packs.runner import PackRunner
from lightfed.runs.run_logger import RunLogger
from lightfed.state.rows import ModelLayout, Row
from lightfed.trainer import FederatedTrainer

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parent / "golden"


class Tensors(Dataset):
    """The tensors of a test as a data set; batches hold them unchanged."""

    def __init__(self, x: Tensor, y: Tensor, *, classes: int, test: tuple[Tensor, Tensor]) -> None:
        self._splits = {"train": Samples(x, y), "test": Samples(*test)}
        self.classes = tuple(str(label) for label in range(classes))
        self.input_shape = tuple(x.shape[1:])

    @property
    @override
    def transform(self) -> Transform:
        channels = self.input_shape[0] if len(self.input_shape) == 3 else 1
        return Transform((0.0,) * channels, (1.0,) * channels)

    @override
    def load(self, split: Split) -> Samples:
        return self._splits[split]


class Given(Partitioner):
    """Every client gets exactly the samples that the test names."""

    def __init__(self, *parts: Sequence[int]) -> None:
        self.parts = [list(part) for part in parts]

    @override
    def split(
        self,
        labels: np.ndarray,
        *,
        clients: int,
        num_classes: int,
        rng: np.random.Generator,
        groups: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        assert clients == len(self.parts)
        return [np.array(sorted(part)) for part in self.parts]


def data_of(
    x: Tensor,
    y: Tensor,
    parts: Sequence[Sequence[int]],
    *,
    classes: int | None = None,
    test: tuple[Tensor, Tensor] | None = None,
    batch_size: int = 1000,
    eval_batch_size: int = 1000,
    **settings: Any,
) -> FederatedDataModule:
    """A data module over given tensors; without a test split, the training split is that too."""
    number = int(y.max()) + 1 if classes is None else classes
    dataset = Tensors(x, y, classes=number, test=test or (x, y))
    return FederatedDataModule(
        dataset, Given(*parts), batch_size=batch_size, eval_batch_size=eval_batch_size, **settings
    )


def random_data(
    sizes: Sequence[int], *, classes: int = 3, features: int = 4, seed: int = 0, **settings: Any
) -> FederatedDataModule:
    """Clients with so many random samples each; every client of three or more has all classes."""
    rng = torch.Generator().manual_seed(seed)
    bounds = np.cumsum([0, *sizes])
    y = torch.cat([torch.arange(size) % classes for size in sizes])
    x = torch.randn(len(y), features, generator=rng) + y[:, None]
    parts = [range(a, b) for a, b in pairwise(bounds)]
    return data_of(x, y, parts, classes=classes, **settings)


class Line(L.LightningModule):
    """y = w x; half the summed squared error, whose gradient is the sum of (w x - y) x."""

    def __init__(self, start: Sequence[float] = (0.0, 0.0)) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return ((self(x) - y) ** 2).sum() / 2

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("error", ((self(x) - y) ** 2).mean())


SGD_HALF = partial(SGD, lr=0.5)


def fleet_of(
    groups: list[ClientGroup],
    algorithm: Algorithm,
    data: FederatedDataModule,
    *,
    optimizer: OptimizerFactory = SGD_HALF,
    clip: float | None = None,
    seed: int = 0,
    side_by_side: SideBySide = "auto",
    precision: Autocast | None = None,
    host_rows: bool = False,
    device: torch.device = CPU,
    server_optimizer: Any = None,
    personal: Sequence[str] = (),
    devices: Devices | None = None,
    policy: Policy | None = None,
    local_penalty: Any = None,
    keep_optimizer: bool = False,
    host: SessionHost | None = None,
    **work: Any,
) -> Fleet:
    """A fleet with its sessions attached, as `Federation.setup` makes it, without a Trainer."""
    data.prepare(clients=sum(c.count for c in groups), seed=seed, device=device)
    runtime = Runtime(forward_context=precision, clipping=Clipping(clip) if clip else None)

    def make_optimizer(module: Any) -> Any:
        return single_optimizer(module, optimizer, runtime)

    packs = partial(PackRunner, packs=Packs(side_by_side), make=make_optimizer, context=precision)
    fleet = Fleet(
        groups, algorithm, data, ranks=Ranks(device), work=LocalWork(**work), seed=seed,
        host_rows=host_rows, side_by_side=packs, server_optimizer=server_optimizer,
        personal=personal, timing=Timing(devices, policy),
        local_penalty=local_penalty, keep_optimizer=keep_optimizer, host=host,
    )  # fmt: skip
    steppers = [
        client_stepper(
            state, i, optimizer, runtime, algorithm.lr_factors(state.module), keep=keep_optimizer
        )
        for i, state in enumerate(fleet.groups)
    ]
    fleet.training.attach(runtime, steppers)
    return fleet


def run_round(fleet: Fleet, t: int, waves: Waves | None = None) -> dict[str, float]:
    """One round of the fleet's algorithm; its metrics."""
    fleet.open_round(waves=waves)
    fleet.algorithm.round(fleet, t)
    return fleet.close_round()


def quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def fit(
    federation: Federation,
    data: FederatedDataModule,
    folder: Path,
    *,
    rounds: int = 1,
    ckpt_path: Any = None,
    **flags: Any,
) -> FederatedTrainer:
    """The whole program but the command line; the run folder is `folder`/run."""
    quiet()
    flags = {
        "logger": RunLogger(str(folder), "run"), "enable_progress_bar": False, "enable_page": False,
    } | flags  # fmt: skip
    trainer = FederatedTrainer(max_epochs=rounds, accelerator="cpu", **flags)
    trainer.fit(federation, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def server_row(federation: Federation) -> Tensor:
    """(P,) a copy of the floats of the only server model."""
    rows = [v for k, v in federation.state_dict().items() if k.endswith("model.floats")]
    assert len(rows) == 1
    return rows[0].clone()


def row_held(fleet: Fleet, client: int) -> tuple[ModelLayout, Row]:
    """What a client deploys."""
    rows = fleet.deployed(client)
    return rows.live.layout, rows.row(client)


def module_of(fleet: Fleet, client: int | None) -> L.LightningModule:
    """The module with what a client deploys, or with the first of the global models."""
    rows = fleet.deployed(client)
    with rows.bound(rows.clients[0]) as module:
        return module


def has_global_model(fleet: Fleet) -> bool:
    return fleet.algorithm.models(fleet, "global", []) is not None


def state_dict(layout: ModelLayout, row: Row) -> dict[str, Tensor]:
    """A row's tensors by the names that the user's network has for them."""
    views = layout.floats.views(row.floats) | layout.integers.views(row.integers)
    prefix = "net." if all(name.startswith("net.") for name in views) else ""
    return {name.removeprefix(prefix): view.clone() for name, view in views.items()}
