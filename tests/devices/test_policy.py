"""What the server waits for, by hand: deadlines, quorums, late updates, clients that leave."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbuff import FedBuff
from lightfed.algorithms.fednova import FedNova
from lightfed.algorithms.flexifed.strategies import MaxCommon
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.peers.dpsgd import DPSGD
from lightfed.algorithms.pfedme import PFedMe
from lightfed.algorithms.topology.topology import Ring
from lightfed.algorithms.width.fedrolex import FedRolex
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.devices.devices import Bernoulli, Device, Devices
from lightfed.devices.policy import LearnedDeadline, Policy
from lightfed.devices.timing import clock_of
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.small import Line, data_of, fleet_of, random_data, run_round

mlp = partial(MLP, hidden=(6,))


class Quiet(FedAvg):
    """A class that does not say itself what its parent says."""


def line(policy: Policy | None, *seconds: float, **more: Any) -> Fleet:
    """Make a federation of clients with one sample each.

    Client k has y = 2^(k + 1) x. Its session goes half of the way from the model it receives to
    that slope, and its model takes `seconds[k]` to be sent.
    """
    count = len(seconds)
    x = torch.tensor([[1.0, 0.0]]).repeat(count, 1)
    y = 2 ** torch.arange(1, count + 1)
    data = data_of(x, y, [[k] for k in range(count)])
    groups = [ClientGroup(1, Line, name=str(k)) for k in range(count)]

    size = 8  # bytes of a model
    links = {str(k): Device(up=size / duration) for k, duration in enumerate(seconds)}
    devices = replace(more.pop("devices", Devices()), groups=links)
    return fleet_of(groups, FedAvg("uniform"), data, devices=devices, policy=policy, **more)


def rounds(fed: Fleet, count: int) -> list[tuple[float, float, float]]:
    """Return the server's weight, virtual time and the number of late updates after each round."""
    results = []
    for t in range(count):
        metrics = run_round(fed, t)
        model: Any = fed.algorithm.model
        weight = model.floats[0].item()
        results.append((weight, metrics["virtual_time"], metrics.get("late", 0.0)))
    return results


def test_late_updates_are_dropped_and_their_clients_finish_first() -> None:
    """Client 2 sends at 4 s, and is asked again at 6 s, when it is late once more."""
    results = rounds(line(Policy(deadline=3.0), 1.0, 2.0, 4.0), 3)
    first = (1 + 2) / 2
    second = ((first + 2) / 2 + (first + 4) / 2) / 2
    third = ((second + 2) / 2 + (second + 4) / 2) / 2
    assert results == [(first, 3.0, 1.0), (second, 5.0, 0.0), (third, 8.0, 1.0)]


def test_a_deadline_learns_from_arrivals() -> None:
    """By hand: clients take 1, 2 and 4 s, and half of the sessions shall be in time.

    Round 0 waits for all: d_1 is the median of 1, 2, 4. In round 1 client 2 is late; 1 and 2 have
    arrived, whose median is 1. In round 2, which client 2 misses, client 1 is late. By the end of
    round 3 all three have arrived, at 8, 8 and 8.5 s.
    """
    fed = line(Policy(deadline=LearnedDeadline(0.5)), 1.0, 2.0, 4.0)
    rows = [run_round(fed, t) for t in range(4)]
    assert [row["virtual_time"] for row in rows] == [4.0, 6.0, 7.5, 8.5]
    assert [row["late"] for row in rows] == [0, 1, 1, 0]
    assert [row["deadline"] for row in rows] == [4.0, 2.0, 1.5, 1.25]
    assert run_round(fed, 4)["deadline"] == 0.5 * 1.25 + 0.5 * 2.0


def test_a_learned_deadline_ends_a_round_that_asks_more_clients() -> None:
    """All three are asked and two awaited, whose durations alone are known: client 2 is not."""
    policy = Policy(deadline=LearnedDeadline(1.0, weight=1.0), over_select=0.5)
    fed = line(policy, 1.0, 2.0, 4.0, clients_per_round=2)
    rows = [run_round(fed, t) for t in range(2)]
    assert [row["virtual_time"] for row in rows] == [2.0, 4.0]
    assert [row["deadline"] for row in rows] == [2.0, 2.0]


def test_a_learned_deadline_goes_on_after_a_stop() -> None:
    policy = Policy(deadline=LearnedDeadline(0.5))
    whole, stopped, resumed = (line(policy, 1.0, 2.0, 4.0) for _ in range(3))
    rows = [run_round(whole, t) for t in range(5)]
    for t in range(3):
        run_round(stopped, t)
    resumed.clock.load_state_dict(stopped.clock.state_dict())
    again = [run_round(resumed, t) for t in (3, 4)]
    for name in ("virtual_time", "late", "deadline"):
        assert [row[name] for row in again] == [row[name] for row in rows[3:]]


def test_no_client_may_meet_a_learned_deadline() -> None:
    """Nobody can mend it: the server waits for the first one."""
    deadline = LearnedDeadline(0.01, weight=1.0)
    fed = line(Policy(deadline=deadline), 1.0, 3.0, clients_per_round=1, seed=3)
    rows = [run_round(fed, t) for t in range(6)]
    assert any(row["deadline"] < 3 for row in rows)
    assert all(row["late"] == 0 for row in rows)


@pytest.mark.parametrize("name", ["quantile", "weight"])
@pytest.mark.parametrize("value", [0.0, 1.5, float("nan")])
def test_a_learned_deadline_has_shares(name: str, value: float) -> None:
    settings = {"quantile": 0.9, "weight": 0.5} | {name: value}
    with pytest.raises(UserError, match=f"model.policy.deadline.{name}: .* above 0 and at most 1"):
        line(Policy(deadline=LearnedDeadline(**settings)), 1.0, 2.0)


def test_the_server_asks_more_clients_than_it_waits_for() -> None:
    fed = line(Policy(over_select=0.5), 1.0, 2.0, 4.0, clients_per_round=2)
    assert fed.participants(0) == [0, 1, 2]
    assert rounds(fed, 1) == [((1 + 2) / 2, 2.0, 1.0)]


def test_a_quorum_with_a_grace_window() -> None:
    assert rounds(line(Policy(quorum=1), 1.0, 2.0, 4.0), 1) == [(1.0, 1.0, 2.0)]
    assert rounds(line(Policy(quorum=1, grace=1.5), 1.0, 2.0, 4.0), 1) == [(1.5, 2.5, 1.0)]

    results = rounds(line(Policy(quorum=2, grace=9.0), 1.0, 2.0, 4.0), 1)
    assert results == [(pytest.approx((1 + 2 + 4) / 3), 4.0, 0.0)]


def test_an_update_that_is_kept_is_one_of_the_model_where_it_arrives() -> None:
    """FedAsync, every 1 and 1.5 s: a client's step is the one from the model that it received."""
    results = rounds(line(Policy(quorum=1, late="keep"), 1.0, 1.5), 3)
    first = 1.0  # client 0 from 0; client 1 has gone from 0 to 2
    second = first + 2  # at 1.5 s; client 0 has gone from 1 to 1.5
    third = second + 0.5  # at 2 s
    assert results == [(first, 1.0, 1.0), (second, 1.5, 1.0), (third, 2.0, 1.0)]


def test_old_updates_weigh_less() -> None:
    """After 2 s both clients arrive, client 1 a round late: 1 and 2^-e, rounded to 2^-16."""
    for exponent in (0.0, 1.0):
        policy = Policy(deadline=1.0, late="keep", exponent=exponent)
        first, second = rounds(line(policy, 1.0, 2.0), 2)
        assert first == (1.0, 1.0, 1.0)

        weight = 2**-exponent
        mean = (1.5 + weight * 3) / (1 + weight)
        assert second == (pytest.approx(mean, abs=1e-6), 2.0, 0.0)


def test_a_server_that_keeps_updates_waits_for_the_first() -> None:
    assert rounds(line(Policy(deadline=0.5, late="keep"), 1.0, 2.0), 1) == [(1.0, 1.0, 1.0)]


def uneven(algorithm: Algorithm, **settings: Any) -> Fleet:
    """Five clients whose devices and data differ."""
    speeds = (800.0, 170.0, 390.0, 105.0, 610.0)
    groups = [ClientGroup(1, mlp, name=str(k)) for k in range(len(speeds))]
    devices = Devices(groups={str(k): Device(flops=f, up=99.0) for k, f in enumerate(speeds)})
    settings = {"devices": devices, "optimizer": partial(SGD, lr=0.1)} | settings
    return fleet_of(groups, algorithm, random_data([5, 9, 4, 7, 6]), **settings)


def test_a_quorum_of_k_with_kept_updates_is_fedbuff() -> None:
    """With weights that do not depend on the age: w <- w - 1 / K sum_k (w_{s_k} - w_k)."""
    policy = Policy(quorum=2, late="keep", exponent=0.0)
    fedavg = FedAvg("uniform")
    fedbuff = FedBuff(2, exponent=0.0)
    fed = uneven(fedavg, policy=policy)
    buffered = uneven(fedbuff)
    for t in range(12):
        metrics = run_round(fed, t)
        expected = run_round(buffered, t)
        assert metrics["virtual_time"] == pytest.approx(expected["virtual_time"], rel=1e-13)
        torch.testing.assert_close(fedavg.model.floats, fedbuff.model.floats, rtol=0, atol=2e-6)


def test_who_leaves_sends_nothing_but_has_computed() -> None:
    fed = uneven(FedAvg(), policy=Policy(dropout=0.5))
    leaving = clock_of(fed).policy.leaving(range(5), of=5, t=0, seed=0)
    assert 0 < len(leaving) < 5

    metrics = run_round(fed, 0)
    assert metrics["participants"] == 5 - len(leaving)
    for k in range(5):
        up, down, flops = fed.ledger.totals[k]
        assert (up == 0) == (k in leaving)
        assert down > 0
        assert flops > 0
        assert fed.usable(k) == (k not in leaving)


def test_partial_work_is_a_share_of_the_steps() -> None:
    """It is computed, and costs FLOPs, whether or not it is sent."""
    leaving = Policy(dropout=0.6).leaving(range(4), of=4, t=0, seed=0)
    assert leaving
    expected = [20] * 4
    for client, share in leaving.items():
        expected[client] = max(1, int(20 * share))

    for policy in (Policy(dropout=0.6, partial="keep"), Policy(dropout=0.6, partial="lose")):
        data = random_data([40] * 4, batch_size=2)
        sgd = partial(SGD, lr=0.1)
        fed = fleet_of(
            [ClientGroup(4, mlp)], FedNova(), data, optimizer=sgd, devices=Devices(), policy=policy
        )
        run_round(fed, 0)
        flops = fed.ledger.totals[:, 2]
        assert (20 * flops / flops.max()).round().tolist() == expected


def test_a_round_that_chance_leaves_empty_lasts_until_the_deadline() -> None:
    """Client 0 alone could meet it, and is not asked in some rounds."""
    fed = line(Policy(deadline=1.5), 1.0, 2.0, 4.0, clients_per_round=1)
    late = [count for _, _, count in rounds(fed, 8)]
    assert any(late)
    assert not all(late)


def test_clients_that_are_not_there_are_not_asked() -> None:
    fed = line(None, *[1.0] * 6, devices=Devices(availability=Bernoulli(0.4)), clients_per_round=3)
    sizes = set()
    for t in range(20):
        run_round(fed, t)
        fed.open_round()
        sizes.add(len(fed.participants(t + 1)))
    assert sizes == {1, 2, 3}


@pytest.mark.parametrize(
    ("algorithm", "policy", "line_of"),
    [
        (partial(DPSGD, Ring()), Policy(deadline=1.0), "model.policy: clients exchange models"),
        (FedBuff, Policy(deadline=1.0), "model.policy: FedBuff's server waits"),
        (partial(FedRolex, window="random"), Policy(quorum=1), "model.policy: the server takes"),
        (PFedMe, Policy(quorum=1, late="keep"), "model.policy.late: keep, but all clients train"),
        (MaxCommon, Policy(quorum=1, late="keep"), "model.policy.late: keep, but clients average"),
        (Quiet, Policy(quorum=1, late="keep"), "model.policy.late: keep, but Quiet does not say"),
        (FedAvg, Policy(deadline=0.0), "model.policy.deadline: 0"),
        (FedAvg, Policy(quorum=9), "model.policy.quorum: 9 of 3 clients"),
        (FedAvg, Policy(over_select=0.5), "model.policy.over_select: 0.5 more than 3 of 3"),
        (FedAvg, Policy(grace=1.0), "model.policy.grace: given without a quorum"),
        (FedAvg, Policy(late="keep"), "model.policy.late: keep, but no update can be late"),
        (FedAvg, Policy(dropout=1.0), "model.policy.dropout: 1.0; give a probability below 1"),
    ],
)
def test_policies_that_are_refused(algorithm: Any, policy: Policy, line_of: str) -> None:
    group, data = ClientGroup(3, mlp), random_data([3] * 3)
    with pytest.raises(UserError) as stated:
        fleet_of([group], algorithm(), data, devices=Devices(), policy=policy)
    assert str(stated.value).startswith(line_of)


def test_settings_without_effect_are_refused() -> None:
    def fleet(algorithm: Algorithm, devices: Devices, policy: Policy | None = None) -> Fleet:
        group = ClientGroup(3, mlp)
        return fleet_of([group], algorithm, random_data([3] * 3), devices=devices, policy=policy)

    fed = fleet(DisPFL(Ring(), rounds=2), Devices(availability=Bernoulli(0.5)))
    with pytest.raises(UserError, match=r"model\.devices\.availability: given, but the method"):
        run_round(fed, 0)

    fed = fleet(HeteroFL("dynamic"), Devices(), Policy(quorum=1, late="keep"))
    with pytest.raises(UserError, match=r"model\.policy\.late: keep, but clients change"):
        run_round(fed, 0)
