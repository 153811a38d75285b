"""What clients remember and what the server remembers of them change together, or not at all."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.depth.depthfl import DepthFL
from lightfed.algorithms.depth.networks import DepthConv
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.feddyn import FedDyn
from lightfed.algorithms.scaffold import SCAFFOLD
from lightfed.api.fleet import Fleet
from lightfed.devices.delays import LogNormal
from lightfed.devices.devices import Devices
from lightfed.devices.policy import Policy
from lightfed.devices.timing import clock_of
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import LocalPenalty, SessionContext
from lightfed.local.local_work import RoundPlan
from lightfed.local.penalties import LinearTerm
from lightfed.networks.mlp import MLP
from tests.packs.federations import images
from tests.small import fleet_of, random_data, run_round

SIZES = [6, 9, 4, 7]
LR = 0.1


class Breaks(LocalPenalty):
    """One client's parameters are not a number in one round."""

    side_by_side = True

    def __init__(self, client: int, t: int) -> None:
        self.client = client
        self.t = t

    @override
    def session_start(self, s: SessionContext) -> None:
        if s.client == self.client and s.round == self.t:
            s.row.floats[0] = math.nan


def clients_of(algorithm: Any, **settings: Any) -> Fleet:
    """Return four clients of an algorithm."""
    if isinstance(algorithm, DepthFL):
        model: Any = partial(DepthConv, channels=(4, 6), pools=1)
        data = images(SIZES)
    else:
        model = partial(MLP, hidden=(6,))
        data = random_data(SIZES, batch_size=3)
    groups = [ClientGroup(len(SIZES), model)]
    fed = fleet_of(groups, algorithm, data, optimizer=partial(SGD, lr=LR), **settings)
    fed.plan = RoundPlan(lr=LR)
    return fed


def memory_of_server(fed: Fleet) -> Tensor:
    algorithm: Any = fed.algorithm
    memory: Tensor = algorithm.c if isinstance(algorithm, SCAFFOLD) else algorithm.h
    return memory


def mean_memory_of_clients(fed: Fleet) -> Tensor:
    algorithm: Any = fed.algorithm
    if isinstance(algorithm, FedDyn):
        memories = algorithm.local_penalty.memories
    elif isinstance(algorithm, DepthFL):
        memories = algorithm.corrections
    else:
        memories = algorithm.controls

    total = torch.zeros_like(memory_of_server(fed))
    for client in range(fed.clients):
        if client in memories:
            total += memories[client][: len(total)]
    return total / fed.clients


METHODS = {"feddyn": partial(FedDyn, 0.1), "scaffold": SCAFFOLD, "depthfl": DepthFL}


@pytest.mark.parametrize("side_by_side", ["off", 2])
@pytest.mark.parametrize("name", METHODS)
def test_a_session_that_is_not_finite_changes_neither(name: str, side_by_side: Any) -> None:
    fed = clients_of(METHODS[name](), local_penalty=Breaks(1, 2), side_by_side=side_by_side)
    for t in range(4):
        run_round(fed, t)
        server = memory_of_server(fed)
        assert server.norm() > 0
        torch.testing.assert_close(mean_memory_of_clients(fed), server, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_a_session_that_comes_too_late_changes_neither(name: str) -> None:
    devices = Devices(flops=LogNormal(10.0, 1.0))
    fed = clients_of(METHODS[name](), devices=devices, policy=Policy(quorum=2))
    late = 0.0
    for t in range(4):
        late += run_round(fed, t)["late"]
        server = memory_of_server(fed)
        torch.testing.assert_close(mean_memory_of_clients(fed), server, rtol=0, atol=1e-6)
    assert late > 0


def test_a_memory_without_a_server_leaves_out_what_the_server_does() -> None:
    devices = Devices(flops=LogNormal(10.0, 1.0))
    term = LinearTerm(0.1)
    fed = clients_of(FedAvg(), devices=devices, policy=Policy(quorum=1), local_penalty=term)
    run_round(fed, 0)
    without_memory = set(range(len(SIZES))) - term.memories.keys()
    assert clock_of(fed).late == without_memory


@pytest.mark.parametrize("side_by_side", ["off", 4])
def test_the_decay_of_feddyn_is_added_after_clipping(side_by_side: Any) -> None:
    """The released code: the norm of grad CE + alpha (g - theta) is clipped, alpha w a decay."""
    alpha = 0.2
    limit = 0.05
    algorithm = FedDyn(alpha)
    fed = fleet_of(
        [ClientGroup(4, partial(MLP, hidden=()))],
        algorithm,
        random_data([8, 8, 8, 8]),
        optimizer=partial(SGD, lr=LR),
        clip=limit,
        side_by_side=side_by_side,
        epochs=3,
    )
    fed.plan = RoundPlan(lr=LR)
    memories = [torch.zeros_like(algorithm.h) for _ in range(4)]
    for t in range(2):
        theta = algorithm.model.parameters_row.clone()
        expected = [released_session(fed, k, theta, memories[k], alpha, limit) for k in range(4)]
        run_round(fed, t)
        for k, w in enumerate(expected):
            memories[k] += w - theta
            trained = fed.row(k).floats[: len(theta)]
            torch.testing.assert_close(trained, w, rtol=0, atol=1e-6)


def released_session(
    fed: Fleet, client: int, theta: Tensor, g: Tensor, alpha: float, limit: float
) -> Tensor:
    """Return w_k (P,) after three steps of the released code on all samples of a client."""
    layout = fed.groups[0].layout.floats
    x, y = fed.data.train.batch(torch.from_numpy(fed.data.partition_.train(client)))
    w = theta.clone()
    for _ in range(3):
        leaf = w.clone().requires_grad_()
        tensors = [layout.view(leaf, entry) for entry in layout]
        bias, weight = sorted(tensors, key=Tensor.dim)
        loss = torch.nn.functional.cross_entropy(x @ weight.T + bias, y)
        (gradient,) = torch.autograd.grad(loss, leaf)
        gradient = gradient + alpha * (g - theta)
        gradient *= min(1.0, limit / (float(gradient.norm()) + 1e-6))
        w = w - LR * (gradient + alpha * w)
    return w
