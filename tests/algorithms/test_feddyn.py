"""FedDyn against recorded runs of its released code, without regularisation, and refused."""

from functools import partial

import pytest
import torch
from torch.optim import SGD

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.feddyn import FedDyn
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


def test_without_regularisation_sessions_are_those_of_fedavg() -> None:
    """In every round, from the same start; the server adds the memories."""
    algorithms = FedDyn(1e-12), FedAvg("uniform")
    dyn, average = (
        fleet_of(
            [ClientGroup(3, partial(MLP, hidden=(6,)))], algorithm, random_data([5, 9, 4]),
            optimizer=partial(SGD, lr=0.1, momentum=0.9), epochs=2, clients_per_round=2,
        )
        for algorithm in algorithms
    )  # fmt: skip
    for t in range(3):
        algorithms[1].model.floats.copy_(algorithms[0].model.floats)
        run_round(dyn, t)
        run_round(average, t)
        for client in dyn.participants(t):
            torch.testing.assert_close(dyn.row(client).floats, average.row(client).floats)
        theta = algorithms[1].model.parameters_row + algorithms[0].h
        torch.testing.assert_close(algorithms[0].model.parameters_row, theta)


@pytest.mark.parametrize("alpha", [0.0, -1.0])
def test_a_wrong_weight_is_refused(alpha: float) -> None:
    with pytest.raises(UserError, match=r"init_args\.alpha"):
        FedDyn(alpha)


def test_a_server_optimiser_is_refused() -> None:
    step = partial(SGD, lr=1.0)
    with pytest.raises(UserError, match=r"model\.server_optimizer"):
        fleet_of([ClientGroup(2, MLP)], FedDyn(), random_data([4, 4]), server_optimizer=step)
