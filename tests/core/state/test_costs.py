"""Bytes and FLOPs against sums made by hand."""

import csv
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightfed_kernels import Layout
from lightfed_kernels.masks import pack_mask
from torch import nn
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.peers.my1 import My1
from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.topology.topology import Ring
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.devices.device_clock import DeviceClock
from lightfed.devices.devices import Devices
from lightfed.local.client_group import ClientGroup
from lightfed.networks.cnn import Conv
from lightfed.networks.mlp import MLP
from lightfed.state.costs import Ledger, MaskedFlops, forward_flops, weight_uses
from tests.core.engine.spy import SIZES, data, federation
from tests.small import Line, data_of, fit, fleet_of, random_data, run_round

# The bytes of a number.
FLOAT = 4
INTEGER = 8

mlp = partial(MLP, hidden=(8,))  # 4 -> 8 -> 3
MLP_PARAMETERS = 4 * 8 + 8 + 8 * 3 + 3
MLP_FLOPS = 2 * (4 * 8 + 8 * 3)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def test_counting_leaves_the_module_as_it_was() -> None:
    net = Normed()
    net.train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    forward_flops(net, torch.ones(2, 4))
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_round_of_fedavg_by_hand() -> None:
    sizes = [6, 9, 3, 5]
    epochs = 3
    fed = fleet_of(
        [ClientGroup(4, mlp)],
        FedAvg(),
        random_data(sizes, batch_size=4),
        clients_per_round=2,
        epochs=epochs,
    )
    participants = fed.participants(0)

    sums = run_round(fed, 0)

    model_bytes = FLOAT * MLP_PARAMETERS
    assert sums["bytes_down"] == sums["bytes_up"] == 2 * model_bytes
    # Backward costs twice the forward pass.
    flops = {client: 3 * MLP_FLOPS * epochs * sizes[client] for client in participants}
    assert sums["flops"] == sum(flops.values())
    for client in range(4):
        if client in participants:
            expected = [model_bytes, model_bytes, flops[client]]
        else:
            expected = [0, 0, 0]
        assert fed.ledger.totals[client].tolist() == expected


def test_totals_add_up_over_rounds_and_sums_start_again() -> None:
    data = random_data([6, 9, 3, 5], batch_size=4)
    fed = fleet_of([ClientGroup(4, mlp)], FedAvg(), data, fraction=0.5)

    rounds = [run_round(fed, t) for t in range(5)]

    totals = fed.ledger.totals.sum(axis=0)
    assert sum(sums["bytes_up"] for sums in rounds) == totals[Ledger.UP]
    assert sum(sums["bytes_down"] for sums in rounds) == totals[Ledger.DOWN]
    assert sum(sums["flops"] for sums in rounds) == totals[Ledger.FLOPS]
    assert rounds[0]["bytes_up"] == rounds[4]["bytes_up"] == 2 * FLOAT * MLP_PARAMETERS


@pytest.mark.parametrize(
    ("buffers", "sent"),
    [
        ("average", FLOAT * (4 + 4 + 12 + 3 + 4 + 4) + INTEGER * 1),
        ("local", FLOAT * (4 + 4 + 12 + 3)),
        ("drop", FLOAT * (4 + 4 + 12 + 3)),
    ],
)
def test_buffers_cost_what_is_sent_of_them(buffers: str, sent: int) -> None:
    algorithm = FedAvg(buffers=buffers)  # type: ignore[arg-type]
    fed = fleet_of([ClientGroup(2, Normed)], algorithm, random_data([6, 6]))
    sums = run_round(fed, 0)
    assert (sums["bytes_up"], sums["bytes_down"]) == (2 * sent, 2 * sent)


def test_a_level_of_heterofl_pays_for_its_own_slice() -> None:
    model = partial(Conv, hidden=(8, 12))
    groups = [ClientGroup(1, model, level="a"), ClientGroup(1, model, level="c")]
    data = data_of(torch.zeros(6, 1, 4, 4), torch.arange(6) % 3, [range(0, 3), range(3, 6)])
    fed = fleet_of(groups, HeteroFL(), data)

    run_round(fed, 0)

    def parameters(one: int, two: int) -> int:
        convolutions = (9 * one + one) + (9 * one * two + two)
        norms = 2 * one + 2 * two
        head = 3 * two + 3
        return convolutions + norms + head

    def flops(one: int, two: int) -> int:
        on_4_x_4_pixels = 9 * one * 16
        on_2_x_2_pixels = 9 * one * two * 4
        head = two * 3
        return 2 * (on_4_x_4_pixels + on_2_x_2_pixels + head)

    for client, widths in enumerate([(8, 12), (2, 3)]):
        up, down, computed = fed.ledger.totals[client].tolist()
        assert up == down == FLOAT * parameters(*widths)
        assert computed == 3 * flops(*widths) * 3  # three passes, three samples


def test_nothing_is_sent_without_an_exchange() -> None:
    fed = fleet_of([ClientGroup(2, mlp)], Standalone(), random_data([6, 6]))
    sums = run_round(fed, 0)
    assert (sums["bytes_up"], sums["bytes_down"]) == (0.0, 0.0)
    assert sums["flops"] == 3 * MLP_FLOPS * 12


@pytest.mark.parametrize(
    ("algorithm", "gradients"),
    [
        (My1(Ring(), density=1.0, rounds=9), (1, 1)),
        (DisPFL(Ring(), density=1.0, rounds=9, regrow="gradient"), (0, 1)),
        (DisPFL(Ring(), density=1.0, rounds=9), (0, 0)),
    ],
    ids=["my1", "gradient", "random"],
)
def test_gradients_that_masks_grow_by_cost_a_step_each(
    algorithm: DisPFL, gradients: tuple[int, int]
) -> None:
    fed = fleet_of([ClientGroup(2, mlp)], algorithm, random_data([3, 9], batch_size=4))
    for t, count in enumerate(gradients):
        assert run_round(fed, t)["flops"] == 3 * MLP_FLOPS * (3 + 9 + count * (3 + 4))


def test_attention_is_counted() -> None:
    class Attention(nn.Module):
        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    # Of a sample: T x T products of D for the weights, T x D of T for the values, two FLOPs each.
    assert forward_flops(Attention(), torch.zeros(2, 5, 8)) == 2 * 2 * 5 * 5 * 8


# Weights with their layer, a batch of two, and how often a sample uses an element.
USES: dict[str, tuple[nn.Module, tuple[int, ...], float]] = {
    "linear": (nn.Linear(7, 5), (2, 7), 1),
    "linear_on_a_sequence": (nn.Linear(7, 5), (2, 6, 7), 6),
    "conv": (nn.Conv2d(2, 5, 3, padding=1), (2, 2, 6, 8), 6 * 8),
    "conv_with_a_stride": (nn.Conv2d(2, 5, 3, padding=1, stride=(1, 2)), (2, 2, 6, 8), 6 * 4),
    "grouped_conv": (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 5, 5), 3 * 3),
    "conv_of_one_dimension": (nn.Conv1d(3, 4, 3), (2, 3, 9), 7),
}


@pytest.mark.parametrize(("layer", "shape", "expected"), USES.values(), ids=USES)
def test_an_element_of_a_weight_is_used_at_every_place_of_the_output(
    layer: nn.Module, shape: tuple[int, ...], expected: float
) -> None:
    net = nn.Sequential(layer)
    batch = torch.zeros(shape)
    assert weight_uses(net, batch) == {"0.weight": expected}

    dense = forward_flops(net, batch)
    layout = Layout.build([(name, tuple(p.shape)) for name, p in net.named_parameters()])
    masked_flops = MaskedFlops(net, batch, layout, dense)

    mask = layout.live()
    num_elements = net.get_parameter("0.weight").numel()
    assert masked_flops(pack_mask(mask)) == dense == 2 * expected * num_elements
    mask[:4] = False
    assert masked_flops(pack_mask(mask)) == dense - 2 * expected * 4
    assert masked_flops(pack_mask(torch.zeros_like(mask))) == 0


def test_a_layer_that_is_called_twice_is_used_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not self.training
            return self.layer(self.drop(self.layer(x)))

    net = Twice()
    for _ in range(2):  # nothing stays behind
        assert weight_uses(net, torch.zeros(2, 4)) == {"layer.weight": 2.0}
        assert net.training
        assert not net.layer._forward_hooks


def test_flops_that_nobody_knows_are_none_under_a_mask_too() -> None:
    class Steps(Line):
        """Its steps do not call `forward`, which it does not have."""

        forward = nn.Module.forward

        @override
        def training_step(self, batch: tuple[torch.Tensor, ...], batch_idx: int) -> torch.Tensor:
            return ((batch[0] @ self.w - batch[1]) ** 2).sum()

    data = data_of(torch.eye(2).repeat(2, 1), torch.zeros(4).long(), [[0, 1], [2, 3]])
    fed = fleet_of([ClientGroup(2, Steps)], DisPFL(Ring(), static=True), data)
    assert run_round(fed, 0)["flops"] == 0


LIMIT = 2**53  # the next whole number is no float64


def test_bytes_stay_exact_beyond_what_floats_count() -> None:
    ledger = Ledger(2)
    ledger.sent_up([0, 1, 0], [LIMIT, 3, 1])
    ledger.sent_up(0, 1.0)
    ledger.sent_down([0, 1], LIMIT - 1)
    ledger.sent_down([0, 1], [2, 4])
    ledger.sent_between_servers(LIMIT)
    ledger.sent_between_servers(1)
    assert ledger.bytes.tolist() == [[LIMIT + 2, LIMIT + 1], [3, LIMIT + 3]]
    assert ledger.close_round() == {
        "bytes_up": LIMIT + 5, "bytes_down": 2 * LIMIT + 4, "flops": 0.0, "server_bytes": LIMIT + 1
    }  # fmt: skip
    assert ledger.close_round() == {"bytes_up": 0, "bytes_down": 0, "flops": 0.0}


def test_a_message_has_no_part_of_a_byte() -> None:
    ledger = Ledger(3)
    ledger.sent_up([0, 1, 2], [0.5, 2.0, 2.25])
    assert ledger.bytes[:, ledger.UP].tolist() == [1, 2, 3]


def test_a_run_goes_on_counting_bytes_where_it_was(tmp_path: Path) -> None:
    """Every byte beyond 2^53 is in the checkpoint, in the tables and in the prices of a clock."""
    first = federation(fraction=1.0)
    count = Ledger.sent_up
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "sent_up", lambda own, k, n: count(own, k, np.add(n, LIMIT)))
        fit(first, data(), tmp_path, rounds=1)
    size = int(first.fleet.ledger.bytes[0, 0]) - LIMIT
    assert 0 < size < 1000

    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    second = federation(fraction=1.0)
    fit(second, data(), tmp_path, rounds=2, ckpt_path=last)
    assert second.fleet.ledger.bytes[:, 0].tolist() == [LIMIT + 2 * size] * len(SIZES)

    rows = list(csv.DictReader((tmp_path / "run" / "clients.csv").open()))
    for t, expected in ((1, LIMIT + size), (2, LIMIT + 2 * size)):
        sent = [int(row["bytes_up"]) for row in rows if row["round"] == str(t)]
        assert sent == [expected] * len(SIZES)
    rounds = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    sent_per_client = [int(row["bytes_up"]) / len(SIZES) for row in rounds]
    assert sent_per_client == [LIMIT + size, size]


def test_a_clock_prices_every_byte() -> None:
    ledger = Ledger(1)
    devices = Devices(down=1.0)
    clock = DeviceClock(devices, devices.of({"all": 1}, seed=0), ledger, sampled=1)
    ledger.sent_down(0, LIMIT)
    assert clock.session_seconds([0], up=0, purpose=None).tolist() == [float(LIMIT)]
    ledger.sent_down(0, 1)
    assert clock.session_seconds([0], up=0, purpose=None).tolist() == [1.0]
