"""Server optimizers against recorded runs of FedLab and Flower, on other methods, and refused."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightfed.aggregation.server_optimizers import FedAdagrad, FedAdam, FedYogi
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.lora.flexlora import FlexLoRA
from lightfed.algorithms.peers.dpsgd import DPSGD
from lightfed.algorithms.topology.topology import Ring
from lightfed.local.client_group import ClientGroup
from lightfed.utils.errors import UserError
from tests.algorithms.recorded import Recorded, close
from tests.small import fleet_of, random_data, run_round

KINDS = {"fedadam": FedAdam, "fedyogi": FedYogi, "fedadagrad": FedAdagrad}
CASES = [
    "fedadagrad_flower", "fedadagrad_paper", "fedadam_flower", "fedadam_paper", "fedavgm_flower",
    "fedyogi_flower", "fedyogi_paper_uniform",
]  # fmt: skip


def optimizer_of(name: str, server: dict[str, Any]) -> Any:
    """Return what makes the server's optimizer of a recorded run."""
    if name == "fedavgm_flower":
        return partial(SGD, lr=server["server_learning_rate"], momentum=server["server_momentum"])

    kind = KINDS[name.partition("_")[0]]
    beta_1 = 0.0 if kind is FedAdagrad else 0.9
    return partial(
        kind,
        lr=server["eta"],
        tau=server["tau"],
        betas=(beta_1, 0.99),
        bias_correction=1 if name == "fedadam_flower" else None,
    )


@pytest.mark.parametrize("name", CASES)
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = FedAvg("uniform" if name.endswith("uniform") else "samples")
    run = Recorded("fedopt", name, algorithm)
    run.fleet.server_step.make = optimizer_of(name, run.about["server"])
    for t, _ in run.rounds(monkeypatch):
        close(algorithm.model.floats, run.row(f"r{t}/server"))


def net(features: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def rounds(algorithm: Any, optimizer: Any, count: int = 3) -> Tensor:
    """Run some rounds, and return the server's row."""
    groups = [ClientGroup(3, net)]
    fleet = fleet_of(groups, algorithm, random_data([12, 9, 15]), server_optimizer=optimizer)
    for t in range(count):
        run_round(fleet, t)
    row: Tensor = algorithm.model.floats
    return row


def test_a_step_of_rate_one_is_the_mean() -> None:
    """But for the rounding of x - (x - mean)."""
    plain = rounds(FedAvg(), None)
    stepped = rounds(FedAvg(), partial(SGD, lr=1.0))
    torch.testing.assert_close(stepped, plain, rtol=0, atol=5e-7)


def test_fedadam_without_memory_and_adaptivity_is_the_mean() -> None:
    """x + eta Delta / (|Delta| + tau) is x + Delta where eta = tau is large."""
    plain = rounds(FedAvg(), None)
    stepped = rounds(FedAvg(), partial(FedAdam, lr=1e5, betas=(0.0, 0.0), tau=1e5))
    torch.testing.assert_close(stepped, plain, rtol=0, atol=5e-6)


def test_fedadam_without_memory_and_tau_steps_by_the_sign() -> None:
    """x + eta Delta / |Delta| is x + eta sign(Delta)."""
    algorithm = FedAvg()
    before = rounds(algorithm, None, count=0)
    mean = rounds(FedAvg(), None, count=1)
    stepped = rounds(FedAvg(), partial(FedAdam, lr=0.01, betas=(0.0, 0.0), tau=1e-12), count=1)

    weights = slice(algorithm.model.layout.parameter_size)  # statistics take no step
    delta = (mean - before)[weights]
    step = (stepped - before)[weights]
    moved = delta.abs() > 1e-6
    torch.testing.assert_close(step[moved], 0.01 * delta[moved].sign(), rtol=0, atol=1e-5)


def test_statistics_are_means_and_take_no_step() -> None:
    algorithm = FedAvg()
    rounds(algorithm, partial(SGD, lr=1e-9), count=1)
    plain = FedAvg()
    rounds(plain, None, count=1)
    size = plain.model.layout.parameter_size
    torch.testing.assert_close(algorithm.model.floats[size:], plain.model.floats[size:])
    assert not torch.equal(algorithm.model.floats[:size], plain.model.floats[:size])


@pytest.mark.parametrize("algorithm", [partial(DPSGD, Ring()), FlexLoRA])
def test_a_method_without_a_merged_model_is_refused(algorithm: Any) -> None:
    with pytest.raises(UserError) as error:
        rounds(algorithm(), partial(SGD, lr=1.0))
    assert error.value.key == "model.server_optimizer"


@pytest.mark.parametrize("bad", [{"lr": 0}, {"betas": (0.9, 1.0)}, {"tau": 0}, {"v_init": -1}])
def test_bad_rates_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        FedAdam([nn.Parameter(torch.zeros(1))], **bad)
    assert error.value.key == f"model.server_optimizer.init_args.{next(iter(bad))}"
