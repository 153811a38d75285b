"""ASPG: the golden quadratic through a session and as an optimiser, and what (4) leaves open."""

import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR
from typing_extensions import override

from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.engine.session_setup import client_stepper
from lightfed.lightning_fits.hook_table import HookTable
from lightfed.local.optimizer import Clipping, Proximal, make_stepper
from lightfed.local.session import LocalSession, Runtime, Work
from lightfed.state.rows import LiveModule, ModelLayout
from lightfed.utils.errors import UserError
from tests.core.local.steps import loss_of, net_of
from tests.small import GOLDEN

CASES = json.loads((GOLDEN / "fedbcd/aspg_quadratic.json").read_text())["cases"]
VECTORS = {
    name: tensor.float()
    for name, tensor in load_file(GOLDEN / "fedbcd/aspg_quadratic.safetensors").items()
}
STEPS = 8


class Module(L.LightningModule):
    """A loss of its parameters; a batch is the number of the step."""

    def __init__(
        self, loss: Callable[[Any, int], Tensor], **parameters: Tensor | nn.Module
    ) -> None:
        super().__init__()
        for name, value in parameters.items():
            part = value if isinstance(value, nn.Module) else nn.Parameter(value.clone())
            setattr(self, name, part)
        self._loss = loss

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._loss(self, int(batch))


class Trained:
    """A module, its row, and its session under ASPG."""

    def __init__(
        self,
        module: L.LightningModule,
        optimizer: Callable[..., Optimizer],
        clipping: Clipping | None = None,
    ) -> None:
        self.live = LiveModule(module, ModelLayout.of(module))
        self.row = self.live.row_of_module()
        stepper = make_stepper(optimizer(self.live.trainable), schedulers=[], clipping=clipping)
        self.session = LocalSession(module, Runtime(), live=self.live, stepper=stepper)

    def run(
        self,
        steps: Iterable[int],
        proximal: Proximal | None = None,
        *,
        hook: Any = None,
        lr: float | None = None,
    ) -> "Trained":
        batches = [torch.tensor([step]) for step in steps]
        self.session.train(self.row, Work(0, batches, 1, lr, 0, hook, proximal=proximal))
        return self

    def row_of(self, **values: Tensor) -> Tensor:
        """(P,) a row of given values, 0 elsewhere."""
        row = self.live.layout.floats.new_row()
        for name, value in values.items():
            self.live.layout.floats.views(row)[name].copy_(value)
        return row

    def __getitem__(self, name: str) -> Tensor:
        return self.live.layout.floats.views(self.row.floats)[name]


def quadratic(module: Any, _: int) -> Tensor:
    return module.x @ VECTORS["A"] @ module.x / 2 - VECTORS["b"] @ module.x


@pytest.mark.parametrize("name", CASES)
def test_a_session_takes_the_steps_of_the_golden_quadratic(name: str) -> None:
    case = CASES[name]
    aspg = partial(ASPG, lr=case["eta"], momentum=case["zeta"])
    for steps in range(1, STEPS + 1):
        trained = Trained(Module(quadratic, x=VECTORS["x0"]), aspg)
        ahead = case["zeta"] * (VECTORS["x0"] - VECTORS["xm1"])
        pull = Proximal(
            trained.row_of(x=VECTORS["z"]), case["gamma"], True, trained.row_of(x=ahead)
        )  # fmt: skip
        trained.run(range(steps), pull)
        expected = VECTORS[f"{name}/x{steps}"]
        torch.testing.assert_close(trained["x"], expected, rtol=0, atol=1e-6)
        before = VECTORS[f"{name}/x{steps - 1}"] if steps > 1 else VECTORS["x0"]
        assert pull.momentum is not None
        next_ahead = case["zeta"] * (expected - before)
        torch.testing.assert_close(pull.momentum[:6], next_ahead, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_momentum_crosses_sessions_without_a_trace(name: str) -> None:
    case = CASES[name]
    trained = Trained(
        Module(quadratic, x=VECTORS["x0"]), partial(ASPG, lr=case["eta"], momentum=case["zeta"])
    )
    anchor = trained.row_of(x=VECTORS["z"])
    ahead = trained.row_of(x=case["zeta"] * (VECTORS["x0"] - VECTORS["xm1"]))
    for steps in (3, 1, 4):
        pull = Proximal(anchor, case["gamma"], carries=True, momentum=ahead)
        trained.run(range(steps), pull)
        assert pull.momentum is not None
        ahead = pull.momentum
    torch.testing.assert_close(trained["x"], VECTORS[f"{name}/x8"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_the_optimizer_takes_the_steps_of_the_golden_quadratic(name: str) -> None:
    case = CASES[name]
    ahead = case["zeta"] * (VECTORS["x0"] - VECTORS["xm1"])
    x = nn.Parameter(VECTORS["x0"] + ahead)
    optimizer = ASPG([x], lr=case["eta"], momentum=case["zeta"])
    optimizer.state[x]["x"] = VECTORS["x0"].clone()
    for step in range(STEPS):
        optimizer.zero_grad()
        pull = case["gamma"] / 2 * (x - VECTORS["z"]).square().sum()
        (x @ VECTORS["A"] @ x / 2 - VECTORS["b"] @ x + pull).backward()
        optimizer.step()
        found = optimizer.state[x]["x"]
        torch.testing.assert_close(found, VECTORS[f"{name}/x{step + 1}"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("box", [(-0.5, 0.75), None])
def test_without_momentum_it_is_projected_sgd(box: tuple[float, float] | None) -> None:
    def loss(module: Any, step: int) -> Tensor:
        return loss_of(module.net, step)

    trained = Trained(Module(loss, net=net_of()), partial(ASPG, lr=0.05, momentum=0.0, box=box))
    trained.run(range(5))
    twin = net_of()
    optimizer = SGD(twin.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(twin, step).backward()
        optimizer.step()
        with torch.no_grad():
            for p in twin.parameters():
                p.clamp_(*(box or (None, 9e9)))
    for name, value in twin.named_parameters():
        assert torch.equal(trained[f"net.{name}"], value)


def test_a_session_without_a_pull_starts_without_momentum() -> None:
    def loss(module: Any, _: int) -> Tensor:
        return (module.x - 8).square().sum() / 2

    aspg = partial(ASPG, lr=0.25, momentum=0.5, box=None)
    trained = Trained(Module(loss, x=torch.zeros(1)), aspg).run([0]).run([0])
    assert trained["x"].item() == 2 + 0.25 * 6


def test_a_session_without_a_step_keeps_what_it_was_ahead() -> None:
    """Step 0 has a loss, step 1 has none: `training_step` may skip a batch."""

    def loss(module: Any, step: int) -> Any:
        return module.x.sum() if step == 0 else None

    trained = Trained(Module(loss, x=torch.ones(3)), partial(ASPG, lr=0.5))
    trained.run([0], Proximal(trained.row_of(), 0.0))
    assert trained["x"].tolist() == [0.5] * 3
    pull = Proximal(trained.row_of(), 1.0, True, trained.row_of(x=torch.full((3,), 0.25)))
    trained.run([1, 1], pull)
    assert trained["x"].tolist() == [0.5] * 3
    assert pull.momentum is not None
    assert pull.momentum[:3].tolist() == [0.25] * 3


def test_the_rate_of_the_round_is_used() -> None:
    def loss(module: Any, _: int) -> Tensor:
        return module.x.sum()

    trained = Trained(Module(loss, x=torch.zeros(4)), partial(ASPG, lr=7.0, momentum=0.0))
    pull = Proximal(trained.row_of(), 0.0)
    trained.run([0], pull, lr=0.5)
    assert trained["x"].tolist() == [-0.5] * 4


def test_frozen_parameters_are_not_pulled_or_projected_and_unused_ones_are() -> None:
    """A parameter that the loss does not depend on has the gradient 0 of its pull alone."""

    def loss(module: Any, _: int) -> Tensor:
        return (module.first * module.frozen[:1]).sum() + module.last.sum()

    module = Module(
        loss, first=torch.zeros(3), frozen=torch.full((40,), 7.0), unused=torch.ones(2),
        last=torch.zeros(1),
    )  # fmt: skip
    module.frozen.requires_grad_(False)  # type: ignore[union-attr, operator]
    module.written = ["frozen"]  # type: ignore[assignment]
    trained = Trained(module, partial(ASPG, lr=0.25, momentum=0.0))
    anchor = trained.row_of(frozen=torch.full((40,), 5.0))
    trained.run([0], Proximal(anchor, 1.0))
    assert trained["first"].tolist() == [-1.75] * 3
    assert trained["frozen"].tolist() == [7.0] * 40
    assert trained["unused"].tolist() == [0.75] * 2
    assert trained["last"].tolist() == [-0.25]


@pytest.mark.parametrize(
    ("algorithm", "expected"), [("norm", [-0.6, -0.8]), ("value", [-1.0, -1.0])]
)
def test_clipping_acts_on_the_pulled_gradient(algorithm: str, expected: list[float]) -> None:
    """Gradient (2, 0) and 4 (x - z) = (4, 8) are (6, 8), of norm 10; momentum is not clipped."""

    def loss(module: Any, _: int) -> Tensor:
        return 2 * module.x[0]

    module = Module(loss, frozen=torch.ones(1), x=torch.zeros(2))
    module.frozen.requires_grad_(False)  # type: ignore[union-attr, operator]
    module.written = ["frozen"]  # type: ignore[assignment]
    aspg = partial(ASPG, lr=1.0, momentum=0.5, box=(-100.0, 100.0))
    trained = Trained(module, aspg, Clipping(1.0, algorithm))
    anchor = trained.row_of(x=torch.tensor([-1.0, -2.0]))
    pull = Proximal(anchor, 4.0, carries=True)
    trained.run([0], pull)
    torch.testing.assert_close(trained["x"], torch.tensor(expected), rtol=1e-5, atol=0)
    assert pull.momentum is not None
    torch.testing.assert_close(pull.momentum[32:34], torch.tensor(expected) / 2, rtol=1e-5, atol=0)
    assert trained["frozen"].item() == 1.0


def test_an_old_gradient_does_not_come_back() -> None:
    """`side` is trained in the second step only."""

    def loss(module: Any, step: int) -> Tensor:
        return module.main.sum() + (module.side.sum() if step == 1 else 0.0)

    module = Module(loss, main=torch.zeros(1), side=torch.zeros(1))
    aspg = partial(ASPG, lr=0.25, momentum=0.0)
    for clipping in (None, Clipping(100.0)):
        module.side.data = torch.zeros(1)  # type: ignore[union-attr]
        trained = Trained(module, aspg, clipping).run(range(4))
        assert trained["side"].item() == -0.25


def test_the_hook_sees_the_gradient_before_the_pull() -> None:
    def loss(module: Any, _: int) -> Tensor:
        return 3 * module.x.sum()

    def hook(gradient: Tensor) -> None:
        assert gradient.sum() == 3.0
        gradient.mul_(2)

    aspg = partial(ASPG, lr=0.25, momentum=0.0, box=None)
    trained = Trained(Module(loss, x=torch.zeros(1)), aspg)
    trained.run([0], Proximal(trained.row_of(x=torch.ones(1)), 4.0), hook=hook)
    assert trained["x"].item() == -0.25 * (6 - 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.0), ("lr", math.inf), ("momentum", -0.1), ("momentum", math.nan), ("box", (2, 2)),
        ("box", (math.nan, 1.0)), ("box", (0.5, 1.0)),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UserError) as stated:
        ASPG(net_of().parameters(), **{name: value})
    assert stated.value.key == f"model.optimizer.init_args.{name}"


class Own(L.LightningModule):
    """A user's module that brings ASPG along."""

    def __init__(self, configure: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.net = net_of()
        self._configure = configure

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch_idx)

    @override
    def configure_optimizers(self) -> Any:
        return self._configure(self)


def scheduled(module: nn.Module) -> Any:
    optimizer = ASPG(module.parameters())
    return [optimizer], [StepLR(optimizer, 1)]


def grouped(module: nn.Module) -> Any:
    parts = list(module.parameters())
    return ASPG([{"params": parts[:2]}, {"params": parts[2:], "lr": 0.1}])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "configure", [scheduled, grouped, lambda module: ASPG(module.net.head.parameters())]
)
def test_an_own_module_that_wants_more_than_a_session_can_is_refused(configure: Any) -> None:
    class State:
        module = Own(configure)
        live = LiveModule(module, ModelLayout.of(module))
        trainer = None
        table = HookTable()

    with pytest.raises(
        UserError, match=r"^model\.optimizer: ASPG with a scheduler, hooks, groups or a part"
    ):
        client_stepper(State(), 0, None, Runtime(), {})  # type: ignore[arg-type]
