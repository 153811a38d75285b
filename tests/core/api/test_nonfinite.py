"""A client whose training breaks is named and left out; the others do not notice."""

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.small import Line, data_of, fit, fleet_of, random_data, run_round, server_row

pytestmark = pytest.mark.usefixtures("unchecked_data")
SIZES = [6, 4, 9, 5]
BROKEN = 2
mlp = partial(MLP, hidden=(6,))


def broken_data(value: float = math.nan, **settings: Any) -> FederatedDataModule:
    """One feature of one sample of one client is not a number."""
    clean = random_data(SIZES, batch_size=3, **settings)
    x, y = clean.dataset.load("train").x, clean.dataset.load("train").y
    test = x.clone(), y
    x[sum(SIZES[:BROKEN]) + 1, 0] = value
    starts = [sum(SIZES[:k]) for k in range(len(SIZES))]
    parts = [range(s, s + n) for s, n in zip(starts, SIZES, strict=True)]
    return data_of(x, y, parts, test=test, batch_size=3)


def rows_of(
    algorithm: Algorithm, groups: list[ClientGroup], *, sampled: bool
) -> tuple[Tensor, dict[str, float]]:
    fleet = fleet_of(
        groups, algorithm, broken_data(), optimizer=partial(SGD, lr=0.1, momentum=0.9),
    )  # fmt: skip
    if not sampled:
        others = [k for k in range(len(SIZES)) if k != BROKEN]
        fleet.participants = lambda t: others  # type: ignore[method-assign]
    for t in range(2):
        metrics = run_round(fleet, t)
    assert isinstance(algorithm, FedAvg | HeteroFL)
    return algorithm.model.floats, metrics


@pytest.mark.parametrize(
    ("algorithm", "groups"),
    [
        (partial(FedAvg, "uniform"), [ClientGroup(4, mlp)]),
        (FedAvg, [ClientGroup(4, mlp)]),
        (HeteroFL, [ClientGroup(2, mlp, level="a"), ClientGroup(2, mlp, level="b")]),
    ],
)
def test_the_others_train_as_if_the_broken_client_had_not_been_drawn(
    algorithm: Any, groups: list[ClientGroup]
) -> None:
    with_it, metrics = rows_of(algorithm(), groups, sampled=True)
    without, others = rows_of(algorithm(), groups, sampled=False)
    assert with_it.isfinite().all()
    assert torch.equal(with_it, without)
    assert (metrics["participants"], metrics["excluded"]) == (4.0, 1.0)
    assert (others["participants"], others["excluded"]) == (3.0, 0.0)
    assert metrics["train_loss"] == others["train_loss"]


@pytest.mark.parametrize("value", [math.nan, 3e38])
def test_a_run_with_a_broken_client_stays_finite_and_names_it(
    value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(FedAvg(), [ClientGroup(4, mlp)], optimizer=partial(SGD, lr=0.1))
    with caplog.at_level(logging.WARNING, logger="lightfed"):
        trainer = fit(federation, broken_data(value), tmp_path, rounds=2)
    assert server_row(federation).isfinite().all()
    assert trainer.callback_metrics["excluded"] == 1.0
    assert all(math.isfinite(v) for v in trainer.callback_metrics.values())
    named = [r.message for r in caplog.records if "not finite" in r.message]
    assert len(named) == 2
    assert all(f"client {BROKEN}" in message for message in named)


def one_a_round(broken: set[int], *, clients: int = 6) -> Fleet:
    """Client t alone takes part in round t; some have data that break their updates."""
    x = torch.ones(clients, 2)
    x[sorted(broken)] = math.nan
    parts = [[k] for k in range(clients)]
    data = data_of(x, torch.arange(clients), parts, classes=clients)
    fleet = fleet_of([ClientGroup(clients, Line)], FedAvg(), data, clients_per_round=1)
    fleet.participants = lambda t: [t]  # type: ignore[method-assign]
    return fleet


def test_a_run_of_one_session_a_round_ends_at_the_one_that_breaks() -> None:
    fleet = one_a_round({2})
    for t in range(2):
        run_round(fleet, t)
    with pytest.raises(UserError, match="1 of 1 sessions of round 2 failed") as error:
        run_round(fleet, 2)
    assert error.value.key == "model.optimizer"
    fleet.max_failed = 1
    assert run_round(fleet, 2)["excluded"] == 1.0
