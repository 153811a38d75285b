"""Steps of several clients at once against torch's optimizers, bit by bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightfed.packs.stacked_optimizer import StackedOptimizer

SHAPES = ((3, 4), (3,))  # of a client's parameters
CLIENTS = 5


def values(seed: int) -> list[Tensor]:
    """Return parameters, or gradients, of all clients."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(CLIENTS, *shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("listened", [False, True])
@pytest.mark.parametrize(
    "build", [SGD, partial(SGD, weight_decay=0.1), partial(SGD, momentum=0.9), Adam]
)
def test_every_client_steps_as_with_an_optimizer_of_its_own(
    build: Callable[..., Optimizer], listened: bool, unused: bool
) -> None:
    """The last client has two steps, all others have four. A parameter may have no gradient."""
    active_clients = [CLIENTS, CLIENTS, CLIENTS - 1, CLIENTS - 1]
    template = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    stacked = StackedOptimizer(build(template, lr=0.3), template, rate=0.3)
    tensors = values(0)
    stepped: list[Any] = []
    handle = None
    if listened:
        handle = register_optimizer_step_post_hook(lambda *_: stepped.append(None))

    try:
        stacked.start(tensors, lr=0.2, momenta=None)
        for step, active in enumerate(active_clients):
            if active < len(stacked.leaves[0]):
                stacked.narrow(active)
            grads: list[Tensor | None] = [gradient[:active] for gradient in values(1 + step)]
            if unused:
                grads[1] = None
            stacked.step(grads)
        stacked.finish()
    finally:
        if handle is not None:
            handle.remove()
    assert len(stepped) == (len(active_clients) if listened else 0)

    for client in range(CLIENTS):
        own = [nn.Parameter(value[client].clone()) for value in values(0)]
        optimizer = build(own, lr=0.2)
        for step, active in enumerate(active_clients):
            if client >= active:
                continue
            for parameter, gradient in zip(own, values(1 + step), strict=True):
                parameter.grad = gradient[client]
            if unused:
                own[1].grad = None
            optimizer.step()
        for stacked_tensor, parameter in zip(tensors, own, strict=True):
            assert torch.equal(stacked_tensor[client], parameter)


def test_plain_sgd_does_not_call_torchs_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    template = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    stacked = StackedOptimizer(SGD(template, lr=0.3), template, rate=0.3)
    tensors = values(0)
    stacked.start(tensors, lr=None, momenta=None)

    calls: list[str] = []
    monkeypatch.setattr(SGD, "step", lambda *_: calls.append("step"))
    stacked.step(values(1))
    assert calls == []
    assert torch.equal(tensors[0], values(0)[0].add(values(1)[0], alpha=-0.3))


@pytest.mark.parametrize("build", [SGD, partial(SGD, momentum=0.9, dampening=0.5), Adam])
def test_a_session_keeps_nothing_of_the_one_before(build: Callable[..., Optimizer]) -> None:
    template = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    used = StackedOptimizer(build(template, lr=0.3), template, rate=0.3)
    used.start(values(7), lr=0.1, momenta=values(8))
    used.narrow(CLIENTS - 2)
    used.step([gradient[: CLIENTS - 2] for gradient in values(9)])
    used.finish()

    new = StackedOptimizer(build(template, lr=0.3), template, rate=0.3)
    trained = []
    for stacked in (used, new):
        tensors = values(0)
        stacked.start(tensors, lr=None, momenta=None)
        for step in range(2):
            stacked.step(list(values(1 + step)))
        stacked.finish()
        trained.append(tensors)

    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))
