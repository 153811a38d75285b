"""SCAFFOLD against recorded runs of NIID-Bench and PFLlib, its first round, and its refusals."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, RMSprop

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fednova import FedNova
from lightfed.algorithms.scaffold import SCAFFOLD
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import RoundPlan
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.algorithms.recorded import Recorded, close
from tests.small import fleet_of, random_data, run_round


@pytest.mark.parametrize(
    "name", ["mlp_uniform", "conv_uniform", "mlp_samples_momentum", "mlp_server_lr"]
)
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = SCAFFOLD()
    run = Recorded("scaffold", name, algorithm)
    algorithm.server_lr = run.about["server_lr"]
    algorithm.weights = run.about["model_average"]
    algorithm.momentum = run.about["optimizer"]["momentum"]
    for t, clients in run.rounds(monkeypatch):
        close(algorithm.model.floats, run.row(f"r{t}/server"))
        close(algorithm.c, run.row(f"r{t}/c_server"))
        for client in clients:
            close(algorithm.controls[client], run.row(f"r{t}/c_local/{client}"))


def test_the_first_round_is_that_of_fedavg() -> None:
    def trained(algorithm: SCAFFOLD | FedAvg) -> tuple[Tensor, Tensor]:
        """Return the server's model after the first and after the second round."""
        group = ClientGroup(3, partial(MLP, hidden=(6,)))
        data = random_data([5, 9, 4])
        fed = fleet_of([group], algorithm, data, optimizer=partial(SGD, lr=0.1), epochs=2)
        fed.plan = RoundPlan(lr=0.1)
        run_round(fed, 0)
        first = algorithm.model.floats.clone()
        run_round(fed, 1)
        return first, algorithm.model.floats

    first, second = trained(SCAFFOLD())
    fedavg_first, fedavg_second = trained(FedAvg("uniform"))
    torch.testing.assert_close(first, fedavg_first)  # control variates start at 0
    assert not torch.allclose(second, fedavg_second, atol=1e-4)


@pytest.mark.parametrize("wrong", [{"server_lr": 0.0}, {"momentum": 1.0}])
def test_wrong_steps_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=rf"init_args\.{next(iter(wrong))}"):
        SCAFFOLD(**wrong)  # type: ignore[arg-type]


def two_rates(parameters: Any) -> SGD:
    first, *others = parameters
    return SGD([{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.2}])


@pytest.mark.parametrize("optimizer", [partial(Adam, lr=0.1), partial(RMSprop, lr=0.1), two_rates])
@pytest.mark.parametrize("algorithm", [SCAFFOLD, partial(FedNova, 0.1)])
def test_an_optimizer_whose_updates_are_no_mean_gradients_is_refused(
    algorithm: Any, optimizer: Any
) -> None:
    fed = fleet_of([ClientGroup(2, MLP)], algorithm(), random_data([4, 4]), optimizer=optimizer)
    fed.plan = RoundPlan(lr=0.1)
    with pytest.raises(UserError, match=r"model\.optimizer"):
        run_round(fed, 0)


def test_a_rate_that_is_not_known_is_refused() -> None:
    fed = fleet_of([ClientGroup(2, MLP)], SCAFFOLD(), random_data([4, 4]))
    with pytest.raises(UserError, match=r"model\.optimizer"):
        run_round(fed, 0)
