"""What travels of a server model: some tensors, slices of heads, rows of labels and of no label."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import ceil

import pytest
import torch
from lightfed_kernels import Layout
from torch import Tensor, nn
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.algorithms.width.units import reordered
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.utils.errors import UserError
from tests.small import data_of, fleet_of

HEADS, WIDTH = 2, 8


class Heads(nn.Module):
    """A layer of two heads, of which a narrow model keeps the leading part each."""

    slice_groups = {"q.weight": (HEADS, 1), "q.bias": (HEADS,), "o.weight": (1, HEADS)}

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, inner)
        self.o = nn.Linear(inner, width)


class Model(nn.Module):
    """Tokens of three words and a mask; heads; a class for every word."""

    label_rows = ("embedding.weight",)

    def __init__(
        self, num_classes: int = 3, *, rate: float = 1.0, inner: int | None = None
    ) -> None:
        super().__init__()
        width = ceil(WIDTH * rate)
        self.embedding = nn.Embedding(num_classes + 1, width)
        self.heads = Heads(width, width if inner is None else inner)
        self.head = nn.Linear(width, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.sum(1).long() % self.head.out_features
        hidden = self.embedding(tokens)
        return self.head(hidden + self.heads.o(self.heads.q(hidden)))


def fleet(algorithm: FedAvg | HeteroFL, *groups: ClientGroup) -> Fleet:
    x, y = torch.arange(24.0).reshape(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    return fleet_of(list(groups), algorithm, data_of(x, y, [[0, 3], [1, 4, 2, 5]]))


WIDE = ClientGroup(1, Model)
SLIM = ClientGroup(1, Model, rate=0.5)


def numbered() -> tuple[HeteroFL, Fleet, Layout]:
    """Return a fleet in which every element of the server's model is another number."""
    algorithm = HeteroFL(mask=False)
    fed = fleet(algorithm, WIDE, SLIM)
    layout = algorithm.model.layout.floats
    algorithm.model.floats.copy_(torch.arange(float(layout.size)) * layout.live())
    return algorithm, fed, layout


def fill(fed: Fleet, client: int, value: float) -> None:
    """Give all elements of a client's row one value; padding stays 0."""
    fed.row(client).floats.fill_(value).mul_(fed.state(client).layout.floats.live())


def test_of_heads_a_narrow_client_has_the_leading_part_of_each() -> None:
    algorithm, fed, layout = numbered()

    fed.send(algorithm.model, [0, 1])

    server = layout.views(algorithm.model.floats)
    slim = fed.state(1).layout.floats.views(fed.row(1).floats)
    rows = torch.tensor([0, 1, 4, 5])  # two of the four units of each head
    assert torch.equal(slim["net.heads.q.weight"], server["net.heads.q.weight"][rows, :4])
    assert torch.equal(slim["net.heads.q.bias"], server["net.heads.q.bias"][rows])
    assert torch.equal(slim["net.heads.o.weight"], server["net.heads.o.weight"][:4, rows])
    assert torch.equal(slim["net.head.weight"], server["net.head.weight"][:, :4])


@pytest.mark.parametrize("surplus", [True, False])
def test_declared_label_rows_and_the_row_of_no_label(surplus: bool) -> None:
    algorithm = HeteroFL(mask=False, mask_token=surplus)
    fed = fleet(algorithm, WIDE, SLIM)
    algorithm.model.floats.fill_(9.0)
    fed.send(algorithm.model, [0, 1])
    fill(fed, 0, 1.0)  # holds label 0
    fill(fed, 1, 3.0)  # holds labels 1 and 2, and the leading half of the columns
    fed.merge([0, 1], into=algorithm.model, weights="uniform")

    server = algorithm.model.layout.floats.views(algorithm.model.floats)
    label_0, label_1, label_2, mask = server["net.embedding.weight"].tolist()
    assert label_0 == [1.0] * 8
    assert label_1 == label_2 == [3.0] * 4 + [9.0] * 4
    if surplus:
        assert mask == [2.0] * 4 + [1.0] * 4  # the mean of both, and the wide client alone
    else:
        assert mask == [9.0] * 8


def test_only_the_named_tensors_travel_and_count() -> None:
    algorithm = FedAvg()
    fed = fleet(algorithm, ClientGroup(2, Model))
    layout = algorithm.model.layout.floats
    algorithm.model.floats.copy_(5.0 * layout.live())
    fed.send(algorithm.model, [0, 1])
    totals_before = fed.ledger.totals.copy()
    fill(fed, 0, 1.0)
    fill(fed, 1, 3.0)
    names = ["net.head.weight", "net.head.bias"]

    fed.send(algorithm.model, [0], tensors=names)
    for name, tensor in layout.views(fed.row(0).floats).items():
        assert (tensor == (5.0 if name in names else 1.0)).all()

    fed.merge([0, 1], into=algorithm.model, weights="uniform", tensors=names)
    for name, tensor in layout.views(algorithm.model.floats).items():
        assert (tensor == (4.0 if name in names else 5.0)).all()  # (5 + 3) / 2

    sent = fed.ledger.totals - totals_before
    head_bytes = 4.0 * (3 * WIDTH + 3)
    assert sent[:, fed.ledger.DOWN].tolist() == [head_bytes, 0.0]
    assert sent[:, fed.ledger.UP].tolist() == [head_bytes, head_bytes]


def test_a_client_without_whole_heads_is_refused_by_name() -> None:
    broken = ClientGroup(1, partial(Model, inner=3), rate=0.5)
    with pytest.raises(
        UserError, match=r"group Model-0.5 .*net.heads.q.weight is \[3, 4\], which leaves"
    ):
        fleet(HeteroFL(mask=False), WIDE, broken)


def rolled(width: int) -> Tensor:
    return torch.arange(width).roll(3)


def shuffled(width: int) -> Tensor:
    return torch.randperm(width, generator=torch.Generator().manual_seed(width))


@pytest.mark.parametrize("order", [rolled, shuffled])
def test_other_slices_than_the_leading_ones(order: Callable[[int], Tensor]) -> None:
    """All axes of WIDTH units are reordered; of heads, the leading part of each after that."""
    algorithm, fed, layout = numbered()
    floats_before = algorithm.model.floats.clone()
    server = layout.views(algorithm.model.floats)
    before = layout.views(floats_before)

    # The positions that the slim client has of each axis.
    units = order(WIDTH)[:4]
    heads = order(WIDTH)[torch.tensor([0, 1, 4, 5])]
    positions = {
        "net.embedding.weight": (torch.arange(4), units),
        "net.heads.q.weight": (heads, units),
        "net.heads.q.bias": (heads,),
        "net.heads.o.weight": (units, heads),
        "net.heads.o.bias": (units,),
        "net.head.weight": (torch.arange(3), units),
        "net.head.bias": (torch.arange(3),),
    }
    with reordered(fed, algorithm.model, order):
        fed.send(algorithm.model, [1])
        slim = fed.state(1).layout.floats.views(fed.row(1).floats)
        for name, axes in positions.items():
            slice_of_server = before[name][torch.meshgrid(*axes, indexing="ij")]
            assert torch.equal(slim[name], slice_of_server), name
    assert torch.equal(algorithm.model.floats, floats_before)

    with reordered(fed, algorithm.model, order):
        fed.send(algorithm.model, [1])
        fill(fed, 1, -1.0)
        fed.merge([1], into=algorithm.model, weights="uniform")

    for name, axes in positions.items():
        expected = before[name].clone()
        expected[torch.meshgrid(*axes, indexing="ij")] = -1.0
        has_label_rows = name in ("net.embedding.weight", "net.head.weight", "net.head.bias")
        if has_label_rows:
            expected[0] = before[name][0]  # the client holds labels 1 and 2
        assert torch.equal(server[name], expected), name


def test_a_model_is_in_its_own_order_after_an_error() -> None:
    algorithm, fed, _ = numbered()
    before = algorithm.model.floats.clone()
    context = reordered(fed, algorithm.model, rolled)
    with suppress(KeyError), context:
        assert not torch.equal(algorithm.model.floats, before)
        raise KeyError
    assert torch.equal(algorithm.model.floats, before)
