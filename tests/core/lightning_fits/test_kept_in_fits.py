"""Sessions that are Lightning fits: a client finds the whole state of its optimizer again."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from tests.small import fit, random_data

STEPS: list[int] = []


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.count = 0

    @override
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        STEPS.append(self.count)
        return super().step(closure)


class Client(L.LightningModule):
    """Overrides a hook, so that its sessions are Lightning fits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    @override
    def on_train_start(self) -> None:
        pass

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    @override
    def configure_optimizers(self) -> Counting:
        return Counting(self.parameters())


@pytest.mark.parametrize(("keep", "counts"), [(True, [1, 2, 3]), (False, [1, 1, 1])])
def test_an_attribute_of_an_optimizer_is_its_clients(
    keep: bool, counts: list[int], tmp_path: Path
) -> None:
    STEPS.clear()
    groups = [ClientGroup(1, Client)]
    federation = Federation(FedAvg(), groups, evaluate=[], keep_optimizer=keep)
    fit(federation, random_data([6]), tmp_path, rounds=3, limit_train_batches=1)
    assert counts == STEPS
