"""Clients that never train: what they are tested on, by hand, and what they leave untouched."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.apfl import APFL
from lightfed.algorithms.ditto import Ditto
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedper import FedPer
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.engine.evaluation import Evaluation
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import RoundPlan
from lightfed.networks.mlp import MLP
from lightfed.packs.packing import SideBySide
from lightfed.state.client_state import by_client
from lightfed.utils.errors import UserError
from tests.core.engine.spy import evaluated
from tests.promises.conformance.cases import CASES
from tests.small import Line, data_of, fit, fleet_of, random_data, run_round

LR = 0.01
SIZES = (6, 9, 4, 5, 7)
UNSEEN = [1, 3]
SEEN = [0, 2, 4]


def points() -> Any:
    """Return points of clients on lines of unlike slopes, and with offsets."""
    rng = torch.Generator().manual_seed(1)
    bounds = np.cumsum([0, *SIZES])
    parts = [range(start, start + size) for start, size in zip(bounds, SIZES, strict=False)]
    x = torch.randn(sum(SIZES), 2, generator=rng)
    y = torch.zeros(sum(SIZES), dtype=torch.int64)
    for client, part in enumerate(parts):
        y[part] = (2.0 * client + x[part] @ torch.tensor([3.0, -2.0])).round().long().clamp(0, 20)
    return data_of(x, y, parts, classes=21, unseen=UNSEEN)


def samples(fed: Fleet, client: int, *, test: bool) -> tuple[Tensor, Tensor]:
    """Return a client's samples of a split in float64; one batch has them all."""
    data = fed.data
    batches = data.test_batches(client) if test else data.batches(data.client_plan(client, 1000))
    ((x, y),) = batches
    return x.double(), y.double()


def mean_error(fed: Fleet, clients: list[int], models: dict[int, Tensor] | Tensor) -> float:
    """Return the mean over clients of their mean squared errors of x @ w + offset."""
    errors = []
    for client in clients:
        w = models[client] if isinstance(models, dict) else models
        x, y = samples(fed, client, test=True)
        errors.append(float(((line(w, x) - y) ** 2).mean()))
    return float(np.mean(errors))


def line(w: Tensor, x: Tensor) -> Tensor:
    return x @ w[:2] + (w[2] if len(w) > 2 else 0.0)


def gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    inputs = torch.cat([x, torch.ones(len(x), len(w) - 2, dtype=x.dtype)], 1)
    return inputs.T @ (line(w, x) - y)


class Affine(L.LightningModule):
    """y = w x + offset, with the gradient of `Line`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.offset = nn.Parameter(torch.zeros(1))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.offset

    training_step = Line.training_step
    validation_step = Line.validation_step


def fleet(algorithm: Algorithm, model: Any = Line, source: Any = None, **settings: Any) -> Fleet:
    return fleet_of(
        [ClientGroup(len(SIZES), model)],
        algorithm,
        points() if source is None else source,
        optimizer=partial(SGD, lr=LR),
        **settings,
    )


def test_fedavg_by_hand() -> None:
    fed = fleet(FedAvg())
    w = torch.zeros(2, dtype=torch.float64)
    for t in range(3):
        run_round(fed, t)
        trained = {}
        for k in SEEN:
            trained[k] = w - LR * gradient(w, *samples(fed, k, test=False))
        total = sum(SIZES[k] for k in SEEN)
        w = sum((SIZES[k] / total * trained[k] for k in SEEN), torch.zeros(2))
    metrics, reports = evaluated(fed, kinds=("personal",)).finish()

    assert metrics["unseen/error"] == pytest.approx(mean_error(fed, UNSEEN, w), rel=1e-5)
    assert metrics["personal/error"] == pytest.approx(mean_error(fed, SEEN, w), rel=1e-5)
    assert [report.client for report in reports["unseen"]] == UNSEEN
    assert [report.client for report in reports["personal"]] == SEEN
    assert not any(name.startswith("unseen_finetuned") for name in metrics)

    # The gap, and its interval by scipy's own Welch's test.
    of_seen, of_unseen = (
        [report.metrics["error"] for report in reports[kind]] for kind in ("personal", "unseen")
    )
    interval = stats.ttest_ind(of_seen, of_unseen, equal_var=False).confidence_interval()
    gap = metrics["gap/error"]
    assert gap == pytest.approx(metrics["personal/error"] - metrics["unseen/error"])
    assert gap + metrics["gap/error_half"] == pytest.approx(interval.high)


def test_fedper_by_hand() -> None:
    """The offset stays with its client: an unseen one trains it alone, from its initial value."""
    fed = fleet(FedPer("offset"), Affine)
    body = torch.zeros(2, dtype=torch.float64)
    heads = dict.fromkeys(SEEN, torch.zeros(1, dtype=torch.float64))
    for t in range(2):
        run_round(fed, t)
        bodies = {}
        for k in SEEN:
            own = torch.cat([body, heads[k]])
            own -= LR * gradient(own, *samples(fed, k, test=False))
            bodies[k], heads[k] = own[:2], own[2:]
        total = sum(SIZES[k] for k in SEEN)
        body = sum((SIZES[k] / total * bodies[k] for k in SEEN), torch.zeros(2))

    tuned = {}
    for k in UNSEEN:
        w = torch.cat([body, torch.zeros(1)])
        for _ in range(4):
            w[2:] -= LR * gradient(w, *samples(fed, k, test=False))[2:]
        tuned[k] = w
    own = {k: torch.cat([body, heads[k]]) for k in SEEN}

    metrics, _ = evaluated(fed, kinds=("personal",), unseen_epochs=4).finish()
    expected = mean_error(fed, UNSEEN, tuned)
    assert metrics["unseen_finetuned/error"] == pytest.approx(expected, rel=1e-5)
    assert metrics["personal/error"] == pytest.approx(mean_error(fed, SEEN, own), rel=1e-5)
    difference = metrics["personal/error"] - metrics["unseen_finetuned/error"]
    assert metrics["gap/error"] == pytest.approx(difference)
    assert "unseen/error" not in metrics  # the server has no offset


def test_ditto_by_hand() -> None:
    """A personal model starts from w, and is pulled to it."""
    lam = 2.0
    fed = fleet(Ditto(lam))
    for t in range(2):
        run_round(fed, t)
    w = fed.algorithm.model.floats[:2].double()  # type: ignore[union-attr, operator]
    tuned = {}
    for k in UNSEEN:
        v = w.clone()
        for _ in range(3):
            v = v - LR * (gradient(v, *samples(fed, k, test=False)) + lam * (v - w))
        tuned[k] = v
    metrics, _ = evaluated(fed, kinds=("global", "personal"), unseen_epochs=3).finish()
    assert metrics["unseen/error"] == pytest.approx(mean_error(fed, UNSEEN, w), rel=1e-5)
    expected = mean_error(fed, UNSEEN, tuned)
    assert metrics["unseen_finetuned/error"] == pytest.approx(expected, rel=1e-5)


def test_apfl_by_hand() -> None:
    """v starts from w and learns alone, as the share alpha of a mixture with w."""
    fed = fleet(APFL(0.25, adaptive=True), nn_of_three, classified())
    fed.plan = RoundPlan(lr=LR)
    run_round(fed, 0)
    metrics, _ = evaluated(fed, kinds=("personal",), unseen_epochs=5).finish()

    tensors = fed.algorithm.model.layout.floats.views(  # type: ignore[union-attr]
        fed.algorithm.model.floats  # type: ignore[arg-type, union-attr]
    )
    weight, bias = (tensors[name].double() for name in tensors)
    of_w, of_mixture = [], []
    for k in UNSEEN:
        v = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        optimizer = SGD(v, lr=LR)
        x, y = samples(fed, k, test=False)
        for _ in range(5):
            optimizer.zero_grad()
            mixed = 0.25 * F.linear(x, *v) + 0.75 * F.linear(x, weight, bias)
            F.cross_entropy(mixed, y.long()).backward()
            optimizer.step()
        x, y = samples(fed, k, test=True)
        mixed = 0.25 * F.linear(x, *v) + 0.75 * F.linear(x, weight, bias)
        of_mixture.append(float(F.cross_entropy(mixed, y.long()).detach()))
        of_w.append(float(F.cross_entropy(F.linear(x, weight, bias), y.long())))
    assert metrics["unseen/loss"] == pytest.approx(np.mean(of_w), rel=1e-5)
    assert metrics["unseen_finetuned/loss"] == pytest.approx(np.mean(of_mixture), rel=1e-5)


def nn_of_three(num_classes: int = 3) -> nn.Module:
    return nn.Linear(4, num_classes)


def classified(**settings: Any) -> Any:
    return random_data(SIZES, **({"unseen": UNSEEN} | settings))


def test_rounds_are_those_of_a_federation_without_them() -> None:
    """Five clients, of which two never train, against the other three alone."""
    x_and_y = random_data(SIZES, batch_size=4)
    bounds = np.cumsum([0, *SIZES])
    parts = [range(bounds[k], bounds[k + 1]) for k in SEEN]
    train = x_and_y.dataset.load("train")
    alone = data_of(train.x, train.y, parts, classes=3)

    def trained(source: Any, count: int) -> Tensor:
        fed = fleet_of([ClientGroup(count, mlp)], FedAvg(), source, optimizer=partial(SGD, lr=0.1))
        run_round(fed, 0)
        return fed.algorithm.model.floats  # type: ignore[return-value, union-attr]

    torch.testing.assert_close(trained(classified(), 5), trained(alone, 3))


mlp = partial(MLP, hidden=(8,))


def test_only_seen_clients_are_drawn_and_the_fraction_is_of_them() -> None:
    fed = fleet_of([ClientGroup(5, mlp)], FedAvg(), classified(), fraction=0.5)
    drawn = [fed.participants(t) for t in range(12)]
    assert {len(clients) for clients in drawn} == {2}
    assert {client for clients in drawn for client in clients} == set(SEEN)


@pytest.mark.parametrize("side_by_side", [3, 8])
def test_packs_test_them_as_one_after_the_other(side_by_side: SideBySide) -> None:
    def metrics_of(side_by_side: SideBySide, algorithm: Algorithm) -> dict[str, float]:
        source = random_data([6] * 20, unseen=list(range(0, 20, 2)), validation=0.3)
        fed = fleet_of([ClientGroup(20, mlp)], algorithm, source, side_by_side=side_by_side)
        run_round(fed, 0)
        return evaluated(fed, kinds=("personal",)).finish()[0]

    for make in (FedAvg, partial(FedPer, "net.layers.3")):
        expected = metrics_of("off", make())
        assert metrics_of(side_by_side, make()) == pytest.approx(expected, rel=1e-4)
        assert any(name.startswith("validation/gap/") for name in expected)


def test_finetuning_of_the_servers_model_is_measured_on_them_too() -> None:
    fed = fleet_of([ClientGroup(5, mlp)], FedAvg(), classified())
    run_round(fed, 0)
    metrics, reports = evaluated(fed, kinds=("finetuned",), unseen_epochs=2).finish()
    assert [report.client for report in reports["unseen_finetuned"]] == UNSEEN
    difference = metrics["finetuned/loss"] - metrics["unseen_finetuned/loss"]
    assert metrics["gap/loss"] == pytest.approx(difference)


def case_fleet(name: str) -> Fleet:
    case = CASES[name]
    source = case.data()
    source.unseen = [1, case.clients - 1]
    settings = {"optimizer": partial(SGD, lr=0.1, momentum=0.9)} | case.federation
    work = {"fraction": settings.get("fraction", 0.4)}
    made = fleet_of(
        case.groups(),
        case.algorithm(),
        source,
        optimizer=settings["optimizer"],
        host_rows=settings.get("store") == "host",
        **work,
    )
    made.plan = RoundPlan(lr=0.1)
    return made


OWN = (
    "apfl_adaptive", "ditto", "fedapen", "fedapen_aggregated", "fedbn", "fedper", "fedgh", "fedkd",
    "fedmrl", "feddpa", "fedsalora", "fedrep", "fml", "lgfedavg", "lgfedavg_heads", "pfedmoe",
)  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_an_evaluation_of_clients_with_parts_of_their_own_leaves_nothing_behind(name: str) -> None:
    fed = case_fleet(name)
    run_round(fed, 0)
    before = state_of(fed)
    first = evaluated(fed, kinds=("personal",), unseen_epochs=1).finish()[0]
    again = evaluated(fed, kinds=("personal",), unseen_epochs=1).finish()[0]
    assert first == again
    assert 0 < first["unseen_finetuned/loss"] < 20
    assert state_of(fed) == before


SERVED = ("fedavg", "scaffold", "feddyn", "heterofl", "fjord", "depthfl", "moon", "flora")


@pytest.mark.parametrize("name", SERVED)
def test_clients_get_the_servers_model(name: str) -> None:
    fed = case_fleet(name)
    run_round(fed, 0)
    metrics, reports = evaluated(fed, kinds=("personal",)).finish()
    assert len(reports["unseen"]) == 2
    assert 0 < metrics["unseen/loss"] < 20
    assert "unseen_finetuned/loss" not in metrics


def state_of(fed: Fleet) -> dict[str, Any]:
    """Return the server's state, and what the clients keep."""
    server = {name: value.tolist() for name, value in fed.algorithm.state_dict().items()}
    rows = {}
    for client, row in by_client(fed.states() or {}).items():
        rows[client] = [values.tolist() for values in row.values()]
    return {"server": server, "rows": rows, "bytes": fed.ledger.totals.tolist()}


REFUSED = (
    "standalone", "dispfl", "dpsgd", "my1", "my2", "flexifed_max", "fd", "fedproto", "fedtgp",
    "pfedme", "fedbuff", "fedbcd", "fedbcdi", "cloud_fedprox", "fedavg_local_statistics",
)  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_methods_with_nothing_for_a_client_they_never_met_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"data\.unseen: given, and ") as refusal:
        case_fleet(name)
    assert "\n" not in str(refusal.value)


class Everyone(FedAvg):
    """A method that does not ask who takes part."""

    @override
    def round(self, fed: Fleet, t: int) -> None:
        fed.send(self.model, list(range(fed.clients)))


def test_a_method_that_trains_an_unseen_client_is_refused() -> None:
    fed = fleet(Everyone())
    with pytest.raises(UserError, match=r"data\.unseen: client 1 is unseen, and Everyone sends"):
        run_round(fed, 0)


def test_epochs_without_effect_are_refused() -> None:
    fed = fleet(FedAvg())
    with pytest.raises(UserError, match=r"model\.unseen_epochs: 2, and clients of FedAvg have"):
        Evaluation(fed, fed.data, kinds=("personal",), unseen_epochs=2)
    seen = fleet_of([ClientGroup(5, mlp)], FedAvg(), random_data(SIZES))
    with pytest.raises(UserError, match=r"model\.unseen_epochs: 2, and no client is unseen"):
        Evaluation(seen, seen.data, kinds=("personal",), unseen_epochs=2)
    with pytest.raises(UserError, match=r"model\.unseen_epochs: 0; give at least 1"):
        Federation(FedAvg(), [ClientGroup(5, mlp)], unseen_epochs=0)


def test_more_participants_than_seen_clients_are_refused() -> None:
    with pytest.raises(UserError, match=r"model\.clients_per_round: 4 of 3 clients that are not"):
        fleet(FedAvg(), clients_per_round=4)


def test_a_run_writes_columns_of_them(tmp_path: Path) -> None:
    federation = Federation(
        FedPer("net.layers.3"), [ClientGroup(5, mlp)], optimizer=partial(SGD, lr=0.1),
        unseen_epochs=2, export=("clients",),
    )  # fmt: skip
    fit(federation, classified(), tmp_path, rounds=2)
    rounds = pd.read_csv(tmp_path / "run" / "metrics.csv")
    clients = pd.read_csv(tmp_path / "run" / "clients.csv")
    last = clients[clients["round"] == 2].set_index("client")
    assert last.index.tolist() == [0, 1, 2, 3, 4]
    assert last["accuracy"].notna().tolist() == [True, False, True, False, True]
    assert last["unseen_finetuned/accuracy"].isna().tolist() == [True, False, True, False, True]
    assert (last.loc[UNSEEN, ["bytes_up", "bytes_down", "flops"]] == 0).all(axis=None)
    expected = last["unseen_finetuned/accuracy"].mean()
    assert rounds["unseen_finetuned/accuracy"].iloc[-1] == pytest.approx(expected)
    gap = last["accuracy"].mean() - expected
    assert rounds["gap/accuracy"].iloc[-1] == pytest.approx(gap)
    written = sorted(path.name for path in (tmp_path / "run" / "models").glob("client*"))
    assert written == ["client0.safetensors", "client2.safetensors", "client4.safetensors"]
    with pytest.raises(UserError, match="client 1, which is unseen"):
        federation.fleet.deployed(1)
