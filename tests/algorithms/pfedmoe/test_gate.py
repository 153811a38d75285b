"""The gate's weights in the run folder; batches of one, and classes that nobody holds."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.pfedmoe.fml import FML
from lightfed.algorithms.pfedmoe.mixture import MixtureClient
from lightfed.algorithms.pfedmoe.pfedmoe import PFedMoE
from lightfed.api.algorithm import Algorithm
from lightfed.data.datamodule import FederatedDataModule
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.models.client_module import ClientModule
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.small import data_of, fit, fleet_of, random_data

CLASSES = 3
mlp = partial(MLP, hidden=(5,))
moe = partial(PFedMoE, mlp, gate_units=4)


def federation(algorithm: Algorithm, **settings: Any) -> Federation:
    optimizer = partial(SGD, lr=0.1)
    return Federation(algorithm, [ClientGroup(3, mlp)], optimizer=optimizer, **settings)


def two_classes() -> FederatedDataModule:
    """Every client has two of three classes; it is tested on samples of those."""
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(60) % CLASSES
    x = torch.randn(60, 4, generator=rng) + y[:, None]
    parts = [[i for i in range(60) if y[i] != k and i % 2 == k % 2] for k in range(CLASSES)]
    return data_of(x, y, parts, classes=CLASSES, batch_size=4, eval_batch_size=3)


@pytest.mark.parametrize("store", ["device", "host"])
def test_the_mean_weight_per_client_and_class_is_in_the_run_folder(
    store: Any, tmp_path: Path
) -> None:
    run, data = federation(moe(), store=store), two_classes()
    fit(run, data, tmp_path)
    found = np.load(tmp_path / "run/gate.npz")
    assert int(found["round"]) == 1
    assert found["general"].shape == found["personal"].shape == (3, CLASSES)
    fleet = run.fleet
    rows = (tmp_path / "run/clients.csv").read_text().splitlines()
    column = rows[0].split(",").index("gate_general")
    for client in range(3):
        module = fleet.bind(client).eval()
        assert isinstance(module, ClientModule)
        assert isinstance(module.net, MixtureClient)
        batches = list(data.test_batches(client))
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        with torch.no_grad():
            weights = module.net.gate(x)
        for c in range(CLASSES):
            pair = found["general"][client, c], found["personal"][client, c]
            if c == client:
                assert np.isnan(pair).all()
            else:
                assert pair == pytest.approx(weights[y == c].mean(0).tolist(), abs=1e-6)
        logged = float(rows[client - 3].split(",")[column])
        assert logged == pytest.approx(float(weights[:, 0].mean()), abs=1e-6)
    assert float(np.nanstd(found["general"])) > 1e-4


def test_the_gate_of_a_client_that_has_left_the_rank_is_forgotten() -> None:
    fed = fleet_of([ClientGroup(3, mlp)], moe(), two_classes())
    fed.algorithm.evaluation_start(fed)
    for client in range(3):
        fed.client_sessions.test(client, fed.deployed(client))
    assert not fed.algorithm.evaluation_end(fed)["gate"]["general"].isnan().all()
    fed.algorithm.evaluation_start(fed)
    assert fed.algorithm.evaluation_end(fed)["gate"]["general"].isnan().all()


class Normed(nn.Module):
    """A network that cannot train on a single sample."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, num_classes))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_shared_network_is_given_no_batch_of_one_either(tmp_path: Path) -> None:
    data = random_data([8, 9, 8], batch_size=4)
    with pytest.raises(UserError, match="client 1 trains on a single sample"):
        fit(federation(FML(Normed)), data, tmp_path)
    fit(federation(FML(mlp)), data, tmp_path)
