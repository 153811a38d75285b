"""Ditto against recorded runs of its released code and PFLlib, and without a pull."""

from functools import partial

import pytest
import torch
from torch.optim import SGD

from lightfed.algorithms.ditto import Ditto
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.algorithms.recorded import Recorded, close, settings_of
from tests.small import fleet_of, random_data, run_round


@pytest.mark.parametrize("name", ["mlp_full", "mlp_sampled", "mlp_epochs_samples"])
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    about = settings_of("ditto", name)
    weights = "samples" if about["model_average"] == "samples" else "uniform"
    algorithm = Ditto(about["lam"], weights, about.get("personal_epochs"))
    work = {"steps": about["local_iters"]} if "local_iters" in about else {}
    run = Recorded("ditto", name, algorithm, **work)
    for t, clients in run.rounds(monkeypatch):
        close(algorithm.model.floats, run.row(f"r{t}/server"))
        for client in clients:
            close(run.fleet.row(client).floats, run.row(f"r{t}/personal/{client}"))


def test_without_a_pull_clients_are_alone_beside_fedavg() -> None:
    ditto, alone, fedavg = (
        fleet_of(
            [ClientGroup(3, partial(MLP, hidden=(6,)))], algorithm, random_data([5, 9, 4]),
            optimizer=partial(SGD, lr=0.1), clients_per_round=2, epochs=2,
        )
        for algorithm in (Ditto(0.0), Standalone(), FedAvg("uniform"))
    )  # fmt: skip
    for t in range(3):
        for fed in (ditto, alone, fedavg):
            run_round(fed, t)
        assert torch.equal(ditto.algorithm.model.floats, fedavg.algorithm.model.floats)  # type: ignore[union-attr]
    for client in range(3):
        assert torch.equal(ditto.row(client).floats, alone.row(client).floats)


@pytest.mark.parametrize("wrong", [{"lam": -1.0}, {"epochs": 0}])
def test_wrong_arguments_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=rf"init_args\.{next(iter(wrong))}"):
        Ditto(**wrong)  # type: ignore[arg-type]
