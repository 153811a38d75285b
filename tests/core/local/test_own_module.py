"""What a user's LightningModule may do: a session does as it would be done outside."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from typing_extensions import override

from lightfed.algorithms.standalone import Standalone
from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.client_group import ClientGroup
from lightfed.utils.errors import UserError
from tests.small import data_of, fleet_of, row_held, run_round

STEPS = 4


class Two(L.LightningModule):
    """Two layers of one shape, so that what is meant for one would fit the other."""

    def __init__(self, configure: Callable[["Two"], Any], shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)
        self.configure = configure
        self.shape = shape

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x)))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).square().sum().view(self.shape)

    @override
    def configure_optimizers(self) -> Any:
        return self.configure(self)


def one_sample() -> FederatedDataModule:
    return data_of(torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([0]), [[0]], classes=3)


def frozen(model: Two) -> Any:
    model.base.requires_grad_(False)
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def backwards(model: Two) -> Any:
    return SGD(list(model.parameters())[::-1], lr=0.1, momentum=0.9)


def scheduled(model: Two) -> Any:
    optimizer = Adam(model.parameters(), lr=0.1)
    return [optimizer], [{"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": "step"}]


OPTIMIZERS: dict[str, Callable[[Two], Any]] = {
    "all": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "a_part": lambda model: SGD(model.head.parameters(), lr=0.1, momentum=0.9),
    "backwards": backwards,
    "head_first": lambda model: SGD([*model.head.parameters(), *model.base.parameters()], lr=0.1),
    "a_frozen_part": frozen,
    "adam_of_a_part": lambda model: Adam(model.head.parameters(), lr=0.1),
    "scheduled": scheduled,
}


@pytest.mark.parametrize("configure", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_session_steps_the_parameters_of_the_optimizer(configure: Callable[[Two], Any]) -> None:
    assert_trains_as_outside(configure, ())


def test_a_loss_may_be_a_tensor_of_one_element() -> None:
    assert_trains_as_outside(OPTIMIZERS["scheduled"], (1,))


def assert_trains_as_outside(configure: Callable[[Two], Any], shape: tuple[int, ...]) -> None:
    model = partial(Two, configure, shape)
    fleet = fleet_of([ClientGroup(1, model)], Standalone(), one_sample(), epochs=STEPS)
    state = fleet.groups[0]
    twin = Two(configure)
    twin.load_state_dict(state.module.state_dict())
    run_round(fleet, 0)
    layout, row = row_held(fleet, 0)
    found = layout.floats.views(row.floats)
    train(twin, configure(twin))
    for name, parameter in twin.named_parameters():
        assert torch.equal(found[name], parameter), name


def train(model: Two, configured: Any) -> None:
    optimizer = configured[0][0] if isinstance(configured, tuple) else configured
    for _ in range(STEPS):
        model.zero_grad()
        model(torch.tensor([[1.0, -2.0, 0.5]])).square().sum().backward()
        optimizer.step()
        if isinstance(configured, tuple):
            configured[1][0]["scheduler"].step()


def plateau(model: Two) -> Any:
    optimizer = SGD(model.parameters(), lr=0.1)
    return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer), "monitor": "x"}


@pytest.mark.parametrize(
    ("configure", "found"),
    [
        (lambda model: None, "from configure_optimizers"),
        (plateau, "ReduceLROnPlateau"),
    ],
)
def test_what_a_session_cannot_do_is_refused(configure: Any, found: str) -> None:
    with pytest.raises(UserError, match=rf"model\.clients\.0\.model: .*{found}"):
        fleet_of([ClientGroup(1, partial(Two, configure))], Standalone(), one_sample())


def test_a_module_needs_no_forward() -> None:
    """Lightning asks for none: its steps may call what they like."""

    class Stepping(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 1)

        @override
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return self.net(batch[0]).sum()

    fleet = fleet_of([ClientGroup(1, Stepping)], Standalone(), one_sample())
    before = fleet.row(0).floats.clone()
    run_round(fleet, 0)
    # One step of 1/2 against the sample itself.
    weight = fleet.groups[0].layout.floats.views(before - fleet.row(0).floats)["net.weight"]
    assert weight.flatten().tolist() == pytest.approx([0.5, -1.0, 0.25], rel=1e-5)


class Mixes(Two):
    """Draws its first values, and the share of every batch, as code of others does."""

    def __init__(self) -> None:
        super().__init__(lambda model: SGD(model.parameters(), lr=0.1))
        self.head.weight.data.copy_(torch.from_numpy(np.random.randn(3, 3)))
        self.base.weight.data.mul_(random.random())

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return np.random.beta(0.4, 0.4) * super().training_step(batch, batch_idx) * random.random()


def test_what_a_module_draws_from_numpy_and_python_is_named_too() -> None:
    rows = []
    for before in (1, 2):
        np.random.seed(before)
        random.seed(before)
        fleet = fleet_of([ClientGroup(1, Mixes)], Standalone(), one_sample(), steps=STEPS)
        start = fleet.row(0).floats.clone()
        run_round(fleet, 0)
        rows.append(torch.cat([start, fleet.row(0).floats]))
    assert torch.equal(*rows)


def test_hooks_of_steps_are_called() -> None:
    calls: list[str] = []

    class Hooked(Two):
        @override
        def on_after_backward(self) -> None:
            calls.append(self.trainer.state.stage.value)

    module = partial(Hooked, lambda model: SGD(model.parameters(), lr=0.1))
    fed = fleet_of([ClientGroup(1, module)], Standalone(), one_sample(), epochs=STEPS)
    run_round(fed, 0)
    assert calls == ["train"] * STEPS
