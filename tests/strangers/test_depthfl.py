"""DepthFL against a recorded run of the first author's code, its bytes, and the promises."""

import re
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.testing import conformance
from lightfed.utils.errors import UserError
from tests.small import fleet_of, module_of, random_data, run_round
from tests.strangers.depthfl import DepthFL, DepthNet
from tests.strangers.golden import MATRIX, Recorded

WIDTHS = (8, 16, 12, 10, 8)


def mlp(num_classes: int = 5, rate: float = 1.0, widths: tuple[int, ...] = WIDTHS) -> DepthNet:
    """A quarter of the four blocks or more."""
    depth = round(4 * rate)
    blocks = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
    heads = [nn.Linear(width, num_classes) for width in widths[1:]]
    return DepthNet(blocks[:depth], heads[:depth])


class Convolutions(DepthNet):
    """One to four blocks with BatchNorm."""

    def __init__(self, num_classes: int = 10, rate: float = 1.0) -> None:
        channels, depth = (1, 4, 4, 6, 6), round(4 * rate)
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in pairwise(channels)
        ]
        heads = [
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))
            for width in channels[1:]
        ]
        super().__init__(blocks[:depth], heads[:depth])


def test_the_recorded_run(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = DepthFL()
    groups = [ClientGroup(1, mlp, rate=depth / 4) for depth in (4, 1, 2, 3, 4)]
    blocks = {f"levels.{i}.0.0": f"block{i + 1}.0" for i in range(4)}
    names = blocks | {f"levels.{i}.1": f"head{i + 1}" for i in range(4)}
    run = Recorded("depthfl", "mlp_kd", algorithm, groups, names=names)
    algorithm.model.floats.copy_(run.row("init"))
    first = run.about["rounds"][0]["curr_round_counter"] - 1
    for t, _ in run.rounds(monkeypatch, first):
        expected = run.row(f"r{t}/server")
        torch.testing.assert_close(algorithm.model.floats, expected, rtol=0, atol=3e-6)
    module = module_of(run.fleet, None)
    ensemble, expected = module(run.tensors["data/0/x"][:6]), run.tensors["final/ensemble"]
    torch.testing.assert_close(ensemble, expected, rtol=0, atol=5e-6)


def fleet(*clients: ClientGroup) -> Fleet:
    return fleet_of(list(clients), DepthFL(), random_data([6, 6]))


def plain(num_classes: int = 3, *, widths: tuple[int, ...]) -> DepthNet:
    return mlp(num_classes, len(widths) / 4, (4, *widths))


def test_a_client_sends_and_receives_the_layers_that_it_has() -> None:
    fed = fleet(*(ClientGroup(1, partial(plain, widths=(8, 6, 4)[:depth])) for depth in (3, 2)))
    run_round(fed, 0)
    sizes = [4 * state.layout.floats.numel for state in fed.groups]
    assert fed.ledger.totals[:, :2].tolist() == [[size, size] for size in sizes]
    assert sizes == [4 * numbers for numbers in (8 * 5 + 6 * 9 + 4 * 7 + 3 * 21, 40 + 54 + 3 * 16)]


@pytest.mark.parametrize(
    ("widths", "found"),
    [
        ((12, 6), "net.levels.0.0.0.weight is [12, 4], which is no slice of [8, 4]"),
        ((8, 6, 4, 4), "the server model lacks net.levels.3.0.0.bias, net.levels.3.0.0.weight"),
    ],
)
def test_a_client_that_is_no_part_of_the_deepest_is_refused(
    widths: tuple[int, ...], found: str
) -> None:
    with pytest.raises(
        UserError, match=re.escape(f"group plain-1 does not fit into the server model: {found}")
    ):
        fleet(*(ClientGroup(1, partial(plain, widths=w)) for w in ((8, 6, 4), widths)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", MATRIX)
def test_the_promises(ranks: tuple[int, ...]) -> None:
    conformance(DepthFL, model=Convolutions, levels="abc", ranks=ranks)
