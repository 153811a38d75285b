"""Batches of one sample, which batch normalisation cannot train on, are refused at the start."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.torch_data import FromTorch
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.utils.errors import UserError
from tests.small import Given, fit

SAMPLES = 21
PARTS = range(8), range(8, 17), range(17, 21)  # of 8, 9 and 4: the second has a batch of one


class Steps(L.LightningModule):
    """A step of a user's own, and no forward."""

    def __init__(self, num_classes: int = 3, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), norm(8), nn.ReLU(), nn.Linear(8, 3))
        self.steps = 0

    def parts(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return x, y

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.parts(batch)
        self.steps += 1
        self.log("size", float(len(x)))
        return F.cross_entropy(self.net(x), y)


class Named(Steps):
    """Takes named columns."""

    @override
    def parts(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch["x"], batch["y"]


def data(model: type[Steps], **settings: Any) -> FederatedDataModule:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(SAMPLES) % 3
    if model is Named:
        rows = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
        source = FromTorch(rows, rows[:4])
    else:
        source = FromTorch(TensorDataset(x, y), TensorDataset(x, y), classes=["a", "b", "c"])
    return FederatedDataModule(source, Given(*PARTS), batch_size=4, **settings)


def run(folder: Path, model: type[Steps], norm: Any = nn.BatchNorm1d, **settings: Any) -> Any:
    group = ClientGroup(3, partial(model, norm=norm))
    root = Federation(FedAvg(), [group], optimizer=partial(SGD, lr=0.1), evaluate=())
    trainer = fit(root, data(model, **settings), folder)
    return trainer.results.rounds.iloc[-1], root


@pytest.mark.parametrize("model", [Steps, Named])
def test_a_step_of_a_user_s_own_is_tried(model: type[Steps], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="client 1 trains on a single sample") as error:
        run(tmp_path, model)
    assert error.value.key == "data.last_batch"
    assert "join" in error.value.fix


@pytest.mark.parametrize("model", [Steps, Named])
def test_what_can_train_does(model: type[Steps], tmp_path: Path) -> None:
    joined, _ = run(tmp_path / "joined", model, last_batch="join")
    assert joined["excluded"] == 0
    normed, root = run(tmp_path / "normed", model, nn.LayerNorm)
    assert normed["excluded"] == 0
    # What steps count belongs to their session; the trial, and the step that measures the cost of
    # named columns, left no trace either.
    assert root.fleet.groups[0].module.steps == 0
