"""What a client tests as its own, and when: each figure against one computed by hand."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.algorithms.fedbcd.fedbcdi import FedBCDI
from lightfed.algorithms.flexifed.strategies import ClusteredFL
from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.algorithms.peers.dpsgd import DPSGD
from lightfed.algorithms.pfedmoe.fedapen import FedAPEN
from lightfed.algorithms.pfedmoe.fml import FML
from lightfed.algorithms.pfedmoe.pfedmoe import PFedMoE
from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.topology.topology import Full
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.algorithm import Algorithm
from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import Moment
from lightfed.local.local_work import RoundPlan
from lightfed.networks.layers import Scaler
from lightfed.networks.mlp import MLP
from lightfed.trainer import FederatedTrainer
from tests.core.engine.spy import data, evaluated, federation, two_labels_each
from tests.small import fit, fleet_of, module_of, random_data, row_held, run_round, state_dict
from tests.tiers import by_default

SIZES = [10, 6, 12, 7]
mlp = partial(MLP, hidden=(8,), dropout=0.3)


class Slim(nn.Module):
    """Linear, Scaler, BatchNorm, ReLU, linear; the hidden units of its rate."""

    def __init__(self, num_classes: int = 3, rate: float = 1.0) -> None:
        super().__init__()
        width = int(8 * rate)
        self.layers = nn.Sequential(
            nn.Linear(4, width), Scaler(rate), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, num_classes),
        )  # fmt: skip

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def whole(batches: Any) -> tuple[Tensor, Tensor]:
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)


def by_hand(
    weights: dict[str, Tensor], source: FederatedDataModule, client: int, seen: Tensor, scale: float
) -> tuple[float, float]:
    """Accuracy and loss of `Slim` on a client's test split; batch norm by what `seen` says."""

    def hidden(x: Tensor) -> Tensor:
        return F.linear(x, weights["layers.0.weight"], weights["layers.0.bias"]) / scale

    variance, mean = torch.var_mean(hidden(seen), 0)
    x, y = whole(source.test_batches(client))
    normed = (hidden(x) - mean) / (variance + 1e-5).sqrt()
    normed = F.relu(normed * weights["layers.2.weight"] + weights["layers.2.bias"])
    logits = F.linear(normed, weights["layers.4.weight"], weights["layers.4.bias"])
    absent = torch.ones(3, dtype=torch.bool)
    absent[source.labels(client)] = False
    logits = logits.masked_fill(absent, 0.0)
    return float((logits.argmax(1) == y).float().mean()), float(F.cross_entropy(logits, y))


def test_the_global_model_on_a_clients_data_is_not_the_slice_that_it_holds() -> None:
    source = two_labels_each()
    groups = [ClientGroup(1, Slim, rate=1.0), ClientGroup(2, Slim, rate=0.25)]
    optimizer = partial(SGD, lr=0.3)
    fed = fleet_of(groups, HeteroFL(), source, optimizer=optimizer, epochs=4)
    for t in range(3):
        run_round(fed, t)
    evaluation = evaluated(fed, kinds=("personal", "local"))
    _, reports = evaluation.finish()
    algorithm: Any = fed.algorithm
    server = state_dict(algorithm.model.layout, algorithm.model.row)
    union = torch.cat([whole(source.batches(source.client_plan(k, 50)))[0] for k in range(3)])
    for client in range(3):
        own = state_dict(*row_held(fed, client))
        seen, _ = whole(source.batches(source.client_plan(client, 50)))
        scale = (1.0, 0.25, 0.25)[client]
        held = by_hand(own, source, client, seen, scale)
        shared = by_hand(server, source, client, union, 1.0)
        assert figures(reports["personal"][client]) == pytest.approx(held, abs=1e-5)
        assert figures(reports["local"][client]) == pytest.approx(shared, abs=1e-5)
        assert held[1] != pytest.approx(shared[1], abs=1e-2)


def figures(report: Any) -> tuple[float, float]:
    return report.metrics["accuracy"], report.metrics["loss"]


@pytest.mark.parametrize("make", [FedAvg, partial(LGFedAvg, 1), partial(FedAvg, buffers="local")])
def test_a_client_is_tested_as_its_session_left_it(make: Callable[[], Algorithm]) -> None:
    """By rows that are still there when the round is over."""
    source = random_data(SIZES, batch_size=4)
    fed = fleet_of([ClientGroup(4, mlp)], make(), source, optimizer=partial(SGD, lr=0.3))
    run_round(fed, 0)
    fed.plan = RoundPlan(tested={"trained": range(4)})
    run_round(fed, 1)
    kinds = ("personal", "aggregated") if make is FedAvg else ("personal",)
    _, reports = evaluated(fed, kinds=kinds, at="trained").finish(fed.tests)
    for client in range(4):
        x, y = whole(source.test_batches(client))
        loss = F.cross_entropy(fed.bind(client).eval()(x), y)
        assert reports["personal"][client].metrics["loss"] == pytest.approx(float(loss.detach()))
        if make is FedAvg:
            merged = F.cross_entropy(module_of(fed, None).eval()(x), y).detach()
            assert reports["aggregated"][client].metrics["loss"] == pytest.approx(float(merged))


def test_a_private_part_is_tested_with_the_servers_shared_network() -> None:
    source = random_data(SIZES, batch_size=4)
    plain = partial(MLP, hidden=(8,))
    algorithm = PFedMoE(plain, gate_units=4)
    fed = fleet_of([ClientGroup(4, plain)], algorithm, source, optimizer=partial(SGD, lr=0.3))
    run_round(fed, 0)
    rows = [fed.row(k).floats.clone() for k in range(4)]
    _, reports = evaluated(fed, kinds=("personal", "aggregated")).finish()
    assert all(torch.equal(fed.row(k).floats, rows[k]) for k in range(4))
    for client in range(4):
        x, y = whole(source.test_batches(client))
        own = float(F.cross_entropy(fed.bind(client).eval()(x), y).detach())
        fed.load(algorithm.model, client)
        merged = float(F.cross_entropy(fed.bind(client).eval()(x), y).detach())
        assert reports["personal"][client].metrics["loss"] == pytest.approx(own)
        assert reports["aggregated"][client].metrics["loss"] == pytest.approx(merged)
        assert own != pytest.approx(merged, abs=1e-4)


MAKE: dict[str, tuple[Callable[[], Algorithm], Moment, set[str]]] = {
    # algorithm, the moment of its paper, the columns beside personal by default
    "fedavg": (FedAvg, "aggregated", {"global"}),
    "fedbcd": (partial(FedBCD, 2, 1), "aggregated", {"global", "local"}),
    "fedbcdi": (partial(FedBCDI, 2, 1, 2), "aggregated", {"global", "local"}),
    "flexifed": (ClusteredFL, "aggregated", {"trained"}),
    "dpsgd": (partial(DPSGD, Full()), "trained", {"aggregated"}),
    "pfedmoe": (partial(PFedMoE, partial(MLP, hidden=(6,)), gate_units=4), "trained", set()),
    "pfedmoe_alone": (
        partial(PFedMoE, partial(MLP, hidden=(6,)), gate_units=4, federate=False),
        "trained",
        set(),
    ),
    "fml": (partial(FML, mlp), "trained", set()),
    "fedapen": (partial(FedAPEN, mlp, hold_out=0.2), "trained", set()),
    "fedapen_released": (
        partial(FedAPEN, mlp, hold_out=0.2, learn="aggregated"),
        "aggregated",
        set(),
    ),
    "standalone": (Standalone, "trained", set()),
}


QUICK = ("fedavg", "fedbcd", "flexifed", "dpsgd", "pfedmoe", "fml", "fedapen_released")
UNCHANGED = {"fedbcd", "fml", "pfedmoe_alone", "standalone"}  # by an aggregation


@pytest.mark.parametrize("name", by_default(MAKE, *QUICK))
def test_every_algorithm_tests_at_the_moment_that_is_asked_for(name: str, tmp_path: Path) -> None:
    make, at, others = MAKE[name]
    found = {}
    for moment in (None, "trained", "aggregated"):
        settings: dict[str, Any] = {"fraction": 1.0, "evaluate_at": moment}
        model, source = federation(algorithm=make(), **settings), data()
        source.last_batch = "join"  # a gate normalises batches
        trainer = fit(model, source, tmp_path / str(moment), rounds=2)
        found[moment] = {k: float(v) for k, v in trainer.callback_metrics.items() if "/" in k}
    kinds = {name.split("/")[0] for name in found[None]}
    assert kinds == {"personal"} | others
    default, other = found[at], found["trained" if at == "aggregated" else "aggregated"]
    assert found[None] == default
    assert (default["personal/loss"] == other["personal/loss"]) == (name in UNCHANGED)
    for moment in {"trained", "aggregated"} & others:
        assert default[f"{moment}/loss"] == other["personal/loss"]


def test_sessions_are_tested_by_a_run_and_shown_by_validate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From the checkpoint; without one there was no session."""
    model = federation(evaluate_at="trained")
    trainer = fit(model, data(), tmp_path / "fitted")
    figure = float(trainer.callback_metrics["personal/loss"])
    again = federation(evaluate_at="trained")
    other = FederatedTrainer(accelerator="cpu", enable_progress_bar=False, logger=False)
    kept = str(tmp_path / "fitted" / "run" / "checkpoints" / "last.ckpt")
    other.validate(again, datamodule=data(), ckpt_path=kept, verbose=False)
    assert other.callback_metrics["personal/loss"].item() == figure
    assert "evaluate_at" not in caplog.text
    assert "ckpt_path" not in caplog.text
    fresh = FederatedTrainer(accelerator="cpu", enable_progress_bar=False, logger=False)
    fresh.validate(federation(evaluate_at="trained"), datamodule=data(), verbose=False)
    assert "global/loss" in fresh.callback_metrics
    assert "personal/loss" not in fresh.callback_metrics
    assert "evaluate_at" in caplog.text
    assert "no model has been trained" in caplog.text
