"""Virtual time by hand: two clients of known rates, order statistics, neighbors, own clocks."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.algorithms.fedbuff import FedBuff
from lightfed.algorithms.peers.dpsgd import DPSGD
from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.topology.topology import Ring
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.devices.delays import Constant, Exponential
from lightfed.devices.devices import Device, Devices
from lightfed.devices.timing import clock_of
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.small import Line, fleet_of, random_data, run_round

# Of the network below: its weights, its size, and the FLOPs of a sample's forward pass.
WEIGHTS = 4 * 6 + 6 + 6 * 3 + 3
BYTES = 4 * WEIGHTS
FLOPS = 2 * (4 * 6 + 6 * 3)
mlp = partial(MLP, hidden=(6,))


def fleet(
    algorithm: Algorithm,
    sizes: list[int],
    devices: Devices | None,
    groups: list[ClientGroup] | None = None,
    **settings: Any,
) -> Fleet:
    """Make a federation; by default all clients are in one group, and take SGD steps."""
    if groups is None:
        groups = [ClientGroup(len(sizes), mlp)]
    settings.setdefault("optimizer", partial(SGD, lr=0.1))
    return fleet_of(groups, algorithm, random_data(sizes), devices=devices, **settings)


def groups_of_one(count: int) -> list[ClientGroup]:
    """Return groups of one client each, named by their numbers."""
    return [ClientGroup(1, mlp, name=str(i)) for i in range(count)]


def test_two_clients_of_known_rates() -> None:
    """Receive, compute, send: the round lasts as long as the slower one, the other one waits."""
    slow = Device(flops=1000.0, up=50.0, down=200.0, latency=0.25)
    fast = Device(flops=4000.0, up=100.0, down=100.0)
    devices = Devices(groups={"0": slow, "1": fast})
    fed = fleet(FedAvg(), [5, 8], devices, groups_of_one(2))
    slow_time = BYTES / 200 + 0.25 + 3 * FLOPS * 5 / 1000 + BYTES / 50 + 0.25
    fast_time = BYTES / 100 + 3 * FLOPS * 8 / 4000 + BYTES / 100
    for t in range(2):
        metrics = run_round(fed, t)
        assert metrics["virtual_time"] == pytest.approx((t + 1) * slow_time, rel=1e-14)
        assert metrics["busy_time"] == pytest.approx((slow_time + fast_time) / 2, rel=1e-14)
        assert metrics["idle_time"] == pytest.approx((slow_time - fast_time) / 2, rel=1e-14)

    expected = [[2 * slow_time, 0.0], [2 * fast_time, 2 * (slow_time - fast_time)]]
    np.testing.assert_allclose(clock_of(fed).times(), expected, rtol=1e-12, atol=1e-12)


def test_every_client_is_priced_by_its_own_model() -> None:
    """A model of half the width has its own bytes and FLOPs."""
    levels = [ClientGroup(1, mlp, level="a"), ClientGroup(1, mlp, level="b")]
    fed = fleet(HeteroFL(), [6, 6], Devices(flops=100.0, up=10.0), levels)
    run_round(fed, 0)

    half_weights = 4 * 3 + 3 + 3 * 3 + 3
    half_flops = 2 * (4 * 3 + 3 * 3)
    expected = [
        3 * FLOPS * 6 / 100 + 4 * WEIGHTS / 10,
        3 * half_flops * 6 / 100 + 4 * half_weights / 10,
    ]
    np.testing.assert_allclose(clock_of(fed).times()[:, 0], expected, rtol=1e-13)


def test_clients_share_the_servers_link() -> None:
    """Each of four clients receives at 20 / 4 bytes a second, and sends at its own rate of 30."""
    devices = Devices(up=30.0, down=10.0, server_up=20.0, server_down=400.0)
    fed = fleet(FedAvg(), [4, 4, 4, 4], devices)
    assert run_round(fed, 0)["virtual_time"] == pytest.approx(BYTES / 5 + BYTES / 30, rel=1e-14)


def test_the_slowest_of_exponential_delays() -> None:
    """The mean round of 5 clients is E[tau_(5)] of the latency study, within 4 standard errors."""
    fed = fleet(FedAvg(), [2] * 5, Devices(delay=Exponential(2.0)), steps=1)
    ends = [run_round(fed, t)["virtual_time"] for t in range(100)]
    rounds = np.diff([0.0, *ends])
    expected = Exponential(2.0).expected(5, 5)
    assert expected == pytest.approx(2.0 * sum(1 / k for k in range(1, 6)))
    assert abs(rounds.mean() - expected) < 4 * rounds.std() / 10


def test_steps_have_delays() -> None:
    """The client with more samples takes four steps."""
    devices = Devices(delay=Constant(1.0), step_delay=Constant(0.5))
    data = random_data([7, 3], batch_size=2)
    fed = fleet_of([ClientGroup(2, mlp)], FedAvg(), data, devices=devices)
    assert run_round(fed, 0)["virtual_time"] == 1.0 + 4 * 0.5


def test_clients_without_a_server_wait_for_their_neighbours() -> None:
    """A ring of 4; client 0 takes 10 s, the others 1 s: after two rounds 2 is at 2 s, 1 at 11 s."""
    devices = Devices(flops=1.0, groups={"0": Device(flops=0.1)})
    fed = fleet(DPSGD(Ring()), [1] * 4, devices, groups_of_one(4))
    run_round(fed, 0)
    run_round(fed, 1)

    second = 3 * FLOPS
    expected = [20 * second, 11 * second, 2 * second, 11 * second]
    assert clock_of(fed).finish.tolist() == pytest.approx(expected)
    assert clock_of(fed).now == pytest.approx(20 * second)


class SendsAgain(FedAvg):
    """FedAvg whose participants also receive the merged model."""

    @override
    def round(self, fed: Fleet, t: int) -> None:
        super().round(fed, t)
        fed.send(self.model, fed.participants(t))


def test_clients_that_do_not_take_part_do_nothing_after_a_merge() -> None:
    """The server waits for what its clients do after the merge, and for nobody else."""
    fed = fleet(SendsAgain(), [2] * 4, Devices(down=10.0), clients_per_round=2)
    metrics = run_round(fed, 0)
    assert metrics["virtual_time"] == pytest.approx(2 * BYTES / 10)

    finish = clock_of(fed).finish
    participants = fed.participants(0)
    for client in range(4):
        expected = 2 * BYTES / 10 if client in participants else 0.0
        assert finish[client] == pytest.approx(expected)


def test_clients_that_train_alone_do_not_wait() -> None:
    fed = fleet(Standalone(), [2, 6], Devices(flops=10.0))
    assert run_round(fed, 0)["virtual_time"] == pytest.approx(3 * FLOPS * 6 / 10)


def test_fedbuff_and_fedbcd_take_rates_too() -> None:
    """All clients alike: a server step takes a session; a phase its slowest active device."""
    devices = Devices(flops=50.0, up=4.0, down=8.0)
    session = BYTES / 8 + 3 * FLOPS * 5 / 50 + BYTES / 4
    fedbuff = fleet(FedBuff(3), [5] * 3, devices)
    assert run_round(fedbuff, 0)["virtual_time"] == pytest.approx(session, rel=1e-14)

    with_delay = replace(devices, delay=Constant(0.5))
    aspg = partial(ASPG, lr=0.1)
    fedbcd = fleet(FedBCD(2, 2, steps=(1, 1)), [5] * 4, with_delay, optimizer=aspg)
    for t in range(2):
        assert run_round(fedbcd, t)["virtual_time"] == pytest.approx((t + 1) * (0.5 + session))


def test_a_device_that_nobody_pulls_only_computes() -> None:
    algorithm = FedBCD(2, 2, steps=(1, 1), gamma=0.0)
    devices = Devices(flops=50.0, up=4.0, down=8.0)
    fed = fleet(algorithm, [5] * 4, devices, optimizer=partial(ASPG, lr=0.1))
    assert run_round(fed, 0)["virtual_time"] == pytest.approx(3 * FLOPS * 5 / 50)


def test_a_fleet_without_devices_has_no_time() -> None:
    fed = fleet(FedAvg(), [3, 3], None)
    assert fed.clock.times() is None
    assert not {"virtual_time", "busy_time", "idle_time"} & run_round(fed, 0).keys()


def test_rates_need_models_of_known_cost() -> None:
    class Unknown(Line):
        forward = None

    data = random_data([2, 2])
    with pytest.raises(UserError, match=r"model\.devices\.flops: given, and the FLOPs of group"):
        fleet_of([ClientGroup(2, Unknown)], FedAvg(), data, devices=Devices(flops=1.0))


def test_a_device_of_an_unknown_group_is_refused() -> None:
    devices = Devices(groups={"c": Device(flops=1.0)})
    with pytest.raises(UserError, match=r"model\.devices\.groups: a device of group \['c'\]"):
        fleet(FedAvg(), [2, 2], devices, groups_of_one(2))
