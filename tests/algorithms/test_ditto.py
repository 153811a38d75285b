"""Ditto against recorded runs of its released code and PFLlib, and without a pull."""

from functools import partial

import pytest
import torch
from torch.optim import SGD

from lightfed.algorithms.ditto import Ditto
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
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
    def clients_of(algorithm: Algorithm) -> Fleet:
        return fleet_of(
            [ClientGroup(3, partial(MLP, hidden=(6,)))],
            algorithm,
            random_data([5, 9, 4]),
            optimizer=partial(SGD, lr=0.1),
            clients_per_round=2,
            epochs=2,
        )

    ditto = Ditto(0.0)
    fedavg = FedAvg("uniform")
    of_ditto = clients_of(ditto)
    of_fedavg = clients_of(fedavg)
    alone = clients_of(Standalone())
    for t in range(3):
        run_round(of_ditto, t)
        run_round(of_fedavg, t)
        run_round(alone, t)
        assert torch.equal(ditto.model.floats, fedavg.model.floats)
    for k in range(3):
        assert torch.equal(of_ditto.row(k).floats, alone.row(k).floats)


@pytest.mark.parametrize("wrong", [{"lam": -1.0}, {"epochs": 0}])
def test_wrong_arguments_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=rf"init_args\.{next(iter(wrong))}"):
        Ditto(**wrong)  # type: ignore[arg-type]
