"""FedBN and FedPer against recorded runs of their released code, and what they refuse."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbn import FedBN
from lightfed.algorithms.fedper import FedPer
from lightfed.algorithms.fedrep import FedRep
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.algorithms.recorded import Recorded, close
from tests.algorithms.test_fedrep import follow, released
from tests.small import fleet_of, random_data


class Normed(nn.Module):
    """Convolutions with batch normalization, ReLU and pooling; the mean over pixels, and fc."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 10, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(10)
        self.fc = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(torch.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.mean((2, 3)))


def test_the_released_run_of_fedbn(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = FedBN()
    run = Recorded("fedbn", "conv_fedbn", algorithm, [ClientGroup(3, Normed)])
    tensors_of = run.fleet.one_layout("").floats.views
    for name in tensors_of(algorithm.model.floats):
        assert (name in run.fleet.personal) == ("bn" in name)

    for t, clients in run.rounds(monkeypatch):
        server = tensors_of(algorithm.model.floats)
        for name, expected in tensors_of(run.row(f"r{t}/server")).items():
            close(server[name], expected)
        for client in clients:
            close(run.fleet.row(client).floats, run.row(f"r{t}/local/{client}"))

    for client in range(3):
        rows = run.fleet.deployed(client)
        with rows.bound(client) as module, torch.no_grad():
            logits = module(run.tensors[f"data/{client}/x"][:4])
        torch.testing.assert_close(logits, run.tensors[f"final/logits/{client}"], rtol=0, atol=5e-6)


def test_fedavg_averages_what_fedbn_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = FedAvg("uniform")
    run = Recorded("fedbn", "conv_fedavg_same_data", algorithm, [ClientGroup(3, Normed)])
    for t, _ in run.rounds(monkeypatch):
        close(algorithm.model.floats, run.row(f"r{t}/server"))


def test_the_released_run_of_fedper(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = FedRep("net.fc3.", head_epochs=0, final_epochs=10, private=False)
    follow(algorithm, Recorded("fedper", "mlp_uniform", algorithm, optimizer=released), monkeypatch)


def test_the_run_of_pfllib(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = FedPer("net.fc3.")
    names = {"fc1": "base.0", "fc2": "base.2", "fc3": "head"}
    follow(algorithm, Recorded("fedper", "mlp_plain_sgd", algorithm, names=names), monkeypatch)


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        (FedBN, "model.clients"),
        (partial(FedRep, "net.other."), "model.algorithm.init_args.head"),
        (partial(FedPer, "net.other."), "model.algorithm.init_args.head"),
    ],
)
def test_a_model_without_a_part_of_its_own_is_refused(algorithm: Any, key: str) -> None:
    groups = [ClientGroup(2, partial(MLP, hidden=(4,)))]
    with pytest.raises(UserError) as error:
        fleet_of(groups, algorithm(), random_data([4, 4]))
    assert error.value.key == key
