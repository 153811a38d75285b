"""Clients tested at the start of their sessions: figures by hand, and nobody else notices."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.peers.dpsgd import DPSGD
from lightfed.algorithms.peers.my1 import My1
from lightfed.algorithms.peers.my2 import My2
from lightfed.algorithms.topology.topology import Full, Ring, TimeVarying
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.engine.evaluation import client_metrics
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import SessionContext
from lightfed.local.local_work import RoundPlan
from lightfed.networks.mlp import MLP
from tests.core.engine.spy import Counting, data, federation
from tests.small import fit, fleet_of, random_data, run_round

SIZES = [10, 6, 12, 7, 9]
mlp = partial(MLP, hidden=(8,), dropout=0.4)


def fleet(algorithm: Algorithm, tested: Any) -> Fleet:
    source = random_data(SIZES, batch_size=4, eval_batch_size=5)
    optimizer = partial(SGD, lr=0.2, momentum=0.9)
    fed = fleet_of([ClientGroup(len(SIZES), mlp)], algorithm, source, optimizer=optimizer)
    fed.plan = RoundPlan(tested={"aggregated": tested})
    return fed


def starting_round(fed: Fleet, t: int) -> dict[str, float]:
    """One round; the figures of the tests before its sessions."""
    run_round(fed, t)
    return client_metrics(fed.tests["aggregated"], "aggregated")


def rows(fed: Fleet) -> Tensor:
    return torch.stack([fed.row(k).floats for k in range(fed.clients)])


def by_hand(fed: Fleet, starts: Tensor) -> list[tuple[float, float]]:
    """Accuracy and loss of every client on its own test split, without dropout."""
    net = MLP(3, (4,), hidden=(8,))
    found = []
    for client, start in enumerate(starts):
        views = list(fed.groups[0].layout.floats.views(start).values())
        for parameter, view in zip(net.parameters(), views, strict=True):
            parameter.data.copy_(view)
        x, y = (torch.cat(parts) for parts in zip(*fed.data.test_batches(client), strict=True))
        logits = net(x).detach()
        hits = (logits.argmax(1) == y).float().mean()
        found.append((float(hits), float(F.cross_entropy(logits, y))))
    return found


def check(metrics: dict[str, float], expected: list[tuple[float, float]]) -> None:
    accuracies, losses = np.array(expected).T
    assert metrics["aggregated/accuracy"] == pytest.approx(accuracies.mean(), abs=1e-6)
    assert metrics["aggregated/accuracy_std"] == pytest.approx(accuracies.std(), abs=1e-6)
    assert metrics["aggregated/accuracy_worst10"] == pytest.approx(accuracies.min(), abs=1e-6)
    assert metrics["aggregated/loss"] == pytest.approx(losses.mean(), rel=1e-5)


def test_without_masks_the_mean_of_the_neighbours_is_tested() -> None:
    fed = fleet(DPSGD(Full()), range(5))
    run_round(fed, 0)
    mean = rows(fed).mean(0)
    check(starting_round(fed, 1), by_hand(fed, mean.expand(5, -1).clone()))


def recording(method: type[DisPFL]) -> type[DisPFL]:
    class Recording(method):  # type: ignore[misc,valid-type]
        """Keeps the rows that sessions start from."""

        @override
        def session_start(self, s: SessionContext) -> None:
            super().session_start(s)
            self.starts = {**getattr(self, "starts", {}), s.client: s.row.floats.clone()}

    return Recording


@pytest.mark.parametrize("method", [DisPFL, My1, My2])
def test_what_is_trained_under_a_mask_is_what_is_tested(method: type[DisPFL]) -> None:
    algorithm: Any = recording(method)(TimeVarying(2), density=0.4, rounds=3)
    fed = fleet(algorithm, range(5))
    for t in range(3):
        metrics = starting_round(fed, t)
        starts = torch.stack([algorithm.starts[k] for k in range(5)])
        check(metrics, by_hand(fed, starts))


@pytest.mark.parametrize("make", [partial(DPSGD, Ring()), partial(My1, Ring(), rounds=3)])
def test_training_does_not_notice(make: Any) -> None:
    """Dropout draws the same, and modules train in training mode."""
    looking, blind = fleet(make(), {0, 3}), fleet(make(), ())
    for t in range(3):
        metrics, others = run_round(looking, t), run_round(blind, t)
        assert [r.client for r in looking.tests["aggregated"]] == [0, 3]
        assert metrics == others
    assert torch.equal(rows(looking), rows(blind))


@pytest.mark.parametrize(
    ("settings", "flags", "tested"),
    [
        ({}, {}, 4), ({"algorithm": DisPFL(Ring(), static=True)}, {}, 4),
        ({"eval_clients": 2}, {}, 2), ({"evaluate": ["global"]}, {}, 0),
        ({}, {"check_val_every_n_epoch": 2}, 4), ({"algorithm": FedAvg()}, {}, 0),
    ],
)  # fmt: skip
def test_the_clients_that_are_evaluated_are_tested_in_rounds_that_are(
    settings: dict[str, Any], flags: dict[str, Any], tested: int, tmp_path: Path
) -> None:
    model = federation(**({"algorithm": DPSGD(Ring()), "fraction": 1.0} | settings))
    trainer = fit(model, data(), tmp_path, **flags)
    starts = [report.client for report in model.fleet.tests.get("aggregated", [])]
    assert len(starts) == tested
    assert set(starts) <= set(model.evaluation.clients)
    assert ("aggregated/accuracy" in trainer.callback_metrics) == (tested > 0)


def test_a_module_of_a_users_own_is_tested_by_its_validation_step() -> None:
    seen: list[bool] = []

    class Seen(Counting):
        @override
        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            seen.append(self.training)
            self.log("log_perplexity", 2.0)

    source = random_data([4, 5])
    fed = fleet_of([ClientGroup(2, Seen)], DPSGD(Ring()), source)
    fed.plan = RoundPlan(tested={"aggregated": {1}})
    metrics = starting_round(fed, 0)
    assert seen == [False]
    assert metrics["aggregated/perplexity"] == pytest.approx(np.exp(2.0))
    assert "aggregated/perplexity_std" not in metrics
