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
from lightfed.algorithms.scaffold import SCAFFOLD
from lightfed.algorithms.topology.topology import Ring
from lightfed.algorithms.width.fedrolex import FedRolex
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.devices.devices import Bernoulli, Device, Devices
from lightfed.devices.policy import Policy
from lightfed.devices.timing import clock_of
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.small import Line, data_of, fleet_of, random_data, run_round

mlp = partial(MLP, hidden=(6,))


def line(policy: Policy | None, *seconds: float, **more: Any) -> Fleet:
    """Client k has y = 2^(k + 1) x, goes half of the way to it, and sends in `seconds`."""
    n = len(seconds)
    x, y = torch.tensor([[1.0, 0.0]]).repeat(n, 1), 2 ** torch.arange(1, n + 1)
    groups = [ClientGroup(1, Line, name=str(k)) for k in range(n)]
    links = {str(k): Device(up=8 / s) for k, s in enumerate(seconds)}
    data = data_of(x, y, [[k] for k in range(n)])
    algorithm = more.pop("algorithm", None) or FedAvg("uniform")
    devices = replace(more.pop("devices", Devices()), groups=links)
    return fleet_of(groups, algorithm, data, devices=devices, policy=policy, **more)


def rounds(fed: Fleet, count: int) -> list[tuple[float, float, float]]:
    """The server's weight, virtual time and late updates after each round."""
    found = []
    for t in range(count):
        metrics = run_round(fed, t)
        model: Any = fed.algorithm.model
        found.append((model.floats[0].item(), metrics["virtual_time"], metrics.get("late", 0.0)))
    return found


def test_late_updates_are_dropped_and_their_clients_finish_first() -> None:
    """Client 2 sends at 4 s, and is asked again at 6 s, when it is late once more."""
    found = rounds(line(Policy(deadline=3.0), 1.0, 2.0, 4.0), 3)
    first = (1 + 2) / 2
    second = ((first + 2) / 2 + (first + 4) / 2) / 2
    third = ((second + 2) / 2 + (second + 4) / 2) / 2
    assert found == [(first, 3.0, 1.0), (second, 5.0, 0.0), (third, 8.0, 1.0)]


def test_the_server_asks_more_clients_than_it_waits_for() -> None:
    fed = line(Policy(over_select=0.5), 1.0, 2.0, 4.0, clients_per_round=2)
    assert fed.participants(0) == [0, 1, 2]
    assert rounds(fed, 1) == [((1 + 2) / 2, 2.0, 1.0)]


def test_a_quorum_with_a_grace_window() -> None:
    assert rounds(line(Policy(quorum=1), 1.0, 2.0, 4.0), 1) == [(1.0, 1.0, 2.0)]
    assert rounds(line(Policy(quorum=1, grace=1.5), 1.0, 2.0, 4.0), 1) == [(1.5, 2.5, 1.0)]
    found = rounds(line(Policy(quorum=2, grace=9.0), 1.0, 2.0, 4.0), 1)
    assert found == [(pytest.approx((1 + 2 + 4) / 3), 4.0, 0.0)]


def test_an_update_that_is_kept_is_one_of_the_model_where_it_arrives() -> None:
    """FedAsync, every 1 and 1.5 s: a step of a client is that from the model it received."""
    found = rounds(line(Policy(quorum=1, late="keep"), 1.0, 1.5), 3)
    first = 1.0  # client 0 from 0; client 1 has gone from 0 to 2
    second = first + 2  # at 1.5 s; client 0 has gone from 1 to 1.5
    third = second + 0.5  # at 2 s
    assert found == [(first, 1.0, 1.0), (second, 1.5, 1.0), (third, 2.0, 1.0)]


def test_old_updates_weigh_less() -> None:
    """After 2 s both clients arrive, client 1 a round late: 1 and 2^-e, rounded to 2^-16."""
    for exponent in (0.0, 1.0):
        policy = Policy(deadline=1.0, late="keep", exponent=exponent)
        found = rounds(line(policy, 1.0, 2.0), 2)
        assert found[0] == (1.0, 1.0, 1.0)
        w = 2**-exponent
        assert found[1] == (pytest.approx((1.5 + w * 3) / (1 + w), abs=1e-6), 2.0, 0.0)


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
    ours, theirs = FedAvg("uniform"), FedBuff(2, exponent=0.0)
    fed, other = uneven(ours, policy=policy), uneven(theirs)
    for t in range(12):
        found, expected = run_round(fed, t), run_round(other, t)
        assert found["virtual_time"] == pytest.approx(expected["virtual_time"], rel=1e-13)
        torch.testing.assert_close(ours.model.floats, theirs.model.floats, rtol=0, atol=2e-6)


def test_who_leaves_sends_nothing_but_has_computed() -> None:
    fed = uneven(FedAvg(), policy=Policy(dropout=0.5))
    leaving = clock_of(fed).policy.leaving(range(5), of=5, t=0, seed=0)
    assert 0 < len(leaving) < 5
    found = run_round(fed, 0)
    assert found["participants"] == 5 - len(leaving)
    for k in range(5):
        up, down, flops = fed.ledger.totals[k]
        assert (up == 0) == (k in leaving)
        assert down > 0
        assert flops > 0
        assert fed.usable(k) == (k not in leaving)


def test_partial_work_is_a_share_of_the_steps() -> None:
    steps = {}
    for partial_work in ("keep", "lose"):
        fed = fleet_of(
            [ClientGroup(4, mlp)], FedNova(), random_data([40] * 4, batch_size=2),
            optimizer=partial(SGD, lr=0.1), devices=Devices(),
            policy=Policy(dropout=0.6, partial=partial_work),  # type: ignore[arg-type]
        )  # fmt: skip
        leaving = Policy(dropout=0.6).leaving(range(4), of=4, t=0, seed=0)
        run_round(fed, 0)
        flops = fed.ledger.totals[:, 2]
        steps[partial_work] = (20 * flops / flops.max()).round().tolist()
        assert leaving
    expected = [max(1, int(20 * leaving[k])) if k in leaving else 20 for k in range(4)]
    assert steps == {"keep": expected, "lose": expected}


def test_a_round_that_chance_leaves_empty_lasts_until_the_deadline() -> None:
    """Client 0 alone could meet it, and is not asked in some rounds."""
    fed = line(Policy(deadline=1.5), 1.0, 2.0, 4.0, clients_per_round=1)
    found = rounds(fed, 8)
    assert any(late for _, _, late in found)
    assert any(not late for _, _, late in found)


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
        (SCAFFOLD, Policy(quorum=1, late="keep"), "model.policy.late: keep, and SCAFFOLD"),
        (MaxCommon, Policy(quorum=1, late="keep"), "model.policy.late: keep, and MaxCommon"),
        (FedAvg, Policy(deadline=0.0), "model.policy.deadline: 0"),
        (FedAvg, Policy(quorum=9), "model.policy.quorum: 9 of 3 clients"),
        (FedAvg, Policy(over_select=0.5), "model.policy.over_select: 0.5 more than 3 of 3"),
        (FedAvg, Policy(grace=1.0), "model.policy.grace: given without a quorum"),
        (FedAvg, Policy(late="keep"), "model.policy.late: keep, and none is late"),
        (FedAvg, Policy(dropout=1.0), "model.policy.dropout: 1.0; give a probability below 1"),
    ],
)
def test_policies_that_are_refused(algorithm: Any, policy: Policy, line_of: str) -> None:
    group, data = ClientGroup(3, mlp), random_data([3] * 3)
    with pytest.raises(UserError) as stated:
        fleet_of([group], algorithm(), data, devices=Devices(), policy=policy)
    assert str(stated.value).startswith(line_of)


def test_settings_without_effect_are_refused() -> None:
    data, rule = random_data([3] * 3), Devices(availability=Bernoulli(0.5))
    fed = fleet_of([ClientGroup(3, mlp)], DisPFL(Ring(), rounds=2), data, devices=rule)
    with pytest.raises(UserError, match=r"model\.devices\.availability: given, and the method"):
        run_round(fed, 0)
    data, kept = random_data([3] * 3), Policy(quorum=1, late="keep")
    fed = fleet_of([ClientGroup(3, mlp)], HeteroFL("dynamic"), data, devices=Devices(), policy=kept)
    with pytest.raises(UserError, match=r"model\.policy\.late: keep, and clients change"):
        run_round(fed, 0)
