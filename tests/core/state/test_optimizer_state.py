"""A session's optimizer is as new, wherever it keeps its state."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Optimizer

from lightfed.state.optimizer_state import flat_slots
from lightfed.utils.errors import UserError
from tests.core.local.optimizers import Counting, Growing, InState, Lookahead, Warm
from tests.core.local.steps import assert_equal, make, net_of, reset, run_stepper, run_torch

BUILDERS: dict[str, Callable[..., Optimizer]] = {
    "keys_of_groups": Warm,
    "attributes": Counting,
    "wrapped": Lookahead,
    "state_of_the_constructor": InState,
    "initial_sums": partial(Adagrad, lr=0.1, initial_accumulator_value=0.3),
    "groups": partial(Growing, lr=0.1),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_a_session_begins_with_a_new_optimizer(build: Callable[..., Optimizer]) -> None:
    net = net_of()
    twin = net_of()
    stepper = make(build(list(net.parameters())))

    for session in range(3):
        net.load_state_dict(net_of(session).state_dict())
        reset(stepper, net)
        run_stepper(net, stepper, 5)

        twin.load_state_dict(net_of(session).state_dict())
        run_torch(twin, build(list(twin.parameters())), 5)
        assert_equal(net, twin)


class Locked(SGD):
    """Keeps something that cannot be copied."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.lock = threading.Lock()


def test_what_cannot_be_copied_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"^model\.optimizer: Locked keeps lock, which cannot"):
        make(Locked(net_of().parameters(), lr=0.1))


def test_what_a_row_can_hold_of_an_optimizer() -> None:
    net = net_of()
    assert flat_slots(SGD(net.parameters(), lr=0.1)) == {}
    assert flat_slots(SGD(net.parameters(), lr=0.1, momentum=0.9)) == {"momentum_buffer": True}
    adam = torch.optim.Adam(net.parameters())
    assert flat_slots(adam) == {"exp_avg": True, "exp_avg_sq": True, "step": False}


@pytest.mark.parametrize("build", [Warm, Counting, Lookahead, torch.optim.Adafactor])
def test_what_no_row_can_hold_of_an_optimizer(build: Callable[..., Optimizer]) -> None:
    assert flat_slots(build(net_of().parameters())) is None


def test_to_ask_what_a_row_can_hold_takes_no_step() -> None:
    net = net_of()
    before = [p.clone() for p in net.parameters()]
    adam = torch.optim.Adam(net.parameters())

    flat_slots(adam)

    assert not adam.state
    for p, value in zip(net.parameters(), before, strict=True):
        assert p.grad is None
        assert torch.equal(p, value)
