"""What an optimiser with momentum hands on from session to session."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from lightfed.local.optimizer import Proximal
from lightfed.utils.errors import UserError
from tests.algorithms.test_aspg import Module, Trained
from tests.local.steps import assert_equal, loss_of, net_of, run_torch
from tests.local.test_optimizer import SGDS


def ramp(module: Any, _: int) -> torch.Tensor:
    """Its gradient is 1."""
    return (1.0 * module.x).sum()


# A buffer that is handed on before its first gradient would begin with a damped one.
HANDED = [
    (name, unused) for name in SGDS for unused in (False, True) if not unused or "damp" not in name
]


@pytest.mark.parametrize(("name", "unused"), HANDED)
def test_sessions_that_hand_on_are_one_of_torchs_sgd(name: str, unused: bool) -> None:
    """Six steps in sessions of two, one and three; a part without a gradient at first, too."""
    twin, net, settings = net_of(), net_of(), SGDS[name]

    def loss(module: Any, step: int) -> torch.Tensor:
        return loss_of(module.net, step, unused=unused)

    trained = Trained(Module(loss, net=net), partial(SGD, lr=0.05, **settings))
    pull = Proximal(trained.row_of(), 0.0, carries=True)
    for steps in ([0, 1], [2], [3, 4, 5]):
        pull = Proximal(trained.row_of(), 0.0, True, pull.momentum)
        before = None if pull.momentum is None else pull.momentum.clone()
        given = pull.momentum
        trained.run(steps, pull)
        assert (pull.momentum is None) == ("momentum" not in settings)
        assert before is None or torch.equal(before, given)  # of a session that may be left out
    run_torch(twin, SGD(twin.parameters(), lr=0.05, **settings), 6, unused=unused)
    trained.live.bind(trained.row)
    assert_equal(net, twin)


def test_a_session_that_is_not_to_hand_on_leaves_nothing() -> None:
    trained = Trained(Module(ramp, x=torch.zeros(2)), partial(SGD, lr=1.0, momentum=0.5))
    pull = Proximal(trained.row_of(), 0.0)
    trained.run([0, 1], pull)
    assert pull.momentum is None
    assert trained["x"].tolist() == [-2.5, -2.5]


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(Adam, lr=0.1), partial(AdamW, lr=0.1, amsgrad=True), partial(RMSprop, lr=0.1),
        partial(Adagrad, lr=0.1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("unused", [False, True])
def test_sessions_of_any_optimiser_are_one(optimizer: Any, unused: bool) -> None:
    twin, net = net_of(), net_of()

    def loss(module: Any, step: int) -> torch.Tensor:
        return loss_of(module.net, step, unused=unused)

    trained, state = Trained(Module(loss, net=net), optimizer), None
    for steps in ([0, 1], [2], [3, 4, 5]):
        pull = Proximal(trained.row_of(), 0.0, True, state)
        trained.run(steps, pull)
        state = pull.momentum
    run_torch(twin, optimizer(twin.parameters()), 6, unused=unused)
    trained.live.bind(trained.row)
    assert_equal(net, twin)


class Counting(SGD):
    """Its state has a number that is no tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["steps"] = 1


def test_a_state_that_is_no_tensor_is_refused() -> None:
    trained = Trained(Module(ramp, x=torch.zeros(2)), partial(Counting, lr=0.1))
    with pytest.raises(UserError) as refused:
        trained.run([0], Proximal(trained.row_of(), 0.0, carries=True))
    assert refused.value.key == "model.optimizer"


def test_an_optimiser_without_state_has_nothing_to_hand_on() -> None:
    trained = Trained(Module(ramp, x=torch.zeros(2)), partial(SGD, lr=0.5, maximize=True))
    trained.run([0], Proximal(trained.row_of(), 0.0, carries=True))
    assert trained["x"].tolist() == [0.5, 0.5]
