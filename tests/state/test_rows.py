"""Rows and live modules: values flow both ways, and a bound module trains as any other."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.state.rows import LiveModule, ModelLayout, Row


class Net(nn.Module):
    """A parameter, BatchNorm, a frozen parameter, a bool buffer and a buffer that is not state."""

    seen: Tensor
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.head.bias.requires_grad_(False)
        self.register_buffer("seen", torch.tensor([True, False]))
        self.register_buffer("cache", torch.full((3,), 7.0), persistent=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.body(x))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Replacing(nn.Module):
    """Gives its buffer a new tensor in every step, where others write into the old one."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return x * self.weight


def live_of(module: nn.Module) -> LiveModule:
    return LiveModule(module, ModelLayout.of(module))


def row_of(layout: ModelLayout, seed: int) -> Row:
    """A row with random values in its tensors, zero padding, and small whole numbers."""
    rng = torch.Generator().manual_seed(seed)
    floats = torch.randn(layout.size, generator=rng) * layout.floats.live()
    integers = torch.randint(0, 2, (layout.integers.size,), generator=rng)
    return Row(floats, integers * layout.integers.live())


def batches(count: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(9)
    return [torch.randn(5, 3, generator=rng) for _ in range(count)]


def test_a_layout_has_parameters_first_then_float_buffers_and_integers_apart() -> None:
    layout = ModelLayout.of(Net())
    assert [e.name for e in layout.floats] == [
        "body.weight", "body.bias", "norm.weight", "norm.bias", "head.weight",
        "norm.running_mean", "norm.running_var",
    ]  # fmt: skip
    assert [e.name for e in layout.integers] == ["seen", "norm.num_batches_tracked"]
    assert layout.parameters == 5
    assert layout.floats.span(layout.parameters) == layout.floats.entries[5].offset
    assert layout.parameter_numel == 12 + 4 + 4 + 4 + 8
    assert layout.size == 7 * 32  # no tensor has more than 32 elements


def test_signatures_tell_architectures_apart() -> None:
    assert ModelLayout.of(Net()).signature() == ModelLayout.of(Net()).signature()
    assert ModelLayout.of(nn.Linear(2, 3)).signature() == [["weight", [3, 2]], ["bias", [3]]]
    other = ModelLayout.of(nn.Linear(3, 2)).signature()
    assert other != ModelLayout.of(nn.Linear(2, 3)).signature()


def test_bind_shows_the_row_and_writes_go_to_it() -> None:
    net = Net()
    live = live_of(net)
    row = row_of(live.layout, seed=1)
    expected = {k: v.clone() for k, v in live.layout.floats.views(row.floats).items()}
    live.bind(row)
    state = net.state_dict()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    with torch.no_grad():
        net.body.weight.fill_(3.0)
    assert live.layout.floats.views(row.floats)["body.weight"].eq(3.0).all()
    row.floats.zero_()
    assert not net.get_buffer("norm.running_var").any()


def test_integer_buffers_travel_by_bind_and_unbind() -> None:
    net = Net()
    live = live_of(net)
    row = row_of(live.layout, seed=1)
    views = live.layout.integers.views(row.integers)
    views["norm.num_batches_tracked"].fill_(41)
    views["seen"].copy_(torch.tensor([0, 1]))
    live.bind(row)
    assert net.get_buffer("norm.num_batches_tracked").item() == 41
    assert net.seen.tolist() == [False, True]
    net(batches(1)[0])
    net.seen.fill_(True)
    assert views["norm.num_batches_tracked"].item() == 41  # not before it is unbound
    live.unbind()
    assert views["norm.num_batches_tracked"].item() == 42
    assert views["seen"].tolist() == [1, 1]


def test_two_rows_of_one_module_do_not_touch_each_other() -> None:
    net = Net()
    live = live_of(net)
    rows = [row_of(live.layout, seed) for seed in (1, 2)]
    kept = rows[0].floats.clone(), rows[0].integers.clone()
    live.bind(rows[1])
    _train(net, 3)
    live.unbind()
    assert torch.equal(rows[0].floats, kept[0])
    assert torch.equal(rows[0].integers, kept[1])
    live.bind(rows[0])
    counts = live.layout.integers.views(kept[1])["norm.num_batches_tracked"]
    assert net.get_buffer("norm.num_batches_tracked").item() == counts.item()


def test_row_of_module_is_a_copy_of_its_own() -> None:
    net = Net()
    live = live_of(net)
    row = live.row_of_module()
    for name, view in live.layout.floats.views(row.floats).items():
        assert torch.equal(view, net.state_dict()[name])
    assert live.layout.integers.views(row.integers)["seen"].tolist() == [1, 0]
    with torch.no_grad():
        net.body.weight.zero_()
    assert live.layout.floats.views(row.floats)["body.weight"].any()


def test_buffers_that_are_not_state_stay_with_the_module() -> None:
    net = Net()
    live = live_of(net)
    live.bind(row_of(live.layout, seed=1))
    assert net.cache.tolist() == [7.0, 7.0, 7.0]


def test_a_replaced_buffer_flows_back_into_the_row() -> None:
    net = Replacing()
    live = live_of(net)
    rows = [live.row_of_module() for _ in range(2)]
    for row, value in zip(rows, (2.0, 4.0), strict=True):
        live.bind(row)
        net(torch.full((3, 2), value))
        live.unbind()
    means = [live.layout.floats.views(row.floats)["mean"].tolist() for row in rows]
    assert means == [[1.0, 1.0], [2.0, 2.0]]  # half of what each has seen, nothing of the other's


def test_frozen_parameters_are_in_no_row_and_not_trained() -> None:
    net = Net()
    live = live_of(net)
    names = {n for n, _ in net.named_parameters()}
    assert {id(p) for p in live.trainable} == {
        id(p) for n, p in net.named_parameters() if n != "head.bias"
    }
    assert {e.name for e in live.layout.floats.entries[: live.layout.parameters]} == (
        names - {"head.bias"}
    )
    before = net.head.bias.clone()
    live.bind(row_of(live.layout, seed=3))
    _train(net, 2)
    assert torch.equal(net.head.bias, before)


def test_parameters_that_steps_write_are_in_the_row() -> None:
    net = Net()
    net.written = ["head"]  # type: ignore[assignment]
    assert "head.bias" in {entry.name for entry in ModelLayout.of(net).floats}


def test_tied_weights_are_one_tensor_of_the_row_and_stay_tied() -> None:
    net = Tied()
    live = live_of(net)
    assert [e.name for e in live.layout.floats] == ["first.weight"]
    row = row_of(live.layout, seed=4)
    live.bind(row)
    assert net.second.weight is net.first.weight
    twin = Tied()
    with torch.no_grad():
        twin.first.weight.copy_(net.first.weight)
    _train(net, 2)
    _train(twin, 2)
    assert torch.equal(live.layout.floats.views(row.floats)["first.weight"], twin.first.weight)


@pytest.mark.parametrize("make", [Net, Tied])
def test_training_through_a_bound_row_is_training_the_module(make: type[nn.Module]) -> None:
    net = make()
    twin = copy.deepcopy(net)
    live = live_of(net)
    row = live.row_of_module()
    live.bind(row)
    _train(net, 4)
    live.unbind()
    _train(twin, 4)
    named = live.layout.floats.views(row.floats) | live.layout.integers.views(row.integers)
    trained = twin.state_dict()
    for name, value in named.items():
        assert torch.equal(value, trained[name].to(value.dtype)), name


def _train(net: nn.Module, steps: int) -> None:
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = SGD(trainable, lr=0.1, momentum=0.9)
    for x in batches(steps):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()


def test_more_rows_than_views_are_kept_for_are_bound_right() -> None:
    live = live_of(nn.Linear(2, 1))
    rows = [row_of(live.layout, seed) for seed in range(300)]
    for row in [*rows, *rows]:
        live.bind(row)
        assert live.module.get_parameter("weight").data_ptr() == row.floats.data_ptr()


def test_a_freed_rows_address_does_not_bring_its_views_back() -> None:
    live = live_of(nn.Linear(2, 1))
    for seed in range(50):
        row = row_of(live.layout, seed)  # the allocator hands freed addresses out again
        live.bind(row)
        expected = live.layout.floats.views(row.floats)["weight"]
        assert torch.equal(live.module.get_parameter("weight").detach(), expected)
