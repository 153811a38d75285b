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
        self.when = client, t

    @override
    def session_start(self, s: SessionContext) -> None:
        if (s.client, s.round) == self.when:
            s.row.floats[0] = math.nan


def federation(algorithm: Any, **settings: Any) -> Fleet:
    if isinstance(algorithm, DepthFL):
        model: Any = partial(DepthConv, channels=(4, 6), pools=1)
        data = images(SIZES)
    else:
        model = partial(MLP, hidden=(6,))
        data = random_data(SIZES, batch_size=3)
    made = fleet_of(
        [ClientGroup(len(SIZES), model)], algorithm, data, optimizer=partial(SGD, lr=LR), **settings
    )
    made.plan = RoundPlan(lr=LR)
    return made


def differences(made: Fleet) -> tuple[Tensor, Tensor]:
    """What the server remembers, and that less the mean of what its clients do."""
    algorithm: Any = made.algorithm
    if isinstance(algorithm, FedDyn):
        server, own = algorithm.h, algorithm.local_penalty.memories
    elif isinstance(algorithm, DepthFL):
        server, own = algorithm.h, algorithm.corrections
    else:
        server, own = algorithm.c, algorithm.controls
    total = torch.zeros_like(server)
    for client in range(made.clients):
        total += own.get(client, torch.zeros_like(server))[: len(server)]
    return server, server - total / made.clients


METHODS = {"feddyn": partial(FedDyn, 0.1), "scaffold": SCAFFOLD, "depthfl": DepthFL}


@pytest.mark.parametrize("side_by_side", ["off", 2])
@pytest.mark.parametrize("name", METHODS)
def test_a_session_that_is_not_finite_changes_neither(name: str, side_by_side: Any) -> None:
    made = federation(METHODS[name](), local_penalty=Breaks(1, 2), side_by_side=side_by_side)
    for t in range(4):
        run_round(made, t)
        server, difference = differences(made)
        assert server.norm() > 0
        torch.testing.assert_close(difference, torch.zeros_like(server), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_a_session_that_comes_too_late_changes_neither(name: str) -> None:
    devices = Devices(flops=LogNormal(10.0, 1.0))
    made = federation(METHODS[name](), devices=devices, policy=Policy(quorum=2))
    late = 0.0
    for t in range(4):
        late += run_round(made, t)["late"]
        server, difference = differences(made)
        torch.testing.assert_close(difference, torch.zeros_like(server), rtol=0, atol=1e-6)
    assert late > 0


def test_a_memory_without_a_server_leaves_out_what_the_server_does() -> None:
    devices = Devices(flops=LogNormal(10.0, 1.0))
    term = LinearTerm(0.1)
    made = federation(FedAvg(), devices=devices, policy=Policy(quorum=1), local_penalty=term)
    run_round(made, 0)
    assert clock_of(made).late == set(range(len(SIZES))) - term.memories.keys()


@pytest.mark.parametrize("side_by_side", ["off", 4])
def test_the_decay_of_feddyn_is_added_after_clipping(side_by_side: Any) -> None:
    """The released code: the norm of grad CE + alpha (g - theta) is clipped, alpha w a decay."""
    alpha, limit, sizes = 0.2, 0.05, [8, 8, 8, 8]
    algorithm = FedDyn(alpha)
    data = random_data(sizes)
    made = fleet_of(
        [ClientGroup(4, partial(MLP, hidden=()))], algorithm, data,
        optimizer=partial(SGD, lr=LR), clip=limit, side_by_side=side_by_side, epochs=3,
    )  # fmt: skip
    made.plan = RoundPlan(lr=LR)
    memories = [torch.zeros_like(algorithm.h) for _ in sizes]
    for t in range(2):
        theta = algorithm.model.parameters_row.clone()
        expected = [_session(made, k, theta, memories[k], alpha, limit) for k in range(4)]
        run_round(made, t)
        for k, w in enumerate(expected):
            memories[k] += w - theta
            found = made.row(k).floats[: len(theta)]
            torch.testing.assert_close(found, w, rtol=0, atol=1e-6)


def _session(
    made: Fleet, client: int, theta: Tensor, g: Tensor, alpha: float, limit: float
) -> Tensor:
    """Three steps of the released code on all samples of a client."""
    layout = made.groups[0].layout.floats
    (entries,) = [list(layout)]
    x, y = made.data.train.batch(torch.from_numpy(made.data.partition_.train(client)))
    w = theta.clone()
    for _ in range(3):
        leaf = w.clone().requires_grad_()
        weight, bias = sorted((layout.view(leaf, e) for e in entries), key=lambda p: -p.dim())
        loss = torch.nn.functional.cross_entropy(x @ weight.T + bias, y)
        (gradient,) = torch.autograd.grad(loss, leaf)
        gradient = gradient + alpha * (g - theta)
        gradient *= min(1.0, limit / (float(gradient.norm()) + 1e-6))
        w = w - LR * (gradient + alpha * w)
    return w
