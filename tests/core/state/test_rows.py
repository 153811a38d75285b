"""Rows and live modules: values flow both ways, and a bound module trains as any other."""

import copy
from itertools import chain

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
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return x * self.weight + self.mean


def live_of(module: nn.Module) -> LiveModule:
    return LiveModule(module, ModelLayout.of(module))


def row_of(layout: ModelLayout, seed: int) -> Row:
    """Return a row with random values in its tensors, zero padding, and small whole numbers."""
    rng = torch.Generator().manual_seed(seed)
    floats = torch.randn(layout.size, generator=rng) * layout.floats.live()
    integers = torch.randint(0, 2, (layout.integers.size,), generator=rng)
    return Row(floats, integers * layout.integers.live())


def named(layout: ModelLayout, row: Row) -> dict[str, Tensor]:
    """Return all tensors of a row by name."""
    return layout.floats.views(row.floats) | layout.integers.views(row.integers)


def batches(count: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(9)
    return [torch.randn(5, 3, generator=rng) for _ in range(count)]


def train(net: nn.Module, steps: int) -> None:
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = SGD(trainable, lr=0.1, momentum=0.9)
    for x in batches(steps):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()


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


def test_frozen_parameters_are_in_the_row_only_if_steps_write_them() -> None:
    net = Net()
    assert "head.bias" not in {entry.name for entry in ModelLayout.of(net).floats}
    assert all(p is not net.head.bias for p in live_of(net).trainable)

    net.written = ["head"]  # type: ignore[assignment]
    assert "head.bias" in {entry.name for entry in ModelLayout.of(net).floats}


@pytest.mark.parametrize("make", [Net, Tied, Replacing])
def test_rows_that_take_turns_in_a_module_train_as_modules_of_their_own(
    make: type[nn.Module],
) -> None:
    net = make()
    live = live_of(net)
    rows = [live.row_of_module(), row_of(live.layout, seed=1)]
    # A module of its own for each row.
    twins = [copy.deepcopy(net) for _ in rows]
    twins[1].load_state_dict(named(live.layout, rows[1]), strict=False)

    for steps in (3, 1):
        for row, twin in zip(rows, twins, strict=True):
            live.bind(row)
            train(net, steps)
            live.unbind()
            train(twin, steps)

    for row, twin in zip(rows, twins, strict=True):
        expected = twin.state_dict()
        for name, value in named(live.layout, row).items():
            assert torch.equal(value, expected[name].to(value.dtype)), name


def test_tied_weights_are_one_tensor_of_the_row() -> None:
    assert [e.name for e in ModelLayout.of(Tied()).floats] == ["first.weight"]


def test_many_rows_are_bound_right_and_freed_ones_do_not_come_back() -> None:
    """More rows than views are kept for; and the allocator hands freed addresses out again."""
    live = live_of(nn.Linear(2, 1))
    lasting = [row_of(live.layout, seed) for seed in range(300)]
    freed_at_once = (row_of(live.layout, seed) for seed in range(50))

    for row in chain(lasting, lasting, freed_at_once):
        live.bind(row)
        weight = live.module.get_parameter("weight").detach()
        assert torch.equal(weight, live.layout.floats.views(row.floats)["weight"])
