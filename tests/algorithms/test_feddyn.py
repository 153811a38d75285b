"""FedDyn against recorded runs of its released code, without regularisation, and refused."""

from functools import partial

import pytest
import torch
from torch.optim import SGD

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.feddyn import FedDyn
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.algorithms.recorded import Recorded, close, settings_of
from tests.small import fleet_of, random_data, run_round


@pytest.mark.parametrize("name", ["mlp_full", "mlp_sampled"])
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = FedDyn(settings_of("feddyn", name)["alpha"])
    run = Recorded("feddyn", name, algorithm)
    for t, clients in run.rounds(monkeypatch):
        close(algorithm.model.floats, run.row(f"r{t}/server"))
        close(algorithm.model.floats - algorithm.h, run.row(f"r{t}/average"))
        for client in clients:
            close(run.fleet.row(client).floats, run.row(f"r{t}/local/{client}"))
        for client in range(run.fleet.clients):
            g = algorithm.local_penalty.memories.get(client, torch.zeros_like(algorithm.h))
            close(g, run.row(f"r{t}/h_local/{client}"))


def test_without_regularization_sessions_are_those_of_fedavg() -> None:
    """In every round, from the same start; the server adds the memories."""

    def clients_of(algorithm: FedDyn | FedAvg) -> Fleet:
        return fleet_of(
            [ClientGroup(3, partial(MLP, hidden=(6,)))],
            algorithm,
            random_data([5, 9, 4]),
            optimizer=partial(SGD, lr=0.1, momentum=0.9),
            epochs=2,
            clients_per_round=2,
        )

    feddyn = FedDyn(1e-12)
    fedavg = FedAvg("uniform")
    of_feddyn = clients_of(feddyn)
    of_fedavg = clients_of(fedavg)
    for t in range(3):
        fedavg.model.floats.copy_(feddyn.model.floats)
        run_round(of_feddyn, t)
        run_round(of_fedavg, t)
        for k in of_feddyn.participants(t):
            torch.testing.assert_close(of_feddyn.row(k).floats, of_fedavg.row(k).floats)
        theta = fedavg.model.parameters_row + feddyn.h
        torch.testing.assert_close(feddyn.model.parameters_row, theta)


@pytest.mark.parametrize("alpha", [0.0, -1.0])
def test_a_wrong_weight_is_refused(alpha: float) -> None:
    with pytest.raises(UserError, match=r"init_args\.alpha"):
        FedDyn(alpha)


def test_a_server_optimizer_is_refused() -> None:
    step = partial(SGD, lr=1.0)
    with pytest.raises(UserError, match=r"model\.server_optimizer"):
        fleet_of([ClientGroup(2, MLP)], FedDyn(), random_data([4, 4]), server_optimizer=step)
