"""What a step writes outside of its parameters' values, against a loop of torch alone."""

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.standalone import Standalone
from lightfed.api.fleet import Fleet
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import RoundPlan
from lightfed.local.optimizer import Params
from lightfed.models import attributes
from lightfed.utils.errors import UserError
from tests.small import data_of, fit, fleet_of, run_round

X, Y = torch.tensor([[1.0, -2.0, 0.5], [0.5, 1.0, -1.0]]), torch.tensor([0, 1])
CLIENTS, ROUNDS, STEPS = 2, 2, 3
FACTORY = partial(SGD, lr=0.1, momentum=0.9)


class Net(nn.Module):
    """A layer, and what a test adds to it: `made` once, `step` in every forward pass."""

    def __init__(
        self, made: Callable[[Any], object], step: Callable[[Any, Tensor], object]
    ) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.step = step
        made(self)

    @override
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        if self.training:
            self.step(self, hidden.detach())
        return self.head(hidden * getattr(self, "scale", 1.0))


def nothing(*_: Any) -> None:
    pass


def buffers(net: Net, *, persistent: bool) -> None:
    net.register_buffer("scale", torch.ones(4), persistent=persistent)
    net.register_buffer("count", torch.tensor(0), persistent=persistent)


def assign(net: Any, hidden: Tensor) -> None:
    net.scale, net.count = 0.9 * net.scale + 0.1 * hidden.mean(0), net.count + 1


def in_place(net: Any, hidden: Tensor) -> None:
    net.scale.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
    net.count.data += 1


def clamp(net: Any, _: Tensor) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data.clamp(-0.3, 0.3)


def teacher(net: Any) -> None:
    net.teacher, net.written = copy.deepcopy(net.layer).requires_grad_(False), ["teacher"]


def average(net: Any, hidden: Tensor) -> None:
    for old, new in zip(net.teacher.parameters(), net.layer.parameters(), strict=True):
        old.data = 0.5 * old.data + 0.5 * new.data


def halved(net: Any) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    net.head.weight.register_post_accumulate_grad_hook(halve)


def apart(net: Any) -> None:
    net.square, net.other = nn.Linear(3, 3), nn.Linear(3, 3)
    net.square.weight.data, net.other.weight.data = torch.randn(3, 6).chunk(2, 1)


NETS: dict[str, Callable[[], Net]] = {
    "nothing": partial(Net, nothing, nothing),
    "assigned": partial(Net, partial(buffers, persistent=True), assign),
    "in_place": partial(Net, partial(buffers, persistent=True), in_place),
    "assigned_loose": partial(Net, partial(buffers, persistent=False), assign),
    "in_place_loose": partial(Net, partial(buffers, persistent=False), in_place),
    "clamped": partial(Net, nothing, clamp),
    "averaged": partial(Net, teacher, average),
    "hooked": partial(Net, halved, nothing),
    "interleaved": partial(Net, apart, nothing),  # in memory
}


@pytest.mark.parametrize("factory", [FACTORY, partial(Adam, lr=0.1)], ids=["sgd", "adam"])
@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_two_clients_of_one_module_train_as_if_each_had_its_own(
    make: Callable[[], Net], factory: Any
) -> None:
    assert_as_outside(make, factory)


def by_dimension(parameters: Any) -> Optimizer:
    """Of the single parameter that says a round's rate, the first group is another."""
    groups: dict[int, Params] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dim(), []).append(parameter)
    settings = [{}, {"lr": 0.05}, {"lr": 0.1, "momentum": 0.9}]
    return SGD([{"params": p, **settings[dim]} for dim, p in groups.items()], lr=0.2)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_groups_of_parameters_keep_their_rates(factor: float) -> None:
    assert_as_outside(NETS["nothing"], by_dimension, lr=0.2 * factor, factor=factor)


def fleet(make: Callable[[], nn.Module], factory: Any = FACTORY) -> Fleet:
    data = data_of(X, Y, [[k] for k in range(CLIENTS)], classes=2)
    groups = [ClientGroup(CLIENTS, make)]
    options: dict[str, Any] = {"optimizer": factory, "side_by_side": "off", "epochs": STEPS}
    return fleet_of(groups, Standalone(), data, **options)


def assert_as_outside(
    make: Callable[[], Net], factory: Any, lr: float | None = None, factor: float = 1.0
) -> None:
    ours = fleet(make, factory)
    ours.plan = RoundPlan(lr=lr)
    start = {n.removeprefix("net."): v for n, v in ours.groups[0].module.state_dict().items()}
    states = [copy.deepcopy(start) for _ in range(CLIENTS)]
    for t in range(ROUNDS):
        run_round(ours, t)
        states = [outside(make, factory, k, state, factor) for k, state in enumerate(states)]
    for client, state in enumerate(states):
        layout, row = ours.groups[0].layout, ours.row(client)
        found = layout.floats.views(row.floats) | layout.integers.views(row.integers)
        assert found.keys() == {f"net.{name}" for name in state}
        for name, value in state.items():
            assert torch.equal(found[f"net.{name}"], value), (client, name)


def outside(
    make: Callable[[], Net], factory: Any, client: int, state: dict[str, Tensor], factor: float
) -> dict[str, Tensor]:
    """A client's state after a session in a module of its own."""
    net = make()
    net.load_state_dict(state)
    optimizer = factory(net.parameters())
    for group in optimizer.param_groups:
        group["lr"] *= factor
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(net(X[client, None]), Y[client, None]).backward()
        optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("evaluate", [(), ("finetuned",)])
def test_an_evaluation_finds_initial_buffers(evaluate: Any, tmp_path: Path) -> None:
    data = data_of(X, Y, [[k] for k in range(CLIENTS)], classes=2)
    groups = [ClientGroup(CLIENTS, NETS["in_place_loose"])]
    options: dict[str, Any] = {"side_by_side": "off"}
    federation = Federation(FedAvg(), groups, optimizer=FACTORY, evaluate=evaluate, **options)
    fit(federation, data, tmp_path)
    module: Any = federation.fleet.groups[0].module
    assert torch.equal(module.net.scale, torch.ones(4))


def shape(net: Any, hidden: Tensor) -> None:
    net.scale = hidden.mean()


def kind(net: Any, hidden: Tensor) -> None:
    net.count = net.count + 0.5


def none(net: Any, hidden: Tensor) -> None:
    net.count = None


def alias(net: Any, hidden: Tensor) -> None:
    net.teacher.weight.data = net.layer.weight.data


def frozen(net: Any) -> None:
    teacher(net)
    net.written = []


@pytest.mark.parametrize(
    ("made", "step", "found"),
    [
        (partial(buffers, persistent=True), shape, r"net\.scale"),
        (partial(buffers, persistent=True), kind, r"net\.count"),
        (partial(buffers, persistent=True), none, r"net\.count"),
        (teacher, alias, "share memory"),
        (frozen, average, r"net\.teacher\.weight"),  # of all clients
    ],
)
def test_what_a_step_may_not_write_is_refused(made: Any, step: Any, found: str) -> None:
    with pytest.raises(UserError, match=rf"model\.clients: .*{found}"):
        run_round(fleet(partial(Net, made, step)), 0)


def test_hooks_that_an_optimizer_would_not_call_are_refused() -> None:
    with pytest.raises(UserError, match=r"model\.optimizer: ASPG with a scheduler, hooks"):
        fleet(NETS["hooked"], partial(ASPG, lr=0.1))


def number(net: Any, hidden: Tensor) -> None:
    net.calls = getattr(net, "calls", 0) + 1


def history(net: Any, hidden: Tensor) -> None:
    net.seen.append(1)


def inside(net: Any, hidden: Tensor) -> None:
    net.kept["mean"] = hidden.mean()


def drawn(net: Any, hidden: Tensor) -> None:
    net.draws.random()


def generated(net: Any, hidden: Tensor) -> None:
    generator = vars(net).setdefault("generator", torch.Generator().manual_seed(net.seed))
    torch.rand(1, generator=generator)


def activation(net: Any, hidden: Tensor) -> None:
    net.features = net.layer(hidden[:, :3])


def given(**values: Any) -> Callable[[Any], None]:
    def made(net: Any) -> None:
        for name, value in copy.deepcopy(values).items():
            setattr(net, name, value)

    return made


@pytest.mark.parametrize(
    ("made", "step", "name"),
    [
        (nothing, number, "net.calls"),
        (given(seen=[]), history, "net.seen"),
        (given(kept={"mean": 0.0}), inside, "net.kept"),
        (given(draws=random.Random(5)), drawn, "net.draws"),
        (given(seed=5), generated, "net.generator"),
        (nothing, activation, None),
        (given(seen=[]), nothing, None),
    ],
)
def test_attributes_that_steps_change_are_as_new_in_each_session(
    made: Any, step: Any, name: str | None
) -> None:
    """What a client leaves in an attribute is found by no other one, nor by itself later."""
    found: list[dict[str, bytes]] = []

    def watched(net: Any, hidden: Tensor) -> None:
        if net.training:
            found.append(attributes.attributes(net))
        step(net, hidden)

    ours = fleet(partial(Net, made, watched))
    for t in range(ROUNDS):
        run_round(ours, t)
    sessions = ROUNDS * ours.clients
    steps = len(found) // sessions
    starts = [found[i * steps] for i in range(sessions)]
    assert all(start == starts[0] for start in starts)
    changes = any(one != starts[0] for one in found)
    assert changes == (name is not None and steps > 1)


def test_what_cannot_be_copied_is_named_once_in_each_run(caplog: pytest.LogCaptureFixture) -> None:
    class Locked:
        """Can be compared, but not copied."""

        calls = 0

        def __reduce__(self) -> Any:
            return (int, (self.calls,))

        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("it is the only one")

    def count(net: Any, hidden: Tensor) -> None:
        net.lock.calls += 1

    def made(net: Any) -> None:
        net.lock = Locked()

    for _ in range(2):
        ours = fleet(partial(Net, made, count))
        for t in range(ROUNDS):
            run_round(ours, t)
    warned = [r.getMessage() for r in caplog.records if "its steps change net.lock" in r.message]
    assert len(warned) == 2
