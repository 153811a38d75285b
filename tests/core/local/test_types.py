"""Types and memory of a client's tensors: kept as they are, or refused by name."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.utils.errors import UserError
from tests.small import fit, fleet_of, random_data, run_round

KEY = r"^model\.clients\.0\.model: "
SGD_TENTH = partial(SGD, lr=0.1)


class Net(nn.Module):
    """A layer, and what a test adds to it: `made` once, `step` in every forward pass."""

    def __init__(self, made: Callable[[Any], object], step: Any = None) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.step = step
        made(self)

    @override
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        if self.step is not None:
            hidden = self.step(self, hidden)
        return self.head(hidden)


def build(made: Callable[[Any], object], step: Any = None) -> Any:
    return ClientGroup(2, partial(Net, made, step))


FROZEN = [torch.bfloat16, torch.float16, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", FROZEN, ids=str)
@pytest.mark.parametrize("side_by_side", ["off", 2])
def test_a_frozen_tensor_keeps_its_type(dtype: Any, side_by_side: Any, tmp_path: Path) -> None:
    """In memory, in the forward pass, and on disk."""
    seen = set()

    def made(net: Any) -> None:
        values = torch.randn(4, 4).to(dtype)
        net.base = nn.Parameter(values, requires_grad=False)

    def step(net: Any, hidden: Tensor) -> Tensor:
        seen.add(net.base.dtype)
        found = hidden.to(dtype) @ net.base
        return (found.abs() if dtype.is_complex else found).float()

    federation = Federation(
        FedAvg(), [build(made, step)], optimizer=SGD_TENTH, side_by_side=side_by_side
    )
    fit(federation, random_data([5, 4]), tmp_path)
    assert seen == {dtype}
    frozen = federation.fleet.groups[0].live.frozen["net.base"]
    assert frozen.dtype == dtype
    (saved,) = load_file(tmp_path / "run" / "models" / "base.safetensors").values()
    assert saved.dtype == dtype
    assert torch.equal(saved, frozen)


@pytest.mark.parametrize(
    ("dtype", "fix"),
    [
        (torch.bfloat16, "bf16-mixed"),
        (torch.float16, "bf16-mixed"),
        (torch.float64, r"module\.float\(\)"),
        (torch.complex64, "view_as_real"),
    ],
)
def test_a_trained_parameter_of_another_type_is_refused(dtype: Any, fix: str) -> None:
    def made(net: Any) -> None:
        net.extra = nn.Parameter(torch.zeros(3, dtype=dtype))

    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(UserError, match=rf"{KEY}net\.extra is trained, and is {kind}; .*{fix}"):
        fleet_of([build(made)], FedAvg(), random_data([5, 4]))


BUFFERS = [torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", BUFFERS, ids=str)
def test_a_buffer_that_no_row_holds_is_refused(dtype: Any) -> None:
    def made(net: Any) -> None:
        net.register_buffer("scale", torch.ones(4, dtype=dtype))

    with pytest.raises(UserError, match=rf"{KEY}the buffer net\.scale is .*persistent=False"):
        fleet_of([build(made)], FedAvg(), random_data([5, 4]))


def counts(net: Any, hidden: Tensor) -> Tensor:
    if net.training:
        net.scale.mul_(1.125)
    scale = net.scale.abs() if net.scale.is_complex() else net.scale
    return hidden * scale.to(torch.float32)


KEPT = [
    (torch.bfloat16, True), (torch.float16, True), (torch.bfloat16, False), (torch.float64, False),
    (torch.complex64, False), (torch.complex128, False), (torch.float32, True),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "persistent"), KEPT, ids=str)
def test_buffers_of_other_types_are_those_of_torch(dtype: Any, persistent: bool) -> None:
    def made(net: Any) -> None:
        net.register_buffer("scale", torch.full((4,), 1.5, dtype=dtype), persistent=persistent)

    group = build(made, counts)
    ours = fleet_of(
        [group], Standalone(), random_data([5, 4]), optimizer=SGD_TENTH, side_by_side="off", steps=3
    )
    twins = [copy.deepcopy(ours.groups[0].module).float() for _ in range(2)]
    for twin in twins:
        twin.net.scale = twin.net.scale.to(dtype)  # type: ignore[union-attr, operator]
    for t in range(2):
        run_round(ours, t)
    for client, twin in enumerate(twins):
        twin.load_state_dict(dict(_initial(ours)), strict=False)
        optimizer = SGD(twin.parameters(), lr=0.1)
        ((x, y),) = ours.data.batches(ours.data.client_plan(client, 9))
        for step in range(6):
            if not persistent and step % 3 == 0:
                twin.net.scale.fill_(1.5)  # type: ignore[union-attr, operator]
            optimizer.zero_grad()
            F.cross_entropy(twin.net(x), y).backward()  # type: ignore[operator]
            optimizer.step()
        module = ours.bind(client)
        assert module.net.scale.dtype == dtype  # type: ignore[union-attr]
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(module.state_dict()[name], value, rtol=0, atol=1e-6)


def _initial(fleet: Any) -> Any:
    state = fleet.groups[0]
    return state.layout.floats.views(state.initial.floats).items()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_files_have_the_types_of_the_module(dtype: Any, tmp_path: Path) -> None:
    def made(net: Any) -> None:
        net.register_buffer("scale", torch.ones(4, dtype=dtype))

    federation = Federation(FedAvg(), [build(made)], optimizer=SGD_TENTH)
    fit(federation, random_data([5, 4]), tmp_path)
    saved = load_file(tmp_path / "run" / "models" / "server.safetensors")
    assert saved["scale"].dtype == dtype
    assert torch.equal(saved["scale"], torch.ones(4, dtype=dtype))


def buffer_of_buffer(net: Any) -> None:
    net.register_buffer("a", torch.zeros(20))
    net.register_buffer("b", net.a[:10])


def loose_view_of_parameter(net: Any) -> None:
    net.register_buffer("first", net.layer.weight.data[:2], persistent=False)


def rows_that_overlap(net: Any) -> None:
    whole = torch.randn(6, 4)
    net.one, net.other = nn.Parameter(whole[:4]), nn.Parameter(whole[3:])


def columns_that_overlap(net: Any) -> None:
    whole = torch.randn(4, 6)
    net.one, net.other = nn.Parameter(whole[:, :4]), nn.Parameter(whole[:, 3:])


def other_type(net: Any) -> None:
    net.register_buffer("words", net.layer.weight.data.view(torch.int32))


SHARED = [
    buffer_of_buffer, loose_view_of_parameter, rows_that_overlap, columns_that_overlap, other_type
]  # fmt: skip


@pytest.mark.parametrize("made", SHARED)
def test_tensors_in_one_anothers_memory_are_refused(made: Any) -> None:
    with pytest.raises(UserError, match=KEY + r".* shares memory with "):
        fleet_of([build(made)], FedAvg(), random_data([5, 4]))


def columns(net: Any) -> None:
    whole = torch.randn(4, 6)
    net.one, net.other = nn.Parameter(whole[:, :3]), nn.Parameter(whole[:, 3:])
    net.register_buffer("even", torch.zeros(8)[::2])


def expanded(net: Any) -> None:
    net.register_buffer("count", torch.zeros(1, dtype=torch.int64).expand(4))
    net.register_buffer("loose", torch.zeros(1).expand(4), persistent=False)


def several_names(net: Any) -> None:
    net.again = net.layer
    net.register_buffer("a", torch.zeros(3))
    net.register_buffer("b", net.a)


@pytest.mark.parametrize("made", [columns, expanded, several_names])
def test_what_shares_no_element_trains(made: Any) -> None:
    fleet = fleet_of([build(made)], FedAvg(), random_data([5, 4]))
    assert run_round(fleet, 0)["excluded"] == 0.0


def double_buffer(net: Any, hidden: Tensor) -> Tensor:
    net.scale = net.scale.double()
    return hidden


def double_parameter(net: Any, hidden: Tensor) -> Tensor:
    net.head.bias.data = net.head.bias.data.double().clone()
    return hidden


@pytest.mark.parametrize("step", [double_buffer, double_parameter])
def test_a_step_that_changes_a_type_is_refused(step: Any) -> None:
    def made(net: Any) -> None:
        net.register_buffer("scale", torch.ones(4))

    class Late(Net):
        @override
        def forward(self, x: Tensor) -> Tensor:
            found = self.head(self.layer(x))
            if self.training:
                step(self, found)
            return found

    fleet = fleet_of([ClientGroup(2, partial(Late, made))], FedAvg(), random_data([5, 4]))
    with pytest.raises(UserError, match=r"^model\.clients: a step assigns torch.float64"):
        run_round(fleet, 0)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "16-true"])
def test_another_precision_is_refused(precision: Any, tmp_path: Path) -> None:
    federation = Federation(FedAvg(), [build(lambda net: None)], optimizer=SGD_TENTH)
    with pytest.raises(UserError, match=rf"^trainer\.precision: {precision}; use 32"):
        fit(federation, random_data([5, 4]), tmp_path, precision=precision)
