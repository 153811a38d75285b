"""FedGH, FedTGP and FedMRL: rounds computed by hand, in plain torch."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from lightfed.algorithms.class_means import ClassMeans
from lightfed.algorithms.pfedmoe.fedmrl import FedMRL
from lightfed.algorithms.prototypes.fedgh import FedGH
from lightfed.algorithms.prototypes.fedproto import FedProto
from lightfed.algorithms.prototypes.fedtgp import FedTGP, adaptive_margin
from lightfed.algorithms.standalone import Standalone
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from lightfed.utils.rng import torch_generator
from tests.small import data_of, fleet_of, run_round

RATE, CLASSES, BATCH = 0.1, 3, 8
SIZES = [5, 8, 6, 4]
X = torch.randn(sum(SIZES), 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(len(X)) * 7 // 5 % CLASSES
PARTS = [part.tolist() for part in torch.arange(len(X)).split(SIZES)]
large, larger, small = (partial(MLP, hidden=hidden) for hidden in ((16, 6), (20, 6), (5,)))
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


def fleet(algorithm: Algorithm, models: Any = (large, larger), **settings: Any) -> Fleet:
    """Four clients, whose whole data set is one batch."""
    groups = [ClientGroup(len(SIZES) // len(models), model) for model in models]
    data = data_of(X, Y, PARTS, classes=CLASSES, batch_size=BATCH)
    return fleet_of(groups, algorithm, data, optimizer=partial(SGD, lr=RATE), **settings)


def tensors(fed: Fleet, client: int) -> dict[str, Tensor]:
    views = fed.state(client).layout.floats.views(fed.row(client).floats)
    return {name: view.clone() for name, view in views.items()}


def means(fed: Fleet, client: int, extractor: str) -> dict[int, Tensor]:
    """Mean features by class of a client's row."""
    z = fed.bind(client).get_submodule(extractor)(X[PARTS[client]]).detach()
    y = Y[PARTS[client]]
    return {int(c): z[y == c].mean(0) for c in y.unique()}


def batches(packages: list[dict[int, Tensor]], t: int, size: int, epochs: int) -> Any:
    """The server's batches, in the order that it draws."""
    pairs = [(r, c) for package in packages for c, r in sorted(package.items())]
    draw = torch_generator(0, "means", t)
    for _ in range(epochs):
        for index in torch.randperm(len(pairs), generator=draw).split(size):
            some = [pairs[i] for i in index]
            yield torch.stack([r for r, _ in some]), torch.tensor([c for _, c in some])


def test_the_head_of_fedgh_learns_from_the_clients_means() -> None:
    algorithm = FedGH(0.5, epochs=2)
    fed, alone = fleet(algorithm, clients_per_round=3), fleet(Standalone(), clients_per_round=3)
    head = nn.Linear(6, CLASSES)
    for t in range(3):
        start = algorithm.model.layout.floats.views(algorithm.model.floats)
        head.load_state_dict({n.removeprefix("net.head."): v for n, v in start.items()})
        clients, before = fed.participants(t), [tensors(fed, k) for k in range(4)]
        for k in clients:  # the client's extractor under the server's head, by itself
            own = before[k] | {n: v.clone() for n, v in start.items()}
            for theirs, value in zip(tensors(alone, k), own.values(), strict=True):
                views = alone.state(k).layout.floats.views(alone.row(k).floats)
                views[theirs].copy_(value)
        metrics = run_round(fed, t)
        alone.open_round()
        alone.train(clients, t)
        for k in range(4):
            wanted = tensors(alone, k) if k in clients else before[k]
            for found, value in zip(tensors(fed, k).values(), wanted.values(), strict=True):
                close(found, value)
        packages = [means(fed, k, "net.extractor") for k in clients]
        step = SGD(head.parameters(), lr=0.5)
        for r, c in batches(packages, t, size=BATCH, epochs=2):
            step.zero_grad()
            F.cross_entropy(head(r), c).backward()
            step.step()
        found = algorithm.model.layout.floats.views(algorithm.model.floats)
        close(found["net.head.weight"], head.weight.detach())
        close(found["net.head.bias"], head.bias.detach())
        assert metrics["bytes_down"] == 3 * 4 * 7 * CLASSES
        assert metrics["bytes_up"] == sum(len(p) for p in packages) * (4 * 6 + 8)
        rows = algorithm.models(fed, "aggregated", [0])  # its extractor below the new head
        assert rows is not None
        features = fed.bind(0).get_submodule("net.extractor")(X)
        with torch.no_grad(), rows.bound(0) as module:
            close(module(X), head(features))


def test_the_prototypes_of_fedtgp_learn_with_a_margin() -> None:
    algorithm = FedTGP(margin=0.4, lr=0.05, epochs=3)
    fed = fleet(algorithm, clients_per_round=3)
    state = {name: value.clone() for name, value in algorithm.prototypes.state_dict().items()}
    layers = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)
    net = nn.Sequential(nn.Embedding(CLASSES, 6), *layers)
    net.load_state_dict(state)
    for t in range(2):
        clients = fed.participants(t)
        run_round(fed, t)
        packages = [means(fed, k, "net.private.extractor") for k in clients]
        held = [[p[c] for p in packages if c in p] for c in range(CLASSES)]
        q = torch.stack([torch.stack(some).mean(0) for some in held])
        gaps = [min((q[c] - q[d]).norm() for d in range(CLASSES) if d != c) for c in range(CLASSES)]
        delta = min(0.4, float(max(gaps)))
        step = SGD(net.parameters(), lr=0.05)
        for r, c in batches(packages, t, size=BATCH, epochs=3):
            p = net(torch.arange(CLASSES))
            d = torch.stack([torch.stack([(one - p[j]).norm() for j in range(3)]) for one in r])
            near = d[range(len(c)), c] + delta
            others = torch.stack([d[i, torch.arange(3) != k] for i, k in enumerate(c)])
            loss = near + torch.cat([-near[:, None], -others], 1).logsumexp(1)
            step.zero_grad()
            loss.mean().backward()
            step.step()
        close(algorithm.values, net(torch.arange(CLASSES)).detach())
        assert algorithm.seen.all()


def test_a_session_of_fedtgp_is_one_of_fedproto() -> None:
    taught, proto = fleet(FedTGP(weight=2.0, epochs=1)), fleet(FedProto(weight=2.0))
    for t in range(2):
        run_round(taught, t)
        run_round(proto, t)
        assert isinstance(taught.algorithm, FedTGP)
        assert isinstance(proto.algorithm, FedProto)
        for k in range(4):
            rows = (list(tensors(fed, k).values()) for fed in (taught, proto))
            assert all(map(torch.equal, *rows))
        proto.algorithm.take(taught.algorithm.common)


@pytest.mark.parametrize(
    ("values", "largest", "delta"),
    [
        ([[0.0], [1.0], [4.0]], 100.0, 3.0),  # distances to the nearest: 1, 1, 3
        ([[0.0], [1.0], [4.0]], 2.0, 2.0),
        ([[0.0], [1.0], [99.0]], 100.0, 1.0),  # the last class is not there
        ([[0.0], [50.0], [99.0]], 100.0, 50.0),
    ],
)
def test_the_margin(values: list[list[float]], largest: float, delta: float) -> None:
    seen = torch.tensor([True, True, values[2][0] != 99.0])
    assert adaptive_margin(ClassMeans(torch.tensor(values), seen), largest) == delta
    alone = torch.tensor([True, False, False])
    assert adaptive_margin(ClassMeans(torch.tensor(values), alone), largest) == largest


def test_a_class_that_nobody_holds_has_a_prototype() -> None:
    algorithm = FedTGP(epochs=1)
    data = data_of(X, Y, PARTS, classes=CLASSES + 1)
    fed = fleet_of([ClientGroup(4, large)], algorithm, data, optimizer=partial(SGD, lr=RATE))
    run_round(fed, 0)
    assert algorithm.seen.tolist() == [True] * (CLASSES + 1)
    assert run_round(fed, 1)["bytes_down"] == 4 * (CLASSES + 1) * (4 * 6 + 8)


def test_a_round_of_fedmrl() -> None:
    algorithm = FedMRL(small)
    fed = fleet(algorithm)
    views = algorithm.model.layout.floats.views(algorithm.model.floats)
    shared = {name: value.clone() for name, value in views.items()}
    trained = []
    for k in range(4):
        own = tensors(fed, k) | shared
        leaves = {name: value.clone().requires_grad_() for name, value in own.items()}
        x, y = X[PARTS[k]], Y[PARTS[k]]

        def run(part: str, layers: int, x: Tensor, of: dict[str, Tensor] = leaves) -> Tensor:
            for i in range(1, 2 * layers, 2):
                name = f"net.{part}.extractor.layers.{i}"
                x = F.relu(F.linear(x, of[f"{name}.weight"], of[f"{name}.bias"]))
            return x

        def head(part: str, z: Tensor, of: dict[str, Tensor] = leaves) -> Tensor:
            return F.linear(z, of[f"net.{part}.head.weight"], of[f"net.{part}.head.bias"])

        both = torch.cat((run("shared", 1, x), run("private", 2, x)), 1)
        z = F.linear(both, leaves["net.projection.weight"], leaves["net.projection.bias"])
        logits = head("private", z), head("shared", z[:, :5])
        loss = sum(F.cross_entropy(each, y) for each in logits)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        steps = zip(leaves.items(), grads, strict=True)
        trained.append({name: (leaf - RATE * grad).detach() for (name, leaf), grad in steps})
    run_round(fed, 0)
    for k in range(4):
        for name, value in tensors(fed, k).items():
            close(value, trained[k][name])
    for name, value in views.items():
        total = sum(n * own[name] for n, own in zip(SIZES, trained, strict=True))
        close(value, total / sum(SIZES))


def test_networks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match=r"init_args\.shared: it has 9 features"):
        fleet(FedMRL(partial(MLP, hidden=(9,))))
    with pytest.raises(UserError, match=r"model\.clients"):
        fleet(FedGH(), models=(large, partial(MLP, hidden=(16, 7))))
    for method in (FedGH, FedTGP):
        for name, wrong in (("lr", 0.0), ("epochs", 0)):
            with pytest.raises(UserError, match=rf"init_args\.{name}"):
                method(**{name: wrong})
    with pytest.raises(UserError, match=r"init_args\.margin"):
        FedTGP(margin=-1.0)
