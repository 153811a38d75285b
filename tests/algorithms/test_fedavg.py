"""Federated averaging worked out by hand: two clients, two weights, one step."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from tests.small import (
    Line,
    data_of,
    fleet_of,
    has_global_model,
    module_of,
    random_data,
    row_held,
    run_round,
)

RATE = 0.5


def line_data() -> FederatedDataModule:
    """Client 0: one sample. Client 1: three. Targets are the labels."""
    x = torch.tensor([[1.0, 2.0], [1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    y = torch.tensor([1, 2, 3, 1])
    return data_of(x, y, [[0], [1, 2, 3]])


# From w = 0 the gradient of half the squared error is -sum y x:
# client 0: -(1, 2); client 1: -(2 + 2, 3) = -(4, 3). A step of size 1/2:
W_0 = (0.5, 1.0)
W_1 = (2.0, 1.5)


def weights_of(fleet: Fleet) -> list[float]:
    """Return the two weights of the server's model."""
    assert isinstance(fleet.algorithm, FedAvg)
    return fleet.algorithm.model.floats[:2].tolist()


@pytest.mark.parametrize(
    ("weights", "share_0", "share_1"), [("samples", 1 / 4, 3 / 4), ("uniform", 1 / 2, 1 / 2)]
)
def test_one_step_by_hand(weights: Any, share_0: float, share_1: float) -> None:
    optimizer = partial(SGD, lr=RATE)
    fleet = fleet_of([ClientGroup(2, Line)], FedAvg(weights), line_data(), optimizer=optimizer)
    metrics = run_round(fleet, 0)

    # Every number is a small multiple of 1/16, exact in float32.
    assert weights_of(fleet) == [
        share_0 * W_0[0] + share_1 * W_1[0],
        share_0 * W_0[1] + share_1 * W_1[1],
    ]
    # Half the squared error at w = 0: 1/2; (4 + 9 + 1) / 2 = 7, a mean over one and three samples.
    assert metrics["train_loss"] == (1 * 0.5 + 3 * 7.0) / 4
    assert metrics["participants"] == 2.0
    assert metrics["excluded"] == 0.0


class Levels(nn.Module):
    """Notes in buffers what it was given: the mean of the last batch, and counts of its samples."""

    level: Tensor
    count: Tensor
    lowest: Tensor

    def __init__(self, num_classes: int = 2, input_shape: tuple[int, ...] = (2,)) -> None:
        super().__init__()
        self.head = nn.Linear(input_shape[0], num_classes)
        self.register_buffer("level", torch.tensor(9.0))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("lowest", torch.tensor(-100))

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.level.copy_(x.detach().mean())
            self.count += len(x)
            self.lowest.copy_(-torch.tensor(len(x)))
        return self.head(x)


def levels_data() -> FederatedDataModule:
    """Client 0: one sample of ones; client 1: three of fives."""
    x = torch.tensor([1.0, 5.0, 5.0, 5.0])[:, None].repeat(1, 2)
    return data_of(x, torch.tensor([0, 1, 0, 1]), [[0], [1, 2, 3]])


def buffers_of(fleet: Fleet, client: int | None = None) -> tuple[float, int, int]:
    """Return level, count and lowest of a client's row; without a client, of the server."""
    assert isinstance(fleet.algorithm, FedAvg)
    row = fleet.algorithm.model.row if client is None else fleet.row(client)
    layout = fleet.groups[0].layout
    floats = layout.floats.views(row.floats)
    integers = layout.integers.views(row.integers)
    return (
        float(floats["net.level"]),
        int(integers["net.count"]),
        int(integers["net.lowest"]),
    )


@pytest.mark.parametrize(("weights", "level"), [("samples", (1 + 3 * 5) / 4), ("uniform", 3.0)])
def test_averaged_buffers_are_means_and_the_largest_integers(weights: Any, level: float) -> None:
    fleet = fleet_of([ClientGroup(2, Levels)], FedAvg(weights), levels_data())
    run_round(fleet, 0)
    assert buffers_of(fleet) == (level, 3, -1)  # the largest of -1 and -3

    run_round(fleet, 1)
    assert buffers_of(fleet) == (level, 6, -1)  # the client that has seen most counts on


def test_local_buffers_never_travel() -> None:
    fleet = fleet_of([ClientGroup(2, Levels)], FedAvg(buffers="local"), levels_data())
    for t in range(2):
        run_round(fleet, t)
    assert buffers_of(fleet, 0) == (1.0, 2, -1)
    assert buffers_of(fleet, 1) == (5.0, 6, -3)
    assert buffers_of(fleet) == (9.0, 0, -100)  # as it was built

    layout = fleet.groups[0].layout.floats
    first = layout.views(fleet.row(0).floats)["net.head.weight"]
    second = layout.views(fleet.row(1).floats)["net.head.weight"]
    assert not torch.equal(first, second)


def test_a_client_keeps_its_buffers_while_others_train() -> None:
    algorithm = FedAvg(buffers="local")
    fleet = fleet_of([ClientGroup(2, Levels)], algorithm, levels_data(), clients_per_round=1)
    rounds_of = [0, 0]
    for t in range(6):
        (participant,) = fleet.participants(t)
        rounds_of[participant] += 1
        run_round(fleet, t)
    assert min(rounds_of) > 0

    _, count_0, _ = buffers_of(fleet, 0)
    _, count_1, _ = buffers_of(fleet, 1)
    assert count_0 == 1 * rounds_of[0]
    assert count_1 == 3 * rounds_of[1]


def test_a_client_is_evaluated_with_the_servers_weights_and_its_own_buffers() -> None:
    fleet = fleet_of([ClientGroup(2, Levels)], FedAvg(buffers="local"), levels_data())
    run_round(fleet, 0)
    assert isinstance(fleet.algorithm, FedAvg)
    assert not has_global_model(fleet)

    server = fleet.groups[0].layout.floats.views(fleet.algorithm.model.floats)
    for client, level in ((0, 1.0), (1, 5.0)):
        state = module_of(fleet, client).state_dict()
        assert torch.equal(state["net.head.weight"], server["net.head.weight"])
        assert float(state["net.level"]) == level
        layout, row = row_held(fleet, client)
        assert float(layout.floats.views(row.floats)["net.level"]) == level


class Normed(nn.Module):
    def __init__(self, num_classes: int = 2, input_shape: tuple[int, ...] = (2,)) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(input_shape[0])
        self.head = nn.Linear(input_shape[0], num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def test_dropped_statistics_leave_batch_normalisation() -> None:
    data = random_data([4, 12])
    fleet = fleet_of([ClientGroup(2, Normed)], FedAvg(buffers="drop"), data)
    run_round(fleet, 0)

    layout = fleet.groups[0].layout
    assert [entry.name for entry in layout.floats] == [
        "net.norm.weight",
        "net.norm.bias",
        "net.head.weight",
        "net.head.bias",
    ]
    assert layout.integers.size == 0

    module = module_of(fleet, None)
    module.eval()
    x = data.dataset.load("test").x
    net = module.get_submodule("net")
    assert isinstance(net, Normed)
    normal = F.batch_norm(x, None, None, net.norm.weight, net.norm.bias, training=True)
    assert torch.equal(module(x), net.head(normal))


def test_clients_that_do_not_take_part_do_not_count() -> None:
    fleet = fleet_of([ClientGroup(2, Line)], FedAvg(), line_data(), clients_per_round=1)
    (chosen,) = fleet.participants(0)
    run_round(fleet, 0)
    assert weights_of(fleet) == list(W_0 if chosen == 0 else W_1)

    drawn = {tuple(fleet.participants(t)) for t in range(30)}
    assert drawn == {(0,), (1,)}


def test_groups_of_one_shape_are_one_federation() -> None:
    mlp = partial(MLP, hidden=(6,))
    one_group = [ClientGroup(3, mlp)]
    two_groups = [ClientGroup(1, mlp, name="first"), ClientGroup(2, mlp, name="second")]

    rows = []
    for groups in (one_group, two_groups):
        algorithm = FedAvg()
        fleet = fleet_of(groups, algorithm, random_data([5, 3, 4]), optimizer=partial(SGD, lr=0.1))
        for t in range(2):
            run_round(fleet, t)
        rows.append(algorithm.model.floats)
    assert torch.equal(rows[0], rows[1])
