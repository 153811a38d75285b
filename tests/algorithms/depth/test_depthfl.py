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
    """The first blocks of linear layers."""
    depth = round((len(widths) - 1) * rate)
    blocks = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
    heads = [nn.Linear(width, num_classes) for width in widths[1:]]
    return DepthNet(blocks[:depth], heads[:depth])


@pytest.mark.parametrize(
    "name",
    ["mlp_kd", "mlp_kd_feddyn", "mlp_fedavg_nokd", "mlp_inclusive", "conv_bn_kd_uncovered"],
)
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    about = settings_of("depthfl", name)
    how, net, most = about["fit_config"], about["model"], about["model"]["depth_max"]
    algorithm = DepthFL(how["alpha"] * how["feddyn"], how["kd"], not how["extended"])
    model: Any = partial(mlp, widths=(net["input"][0], *net["hidden"]))
    if net["kind"] == "conv":
        model = partial(DepthConv, channels=net["hidden"], pools=1)
    depths = [most, *about["client_depth"]]
    groups = [ClientGroup(1, model, rate=depth / most) for depth in depths]
    names = {f"blocks.{i}.{j}": f"block{i + 1}.{j}" for i in range(4) for j in range(2)}
    last = ".2" if net["kind"] == "conv" else ""
    names |= {f"heads.{i}{last}": f"head{i + 1}" for i in range(4)}
    run = Recorded("depthfl", name, algorithm, groups, names=names)
    monkeypatch.setattr(run.fleet, "clients", len(depths) - 1)  # the first is not one of them
    first = about["rounds"][0]["curr_round_counter"] - 1
    for t, _ in run.rounds(monkeypatch, first):
        close(algorithm.model.floats, run.row(f"r{t}/server"))
        if algorithm.alpha:
            close(algorithm.h, run.row(f"r{t}/h")[: len(algorithm.h)])
    module = module_of(run.fleet, None)
    module.eval()
    ensemble, expected = module(run.tensors["data/0/x"][:6]), run.tensors["final/ensemble"]
    torch.testing.assert_close(ensemble, expected, rtol=0, atol=5e-6)


def fleet(*clients: ClientGroup) -> Fleet:
    return fleet_of(list(clients), DepthFL(), random_data([6, 6]))


def plain(num_classes: int = 3, *, widths: tuple[int, ...]) -> DepthNet:
    return mlp(num_classes, 1.0, (4, *widths))


def test_a_client_sends_and_receives_the_layers_that_it_has() -> None:
    fed = fleet(*(ClientGroup(1, partial(plain, widths=(8, 6, 4)[:depth])) for depth in (3, 2)))
    run_round(fed, 0)
    sizes = [4 * state.layout.floats.numel for state in fed.groups]
    assert fed.ledger.totals[:, :2].tolist() == [[size, size] for size in sizes]
    assert sizes == [4 * numbers for numbers in (8 * 5 + 6 * 9 + 4 * 7 + 3 * 21, 40 + 54 + 3 * 16)]


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
    with pytest.raises(
        UserError, match=re.escape(f"group plain-1 does not fit into the server model: {found}")
    ):
        fleet(*(ClientGroup(1, partial(plain, widths=w)) for w in ((8, 6, 4), widths)))


def test_a_network_without_classifiers_on_the_way_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.clients"):
        fleet(ClientGroup(2, MLP))


def test_without_feddyn_clients_keep_nothing() -> None:
    fed = fleet_of([ClientGroup(2, partial(plain, widths=(4,)))], DepthFL(0.0), random_data([6, 6]))
    run_round(fed, 0)
    assert fed.states() is None
