"""FedBCD-I: who trains offline, how long, and the pull of those that get through."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.fedbcd.fedbcdi import FedBCDI
from lightfed.algorithms.fedbcd.hierarchy import Phase
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.client_group import ClientGroup
from lightfed.utils.errors import UserError
from tests.algorithms.fedbcd.fedbcd_clouds import Counted, Normed, fleet, servers
from tests.small import Line, data_of, fleet_of, run_round

KEY = "model.algorithm.init_args"


def nothing(devices: int) -> FederatedDataModule:
    """Data on which Line has no gradient."""
    zeros = torch.zeros(devices, 2), torch.zeros(devices, dtype=torch.long)
    return data_of(*zeros, [[k] for k in range(devices)])


class Scripted(FedBCDI):
    """(round, server) -> the active devices, all that are available with their K, seconds."""

    def __init__(self, script: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.script = script

    @override
    def phase(self, fed: Fleet, server: int, t: int) -> Phase:
        active, units, busy = self.script[t, server]
        return Phase(active, sorted(units), units, dict.fromkeys(active, busy))


@pytest.mark.parametrize(("compatibility", "trainings"), [(False, 4), (True, 5)])
def test_a_device_that_nobody_hears_pauses(compatibility: bool, trainings: int) -> None:
    """Device 1 is available in all rounds; it gets through in round 7, and not before.

    It trains in four rounds, pauses, is pulled without having trained, and has four more.
    """
    heard = 7
    script = {
        (t, 0): ([1 if t == heard else 0], {0: 1, 1: 1}, 1.0) for t in range(heard + 8)
    }  # fmt: skip
    algorithm = Scripted(
        script, servers=1, active=1, available=2, compatibility=compatibility, gamma=0.5
    )
    data = data_of(torch.ones(2, 2), torch.ones(2, dtype=torch.long), [[0], [1]])
    fed = fleet_of([ClientGroup(2, Line)], algorithm, data, optimizer=partial(SGD, lr=0.01))
    moved = []
    for t in range(heard + 8):
        before = fed.row(1).floats.clone()
        z = servers(fed)[0].clone()
        run_round(fed, t)
        moved.append(not torch.equal(fed.row(1).floats, before))
        if t == heard:
            pulled = before - 0.5 * (before - z)
            torch.testing.assert_close(fed.row(1).floats, pulled, rtol=0, atol=1e-7)
            assert algorithm.offline.tolist() == [1, 0]
    expected = [t < trainings or heard <= t <= heard + trainings for t in range(heard + 8)]
    assert moved == expected


def test_a_round_in_which_all_pause() -> None:
    """With a patience of 1, device 0 of each server is heard once more, and nobody trains."""
    script = {(t, n): ([2 * n], {2 * n + 1: 1, 2 * n: 1}, 1.0) for t in range(2) for n in range(2)}
    algorithm = Scripted(script, servers=2, active=1, available=2, patience=1)
    data = data_of(torch.ones(4, 2), torch.ones(4, dtype=torch.long), [[0], [1], [2], [3]])
    fed = fleet_of([ClientGroup(4, Counted)], algorithm, data, optimizer=partial(SGD, lr=0.1))
    algorithm.offline.fill_(1)
    Counted.steps = 0
    metrics = run_round(fed, 0)
    assert Counted.steps == 0
    assert metrics["participants"] == 0.0
    assert metrics["bytes_up"] == metrics["bytes_down"] == 2 * 8.0
    assert algorithm.offline.tolist() == [0, 1, 0, 1]
    assert run_round(fed, 1)["participants"] == 2.0


def test_statistics_are_of_the_active_devices() -> None:
    algorithm = FedBCDI(1, 2, 4, gamma=[1.0, 3.0], steps=(1, 3))
    fed = fleet(algorithm, model=Normed, sizes=[2] * 4, optimizer=partial(ASPG, lr=0.1))
    run_round(fed, 0)
    layout = fed.groups[0].layout.floats
    active = algorithm.queue[0].tolist()
    weights = torch.tensor([algorithm.gamma(i) for i in active])
    for name in ("net.layers.0.running_mean", "net.layers.0.running_var"):
        stored = torch.stack([layout.views(fed.row(i).floats)[name] for i in active])
        expected = weights @ stored / weights.sum()
        found = layout.views(algorithm.clouds.of(0).floats)[name]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_frozen_parameters_are_not_projected_by_the_pull() -> None:
    class Half(Line):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = torch.nn.Parameter(torch.full((3,), 7.0), requires_grad=False)
            self.written = ["frozen"]  # in the row, as a step may write it

    algorithm = FedBCDI(1, 1, 1, gamma=0.5, steps=(2, 2))
    fed = fleet_of([ClientGroup(1, Half)], algorithm, nothing(1), optimizer=partial(ASPG, lr=0.1))
    run_round(fed, 0)
    layout = fed.groups[0].layout.floats
    assert layout.views(fed.row(0).floats)["frozen"].tolist() == [7.0] * 3
    assert layout.views(algorithm.clouds.of(0).floats)["frozen"].tolist() == [7.0] * 3


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"patience": 0}, "patience: 0;"),
        ({"available": 4}, "available: 4 of the 3 devices"),
        # The active devices alone are in a step: at most the two of the largest gamma.
        ({"server_step": "sum"}, "server_lr: 0.6, times the sum of gamma, 3.8,"),
        ({"server_step": "sum", "wait": 1}, "server_lr: 0.6, times the sum of gamma, 1.9,"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], line: str) -> None:
    given = {"available": 3, "server_lr": 0.6, "gamma": [1.0, 0.5, 0.9]} | settings
    with pytest.raises(UserError, match=rf"^model\.algorithm\.init_args\.{line}"):
        fleet(FedBCDI(2, 2, **given))
