"""Measured session times: what is kept of them, and that clients are placed by them."""

from functools import partial
from typing import Any

import pytest
import torch
from typing_extensions import override

from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.fleet import Fleet
from lightfed.distributed.collectives import Ranks
from lightfed.distributed.placement import Rates
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import LocalWork
from lightfed.local.session import Report
from lightfed.networks.mlp import MLP
from lightfed.utils.stopwatch import Stopwatch
from tests.small import CPU, fleet_of, random_data, run_round

WIDE, NARROW = ClientGroup(2, partial(MLP, hidden=(64,))), ClientGroup(2, partial(MLP, hidden=(2,)))
SIZES = (6, 9, 3, 5)


class Seat(Ranks):
    """One of two ranks, both of which have built the same networks; nothing else may be said."""

    def __init__(self, rank: int) -> None:
        super().__init__(CPU)
        self.rank, self.world = rank, 2

    @override
    def gather(self, objects: list[Any], what: str = "") -> list[Any]:
        assert what == "the start of the clients' networks"
        return objects * 2


def rates_of(seconds: dict[int, float]) -> Rates:
    rates = Rates()
    for group, second in seconds.items():
        rates.add(group, samples=1, seconds=second)
    return rates


def fleet_on(rank: int, seconds: dict[int, float], **work: int) -> Fleet:
    """A fleet of a rank whose groups are measured to take so many seconds a sample."""
    data = random_data(SIZES, batch_size=2)
    data.prepare(clients=4, seed=0, device=CPU)
    fleet = Fleet(
        [WIDE, NARROW],
        HeteroFL(),
        data,
        ranks=Seat(rank),
        work=LocalWork(**work),
    )
    fleet.places.rates = rates_of(seconds)
    return fleet


def owners(fleet: Fleet) -> list[int]:
    fleet.open_round()
    fleet.places.open(range(4))
    return [fleet.places.owner[client] for client in range(4)]


def test_a_rate_is_the_median_of_seconds_a_sample() -> None:
    """Without sessions that say nothing; there are rates for all that are asked for, or none."""
    rates = rates_of({0: 1.0, 2: 3.0})
    for samples, seconds in ((10, 1.0), (4, 80.0), (5, 1.0), (0, 1.0), (5, 0.0), (5, torch.inf)):
        rates.add(1, samples=samples, seconds=seconds)
    assert rates.of([2, 0]) == {0: 1.0, 2: 3.0}
    assert rates.of([1, 1]) == {1: 0.2}
    assert rates.of([1, 3]) is None


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # FLOPs: the wide ones are 32 times as long, so 1 (9 samples) is alone with nobody but 3.
        ({}, [1, 0, 1, 1]),
        ({1: 7.0}, [1, 0, 1, 1]),  # a group without a rate leaves all to FLOPs
        # 6 and 9 at 1 s, 3 and 5 at 7 s: 35 | 21, then 9 joins the 21, and 6 the 30.
        ({0: 1.0, 1: 7.0}, [1, 1, 1, 0]),
    ],
)
def test_clients_are_placed_alike_on_both_ranks(
    seconds: dict[int, float], expected: list[int]
) -> None:
    assert owners(fleet_on(0, seconds)) == expected
    assert owners(fleet_on(1, seconds)) == expected


def test_sessions_of_as_many_steps_cost_alike() -> None:
    # Batches of 2, 3 steps: 6 samples of all, but 1.8 a batch of the 9 in 5, 1.5 of the 3 in 2.
    fleet = fleet_on(0, {0: 1.0, 1: 1.0}, steps=3)
    assert fleet.places.costs(range(4)) == pytest.approx({0: 6, 1: 5.4, 2: 4.5, 3: 5})
    assert fleet.places.costs([0], {0: 1}) == {0: 2.0}


def test_the_next_round_is_placed_by_what_reports_say() -> None:
    fleet = fleet_on(0, {})
    reports = [Report(k, SIZES[k], seconds=SIZES[k] * (1.0 if k < 2 else 7.0)) for k in range(4)]
    fleet.training.train = lambda *_, **__: reports  # type: ignore[method-assign]
    fleet.train(range(4), 0)
    assert fleet.places.costs(range(4)) == {0: 6.0, 1: 9.0, 2: 21.0, 3: 35.0}


def test_a_session_is_timed() -> None:
    fleet = fleet_of([WIDE, NARROW], Standalone(), random_data(SIZES, batch_size=2))
    run_round(fleet, 0)
    kept = fleet.places.rates._recent
    assert {group: len(seconds) for group, seconds in kept.items()} == {0: 2, 1: 2}
    assert all(0 < seconds < 60 for recent in kept.values() for seconds in recent)


def test_a_client_that_draws_its_level_is_timed_at_that_level() -> None:
    levels = [ClientGroup(2, partial(MLP, hidden=(8,)), level=level) for level in ("a", "e")]
    algorithm = HeteroFL("dynamic")
    fleet = fleet_of(levels, algorithm, random_data(SIZES))
    drawn = [algorithm.draw_level(fleet, k, 5) for k in range(4)]
    assert drawn.count(0) == 3  # of two who have it at home
    run_round(fleet, 5)
    kept = {group: len(seconds) for group, seconds in fleet.places.rates._recent.items()}
    assert kept == {level: drawn.count(level) for level in set(drawn)}


@pytest.mark.gpu
def test_a_gpu_times_its_own_work() -> None:
    device = torch.device("cuda")
    x = torch.ones(2048, 2048, device=device)
    stopwatch = Stopwatch(device)
    y = x @ x
    stopwatch.stop()
    y[0, 0].item()  # later than both events
    assert 0 < stopwatch.seconds() < 60
