"""MOON against recorded runs of its released code, its pool, as FedAvg, and refused."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.moon import MOON, Contrast
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.algorithms.recorded import Recorded, close, settings_of
from tests.small import Line, fleet_of, random_data, run_round

mlp = partial(MLP, hidden=(6,))


class Projected(nn.Module):
    """A hidden layer, a projection of two layers, and the classifier on it."""

    def __init__(self, features: int, hidden: int, projection: int, classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.l1 = nn.Linear(hidden, hidden)
        self.l2 = nn.Linear(hidden, projection)
        self.l3 = nn.Linear(projection, classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.l1(x))
        return self.l3(self.l2(x))


@pytest.mark.parametrize("name", ["mlp_full", "mlp_sampled_buffer2"])
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    about = settings_of("moon", name)
    algorithm = MOON(about["mu"], about["temperature"], about["model_buffer_size"])
    sizes = [about["model"][size] for size in ("input", "hidden", "projection", "classes")]
    group = ClientGroup(len(about["batches"]), partial(Projected, *sizes))
    names = {"extractor.fc1": "fc1", "extractor.l1": "l1", "extractor.l2": "l2", "head": "l3"}
    run = Recorded("moon", name, algorithm, [group], names=names)
    for t, clients in run.rounds(monkeypatch):
        close(algorithm.model.floats, run.row(f"r{t}/server"))
        for client in clients:
            close(run.fleet.row(client).floats, run.row(f"r{t}/local/{client}"))
        net: Any = run.fleet.groups[0].module.net
        assert net.models == 1 + about["rounds"][t]["pool_size"]


def fleet(algorithm: Any, model: Any = mlp, **settings: Any) -> Fleet:
    optimizer = partial(SGD, lr=0.1, momentum=0.9)
    data = random_data([5, 9, 4])
    groups = [ClientGroup(3, model)]
    return fleet_of(groups, algorithm, data, optimizer=optimizer, epochs=2, **settings)


@pytest.mark.parametrize("mu", [0.0, 1.0])
def test_the_first_round_is_that_of_fedavg(mu: float) -> None:
    """Without weight all rounds are."""

    def trained(algorithm: FedAvg) -> tuple[Tensor, Tensor]:
        """Return the server's model after the first and after the second round."""
        fed = fleet(algorithm)
        run_round(fed, 0)
        first = algorithm.model.floats.clone()
        run_round(fed, 1)
        return first, algorithm.model.floats

    first, second = trained(MOON(mu))
    fedavg_first, fedavg_second = trained(FedAvg())
    torch.testing.assert_close(first, fedavg_first)
    second_is_fedavgs = torch.allclose(second, fedavg_second, atol=1e-5)
    assert second_is_fedavgs == (mu == 0)


def test_a_client_that_trains_late_has_held_its_initial_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the released code, whose pool has the models of all clients after every round."""
    algorithm = MOON(pool=2)
    fed = fleet(algorithm)
    participants = [[1, 2], [0]]
    monkeypatch.setattr(fed, "participants", lambda t: participants[t])
    net: Any = fed.groups[0].module.net

    run_round(fed, 0)
    assert net.models == 1  # the received model: there is no contrast
    run_round(fed, 1)  # client 0, for the first time: one round has gone by
    _, previous = net.frozen_tensors()
    name = next(iter(previous))  # some tensor of the extractor

    def tensor_of(row: Tensor) -> Tensor:
        return fed.groups[0].layout.floats.views(row)[f"net.extractor.{name}"]

    initial = tensor_of(fed.groups[0].initial.floats)
    trained = tensor_of(fed.row(0).floats.clone())
    assert torch.equal(previous[name], initial)
    assert isinstance(algorithm.local_penalty, Contrast)
    first, second = algorithm.local_penalty.previous[0]
    assert torch.equal(tensor_of(first), initial)
    assert torch.equal(tensor_of(second), trained)


def test_frozen_models_use_their_statistics_and_draw_nothing() -> None:
    """The session of the second round trains with dropout and batch statistics."""

    def net() -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(6, 3),
        )

    algorithm = MOON()
    fed = fleet(algorithm, net)
    run_round(fed, 0)
    received_and_previous = [algorithm.model.floats.clone(), fed.row(2).floats.clone()]
    run_round(fed, 1)
    composite: Any = fed.groups[0].module.net  # as client 2 has left it

    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    features = composite.frozen_features(x)
    for model, frozen_z in zip(received_and_previous, features, strict=True):
        views = fed.groups[0].layout.floats.views(model)
        tensors = {name.removeprefix("net.extractor."): view for name, view in views.items()}
        linear = F.linear(x, tensors["0.weight"], tensors["0.bias"])
        norm = F.batch_norm(
            linear,
            tensors["1.running_mean"],
            tensors["1.running_var"],
            tensors["1.weight"],
            tensors["1.bias"],
        )
        torch.testing.assert_close(frozen_z, F.relu(norm))
    assert composite.extractor.training


def test_outside_of_sessions_there_is_no_contrast() -> None:
    """A server that asks for losses gets the same whomever this rank has trained last."""
    fed = fleet(MOON())
    for t in range(2):
        run_round(fed, t)

    net: Any = fed.groups[0].module.net
    for client in range(fed.clients):
        ((x, y),) = fed.data.batches(fed.data.client_plan(client, batch_size=100))
        fed.bind(client).eval()
        expected = F.cross_entropy(net(x), y)
        assert fed.loss(client, 2) == pytest.approx(expected.item(), rel=1e-5)


def test_a_network_without_a_linear_head_is_refused() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh())

    with pytest.raises(UserError, match=r"model\.clients"):
        fleet(MOON(), net)
    with pytest.raises(UserError, match=r"model\.clients"):
        fleet(MOON(), Line)


@pytest.mark.parametrize("wrong", [{"mu": -1.0}, {"temperature": 0.0}, {"pool": 0}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"init_args\.{next(iter(wrong))}"):
        MOON(**wrong)
