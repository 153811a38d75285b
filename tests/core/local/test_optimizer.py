"""Steppers against the optimisers of torch, bit for bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightfed.local.optimizer import Clipping, Stepper
from tests.core.local.steps import (
    Net,
    assert_equal,
    loss_of,
    make,
    net_of,
    reset,
    run_stepper,
    run_torch,
)

SGDS = {
    "plain": {},
    "weight_decay": {"weight_decay": 0.01},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.4},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "all": {"momentum": 0.8, "weight_decay": 5e-4, "nesterov": True},
    "maximize": {"momentum": 0.9, "maximize": True},
    "all_dampened": {"momentum": 0.8, "weight_decay": 5e-4, "dampening": 0.1},
}


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("keeps_gradients", [False, True])
@pytest.mark.parametrize("settings", SGDS.values(), ids=SGDS)
def test_the_sgd_stepper_is_torchs_sgd(
    settings: dict[str, Any], keeps_gradients: bool, unused: bool
) -> None:
    net, twin = net_of(), net_of()
    stepper = make(SGD(net.parameters(), lr=0.05, **settings))
    stepper.keeps_gradients = keeps_gradients
    reset(stepper, net)
    run_stepper(net, stepper, 6, unused=unused)
    run_torch(twin, SGD(twin.parameters(), lr=0.05, **settings), 6, unused=unused)
    assert_equal(net, twin)


CLIPS = {
    "norm": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.7),
    "value": lambda net: nn.utils.clip_grad_value_(net.parameters(), 0.7),
}


@pytest.mark.parametrize("build", [partial(SGD, momentum=0.9, weight_decay=1e-3), Adam])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("algorithm", CLIPS)
def test_clipping_is_torchs(algorithm: str, unused: bool, build: Callable[..., Optimizer]) -> None:
    net, small, twin, free = (net_of() for _ in range(4))
    for model, limit in ((net, 0.7), (small, 1e6)):
        stepper = make(build(model.parameters(), lr=0.05), clipping=Clipping(limit, algorithm))
        reset(stepper, model)
        run_stepper(model, stepper, 4, unused=unused)
    clip = partial(CLIPS[algorithm], twin)
    run_torch(twin, build(twin.parameters(), lr=0.05), 4, clip=clip, unused=unused)
    assert_equal(net, twin)
    run_torch(free, build(free.parameters(), lr=0.05), 4, unused=unused)
    assert not torch.equal(free.head.weight, net.head.weight)  # the limit was reached
    assert_equal(small, free)  # gradients below the limit are left alone


class Summed(nn.Module):
    """Autograd gives `one` and `other` the same gradient, and `free` that of the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.full((3,), v)) for v in (1.0, 2.0))
        self.free = nn.Parameter(torch.tensor(0.5))

    def loss(self) -> Tensor:
        return (self.one + self.other).square().sum() + self.free


@pytest.mark.parametrize("build", [SGD, partial(SGD, maximize=True), Adam])
@pytest.mark.parametrize("algorithm", CLIPS)
def test_gradients_that_share_memory_are_clipped_once(
    algorithm: str, build: Callable[..., Optimizer]
) -> None:
    net, twin = Summed(), Summed()
    stepper = make(build(net.parameters(), lr=0.05), clipping=Clipping(0.7, algorithm))
    reset(stepper, net)
    optimizer = build(twin.parameters(), lr=0.05)
    for _ in range(3):
        stepper.step(net.loss(), None)
        optimizer.zero_grad()
        twin.loss().backward()
        CLIPS[algorithm](twin)
        optimizer.step()
    assert_equal(net, twin)


class Apart(Net):
    """`body` and `side` are networks of their own; the head is all else."""

    clipped_separately = ("body", "side")


@pytest.mark.parametrize("build", [partial(SGD, momentum=0.9, weight_decay=1e-3), Adam])
@pytest.mark.parametrize("unused", [False, True])
def test_every_network_has_a_norm_of_its_own(unused: bool, build: Callable[..., Optimizer]) -> None:
    """As code that calls clip_grad_norm_ for each, whatever the order of the optimiser."""
    net, twin, whole = (Apart() for _ in range(3))
    for model in (net, twin, whole):
        model.load_state_dict(net_of().state_dict())
    optimizer = build([*net.parameters()][::-1], lr=0.05)
    stepper = make(optimizer, clipping=Clipping(0.7, "network").of(net, optimizer))
    reset(stepper, net)
    run_stepper(net, stepper, 4, unused=unused)

    def clip() -> None:
        for part in (twin.body, twin.side, twin.head):
            nn.utils.clip_grad_norm_([*part.parameters()][::-1], 0.7)

    run_torch(twin, build(twin.parameters(), lr=0.05), 4, clip=clip, unused=unused)
    assert_equal(net, twin)
    clip_all = partial(CLIPS["norm"], whole)
    run_torch(whole, build(whole.parameters(), lr=0.05), 4, clip=clip_all, unused=unused)
    assert not torch.equal(whole.head.weight, net.head.weight)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.1}])
def test_parameters_that_need_no_gradient_are_left_alone(settings: dict[str, Any]) -> None:
    """`SGD(self.parameters())` over a module with a frozen part is what users write."""
    net, twin = net_of(), net_of()
    for model in (net, twin):
        model.body.requires_grad_(False)
    stepper = make(SGD(net.parameters(), lr=0.05, **settings))
    stepper.keeps_gradients = False
    reset(stepper, net)
    run_stepper(net, stepper, 3)
    run_torch(twin, SGD(twin.parameters(), lr=0.05, **settings), 3)
    assert_equal(net, twin)


@pytest.mark.parametrize("build", [SGD, partial(SGD, momentum=0.9, weight_decay=0.1), Adam])
def test_frozen_parameters_keep_their_momentum(build: Callable[..., Optimizer]) -> None:
    net, twin = net_of(), net_of()
    stepper, optimizer = make(build(net.parameters(), lr=0.05)), build(twin.parameters(), lr=0.05)
    stepper.keeps_gradients = False
    reset(stepper, net)
    for part in ("head", "body", "head"):
        stepper.train_only([*net.get_submodule(part).parameters()])
        twin.requires_grad_(False).get_submodule(part).requires_grad_(True)
        run_stepper(net, stepper, 2)
        run_torch(twin, optimizer, 2)
        assert_equal(net, twin)
    reset(stepper, net)  # all are trained in the next session
    run_stepper(net, stepper, 1)
    assert not torch.equal(net.side.weight, twin.side.weight)


@pytest.mark.parametrize("build", [partial(SGD, momentum=0.9), partial(SGD, maximize=True), Adam])
def test_the_hook_changes_gradients_before_clipping(build: Callable[..., Optimizer]) -> None:
    net, twin = net_of(), net_of()
    stepper = make(build(net.parameters(), lr=0.05), clipping=Clipping(0.7))
    row = reset(stepper, net)

    def hook(gradient: Tensor) -> None:
        gradient.add_(row - 0.5, alpha=3.0)

    optimizer = build(twin.parameters(), lr=0.05)
    for step in range(3):
        stepper.step(loss_of(net, step), hook)
        optimizer.zero_grad()
        loss_of(twin, step).backward()
        for p in twin.parameters():
            assert p.grad is not None
            p.grad.add_(p.detach() - 0.5, alpha=3.0)
        nn.utils.clip_grad_norm_(twin.parameters(), 0.7)
        optimizer.step()
    assert_equal(net, twin)


@pytest.mark.parametrize("listens", ["nobody", "a hook", "a hook of all optimizers", "a wrapper"])
def test_plain_sgd_steps_as_torch_does_and_calls_whoever_listens(listens: str) -> None:
    torch.manual_seed(0)
    row = torch.randn(6)
    weight = nn.Parameter(row[:4].view(2, 2))
    unused = nn.Parameter(row[4:])
    optimizer = SGD([weight, unused], lr=0.3)
    calls: list[str] = []
    handle = None

    def note(stepping: Optimizer, *_: Any) -> None:
        if stepping is optimizer:
            calls.append("step")

    if listens == "a hook":
        handle = optimizer.register_step_post_hook(note)
    elif listens == "a hook of all optimizers":
        handle = register_optimizer_step_post_hook(note)
    elif listens == "a wrapper":
        step = optimizer.step
        optimizer.step = lambda: (calls.append("step"), step())  # type: ignore[assignment]

    expected_weight = nn.Parameter(weight.detach().clone())
    expected_unused = unused.detach().clone()
    of_torch = SGD([expected_weight], lr=0.3)
    stepper = Stepper(optimizer, None)
    stepper.keeps_gradients = listens == "nobody"
    try:
        stepper.reset(None, row, None)
        for factor in (1.0, -2.0, 0.5):
            stepper.step((factor * weight**3).sum(), None)
            of_torch.zero_grad()
            (factor * expected_weight**3).sum().backward()
            of_torch.step()
    finally:
        if handle is not None:
            handle.remove()

    assert torch.equal(row[:4].view(2, 2), expected_weight)
    assert torch.equal(row[4:], expected_unused)
    assert len(calls) == (0 if listens == "nobody" else 3)


@pytest.mark.parametrize("settings", [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.5}])
def test_sparse_gradients_step_as_by_torch(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    row = torch.randn(12)
    weight = nn.Parameter(row.view(4, 3))
    expected = nn.Parameter(row.clone().view(4, 3))
    of_torch = SGD([expected], **settings)
    stepper = Stepper(SGD([weight], **settings), None)
    stepper.keeps_gradients = False
    stepper.reset(None, row, None)

    words = torch.tensor([1, 3, 1])
    for _ in range(2):
        stepper.step(F.embedding(words, weight, sparse=True).square().sum(), None)
        of_torch.zero_grad()
        F.embedding(words, expected, sparse=True).square().sum().backward()
        of_torch.step()

    assert torch.equal(row.view(4, 3), expected)
