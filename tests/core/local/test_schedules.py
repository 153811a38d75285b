"""Optimiser state and schedules: what a session keeps, and nothing outlives it."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, StepLR

from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.engine.session_setup import runtime_of, template
from lightfed.utils.errors import UserError
from tests.core.local.steps import (
    assert_equal,
    loss_of,
    make,
    net_of,
    reset,
    run_stepper,
    run_torch,
)

BUILDERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": partial(Adam, lr=0.05),
    "adam_tensor_lr": lambda params: Adam(params, lr=torch.tensor(0.05), capturable=False),
    "sgd_maximize": partial(SGD, lr=0.05, momentum=0.9, maximize=True),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_reset_is_a_newly_made_optimizer(
    build: Callable[..., Optimizer], scheduled: bool
) -> None:
    net, twin = net_of(), net_of()
    optimizer = build(net.parameters())
    schedulers = [_config(StepLR(optimizer, 1, gamma=0.5))] if scheduled else []
    stepper = make(optimizer, schedulers=schedulers)
    reset(stepper, net)
    run_stepper(net, stepper, 3)  # an earlier session
    net.load_state_dict(twin.state_dict())
    reset(stepper, net)
    run_stepper(net, stepper, 3)
    fresh = build(twin.parameters())
    run_torch(twin, fresh, 3, schedule=StepLR(fresh, 1, gamma=0.5) if scheduled else None)
    assert_equal(net, twin)


def _config(scheduler: LRScheduler, **settings: Any) -> LRSchedulerConfig:
    return LRSchedulerConfig(scheduler, **({"interval": "step"} | settings))


SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "step": partial(StepLR, step_size=2, gamma=0.1),
    "cosine": partial(CosineAnnealingLR, T_max=6),
    "one_cycle": partial(OneCycleLR, max_lr=0.3, total_steps=8),  # momentum too
}


@pytest.mark.parametrize(("interval", "every"), [("step", 1), ("step", 2), ("epoch", 1)])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_schedulers_step_with_batches_or_epochs(
    schedule: Callable[[Optimizer], LRScheduler], interval: str, every: int
) -> None:
    """Every so many of them, by `frequency` of Lightning's scheduler dictionary."""
    net, twin = net_of(), net_of()
    optimizer = SGD(net.parameters(), lr=0.05, momentum=0.9)
    config = _config(schedule(optimizer), interval=interval, frequency=every)
    stepper = make(optimizer, schedulers=[config])
    for _ in range(2):  # the second session is to be the first again
        net.load_state_dict(twin.state_dict())
        reset(stepper, net)
        for step in range(6):
            stepper.step(loss_of(net, step), None)
            if step % 3 == 2:
                stepper.schedule("epoch")
    # Lightning counts the steps of an epoch, which has three here.
    reference = SGD(twin.parameters(), lr=0.05, momentum=0.9)
    rates = schedule(reference)
    for step in range(6):
        reference.zero_grad()
        loss_of(twin, step).backward()
        reference.step()
        if step % 3 == 2 if interval == "epoch" else (step % 3 + 1) % every == 0:
            rates.step()
    assert_equal(net, twin)


def test_an_optimiser_that_steps_in_sessions_alone_has_a_schedule() -> None:
    given: dict[str, Any] = {"rounds": 3, "parameters": [nn.Parameter(torch.zeros(2))]}
    made = template(partial(ASPG, lr=0.1), partial(StepLR, step_size=1), **given)
    assert made[0][0].param_groups[0]["lr"] == 0.1


def test_a_loss_scaler_is_refused() -> None:
    plugin = MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cpu"))
    trainer: Any = SimpleNamespace(precision_plugin=plugin, gradient_clip_val=None)
    with pytest.raises(UserError, match=r"^trainer\.precision: 16-mixed.*; use bf16-mixed"):
        runtime_of(trainer, clips="norm")
