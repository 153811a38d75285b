"""DepthFL against recorded runs of the first author's code, its bytes."""

import re
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from lightfed.algorithms.depth.depthfl import DepthFL
from lightfed.algorithms.depth.networks import DepthConv, DepthNet
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.algorithms.recorded import Recorded, close, settings_of
from tests.small import fleet_of, module_of, random_data, run_round

WIDTHS = (8, 16, 12, 10, 8)


def mlp(num_classes: int = 5, rate: float = 1.0, widths: tuple[int, ...] = WIDTHS) -> DepthNet:
    """Return the first blocks of a network of linear layers."""
    depth = round((len(widths) - 1) * rate)
    blocks = []
    heads = []
    for inputs, outputs in pairwise(widths):
        blocks.append(nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU()))
        heads.append(nn.Linear(outputs, num_classes))
    return DepthNet(blocks[:depth], heads[:depth])


@pytest.mark.parametrize(
    "name",
    ["mlp_kd", "mlp_kd_feddyn", "mlp_fedavg_nokd", "mlp_inclusive", "conv_bn_kd_uncovered"],
)
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    about = settings_of("depthfl", name)
    settings = about["fit_config"]
    network = about["model"]
    is_conv = network["kind"] == "conv"
    model: Any = partial(mlp, widths=(network["input"][0], *network["hidden"]))
    if is_conv:
        model = partial(DepthConv, channels=network["hidden"], pools=1)

    # A first client of the full depth makes the server's model; it never takes part.
    full_depth = network["depth_max"]
    depths = [full_depth, *about["client_depth"]]
    groups = [ClientGroup(1, model, rate=depth / full_depth) for depth in depths]
    names = {}
    for i in range(4):
        names[f"blocks.{i}.0"] = f"block{i + 1}.0"
        names[f"blocks.{i}.1"] = f"block{i + 1}.1"
        names[f"heads.{i}.2" if is_conv else f"heads.{i}"] = f"head{i + 1}"

    alpha = settings["alpha"] * settings["feddyn"]
    algorithm = DepthFL(alpha, settings["kd"], not settings["extended"])
    run = Recorded("depthfl", name, algorithm, groups, names=names)
    monkeypatch.setattr(run.fleet, "seen", range(1, len(depths)))
    first_round = about["rounds"][0]["curr_round_counter"] - 1
    for t, _ in run.rounds(monkeypatch, first_round):
        close(algorithm.model.floats, run.row(f"r{t}/server"))
        if algorithm.alpha:
            close(algorithm.h, run.row(f"r{t}/h")[: len(algorithm.h)])

    module = module_of(run.fleet, None)
    module.eval()
    ensemble = module(run.tensors["data/0/x"][:6])
    torch.testing.assert_close(ensemble, run.tensors["final/ensemble"], rtol=0, atol=5e-6)


def fleet(*clients: ClientGroup) -> Fleet:
    return fleet_of(list(clients), DepthFL(), random_data([6, 6]))


def plain(num_classes: int = 3, *, widths: tuple[int, ...]) -> DepthNet:
    return mlp(num_classes, 1.0, (4, *widths))


def test_a_client_sends_and_receives_the_layers_that_it_has() -> None:
    deep = ClientGroup(1, partial(plain, widths=(8, 6, 4)))
    shallow = ClientGroup(1, partial(plain, widths=(8, 6)))
    fed = fleet(deep, shallow)
    run_round(fed, 0)

    # Blocks of 4 to 8, 8 to 6 and 6 to 4 units, and heads to 3 classes, each with biases.
    two_blocks = 8 * (4 + 1) + 6 * (8 + 1)
    two_heads = 3 * (8 + 1) + 3 * (6 + 1)
    of_shallow = 4 * (two_blocks + two_heads)
    of_deep = of_shallow + 4 * (4 * (6 + 1) + 3 * (4 + 1))
    assert [4 * state.layout.floats.numel for state in fed.groups] == [of_deep, of_shallow]
    down_and_up = fed.ledger.totals[:, :2].tolist()
    assert down_and_up == [[of_deep, of_deep], [of_shallow, of_shallow]]


@pytest.mark.parametrize(
    ("widths", "found"),
    [
        ((12, 6), "net.blocks.0.0.weight is [12, 4], which is no slice of [8, 4]"),
        ((8, 6, 4, 4), "the server model lacks net.blocks.3.0.bias, net.blocks.3.0.weight"),
    ],
)
def test_a_client_that_is_no_part_of_the_deepest_is_refused(
    widths: tuple[int, ...], found: str
) -> None:
    deepest = ClientGroup(1, partial(plain, widths=(8, 6, 4)))
    other = ClientGroup(1, partial(plain, widths=widths))
    message = f"group plain-1 does not fit into the server model: {found}"
    with pytest.raises(UserError, match=re.escape(message)):
        fleet(deepest, other)


def test_a_network_without_classifiers_on_the_way_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.clients"):
        fleet(ClientGroup(2, MLP))


def test_without_feddyn_clients_keep_nothing() -> None:
    fed = fleet_of([ClientGroup(2, partial(plain, widths=(4,)))], DepthFL(0.0), random_data([6, 6]))
    run_round(fed, 0)
    assert fed.states() is None
