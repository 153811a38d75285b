"""The other side: the same rounds by the public interface, with hooks, log and run folder."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override
from workloads import (
    CLASSES,
    COSINE_ROUNDS,
    DENSITY,
    LEARNING_RATE,
    LEVELS,
    NEIGHBOURS,
    PRUNE_RATE,
    SEED,
    Workload,
)

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.topology.topology import TimeVarying
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.algorithm import Algorithm
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.dataset import Dataset, Samples, Split, Transform
from lightfed.data.partition.schemes import Partitioner
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.trainer import FederatedTrainer, Precision

ENDLESS = 1_000_000_000


class Pool(Dataset):
    """The samples of a workload.

    Args:
        workload: what is trained.
        tested: samples of the test split, which a data set has even if nothing is evaluated.
    """

    classes = tuple(map(str, range(CLASSES)))
    synthetic = True

    def __init__(self, workload: Workload, tested: int = CLASSES) -> None:
        self.input_shape = workload.input_shape
        self.task = "masked_lm" if workload.words else "classification"
        self._workload, self._tested = workload, tested

    @property
    @override
    def num_classes(self) -> int:
        return self._workload.words or CLASSES

    @property
    @override
    def transform(self) -> Transform | None:
        if self._workload.words:
            return None
        channels = self.input_shape[0] if len(self.input_shape) == 3 else 1
        return Transform(mean=(0.0,) * channels, std=(1.0,) * channels)

    @override
    def load(self, split: Split) -> Samples:
        count = self._workload.pool if split == "train" else self._tested
        return Samples(*self._workload.samples(split, count))


@dataclass(frozen=True, repr=False)
class Windows(Partitioner):
    """Every client owns a window on the pool."""

    workload: Workload

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
        return [np.arange(w.start, w.stop) for w in map(self.workload.owned, range(clients))]


class Pace(Callback):
    """Calls `between` before a round, when all work on the round before is done; None ends the run.

    Args:
        between: the number of rounds to run until it is called again, or None.
    """

    def __init__(self, between: Callable[[], int | None]) -> None:
        self._between = between
        self._left = 0

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._left == 0:
            rounds = self._between()
            trainer.should_stop = rounds is None
            self._left = rounds or 1
        self._left -= 1


def build(
    workload: Workload,
    folder: str,
    callback: Callback,
    *,
    ranks: int = 1,
    device: str = "cpu",
    precision: Precision = "32",
    **settings: Any,
) -> tuple[FederatedTrainer, Federation, FederatedDataModule]:
    """A run of the workload, ready to fit.

    Args:
        workload: what is trained.
        folder: for the run folder.
        callback: ends the run.
        ranks: processes.
        device: cpu or cuda.
        precision: of the Trainer.
        **settings: of the Federation, beyond the workload's.
    """
    sampled = {} if workload.method == "DisPFL" else {"clients_per_round": workload.per_round}
    federation = Federation(
        _algorithm(workload),
        _groups(workload),
        optimizer=partial(torch.optim.SGD, lr=LEARNING_RATE),
        local_epochs=workload.epochs,
        evaluate=(),
        export=(),
        seed=SEED,
        **sampled,
        **settings,
    )
    data = FederatedDataModule(
        Pool(workload),
        Windows(workload),
        batch_size=workload.batch,
        channels_last="auto" if device == "cpu" else True,
    )
    trainer = FederatedTrainer(
        name=workload.name,
        max_epochs=ENDLESS,
        accelerator="cpu" if device == "cpu" else "gpu",
        devices=ranks,
        precision=precision,
        callbacks=callback,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    return trainer, federation, data


def _algorithm(workload: Workload) -> Algorithm:
    if workload.method == "HeteroFL":
        return HeteroFL()
    if workload.method == "DisPFL":
        return DisPFL(
            TimeVarying(NEIGHBOURS), DENSITY, prune_rate=PRUNE_RATE, regrow="gradient",
            rounds=COSINE_ROUNDS,
        )  # fmt: skip
    return FedAvg()


def _groups(workload: Workload) -> list[ClientGroup]:
    if workload.method != "HeteroFL":
        return [ClientGroup(workload.clients, workload.network)]
    count = workload.clients // len(LEVELS)
    levels: Any = LEVELS
    return [ClientGroup(count, workload.network, level=level) for level in levels]


class Run:
    """The state of a run, as `bare.Bare` shows it."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation

    def models(self) -> list[list[Tensor]]:
        """The parameters of the server's model, or those of every client where there is none."""
        fleet, algorithm = self._federation.fleet, self._federation.algorithm
        if isinstance(algorithm, DisPFL):
            layout = fleet.groups[0].layout
            rows = [fleet.row(client) for client in range(fleet.clients)]
        else:
            assert isinstance(algorithm, FedAvg | HeteroFL)
            layout, rows = algorithm.model.layout, [algorithm.model.row]
        views = [layout.floats.views(row.floats).values() for row in rows]
        return [list(each)[: layout.parameters] for each in views]
