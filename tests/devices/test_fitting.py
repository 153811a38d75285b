"""Models fitted to devices: who gets which, by time or memory, and what is refused."""

from functools import partial
from typing import Any

import pytest

from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.devices.delays import Uniform
from lightfed.devices.devices import Device, Devices
from lightfed.devices.fitting import FastestFit, fitted
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import LocalWork
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.small import CPU, fleet_of, random_data, run_round

mlp = partial(MLP, hidden=(8,))
SIZES = [4, 8, 6, 6, 10, 2]
# FLOPs of a training step for a sample, by level: its hidden layer has 8, 4 or 2 units.
FLOPS = {"a": 3 * 2 * (4 * 8 + 8 * 3), "b": 3 * 2 * (4 * 4 + 4 * 3), "c": 3 * 2 * (4 * 2 + 2 * 3)}


def levels(*names: str) -> list[ClientGroup]:
    """Return six clients in groups of these levels."""
    return [ClientGroup(6 // len(names), mlp, level=name) for name in names]  # type: ignore[arg-type]


def fit(
    rule: FastestFit, groups: list[ClientGroup], devices: Devices, method: Any = None
) -> tuple[list[ClientGroup], Devices, Any]:
    """Return the groups, the devices and the algorithm that a rule gives."""
    method = method or HeteroFL()
    data = random_data(SIZES)
    data.prepare(clients=6, seed=0, device=CPU)
    dealt = fitted(
        rule, groups, method, devices, data, LocalWork(), seed=0, parts=tuple(method.parts)
    )
    return dealt.groups, dealt.devices, dealt.algorithm


def test_each_client_gets_the_largest_level_in_time(tmp_path: Any) -> None:
    """A session has 6 samples; devices 0 to 5 take the time of so many of level a."""
    speeds = [6 * FLOPS["a"] * share for share in (1.0, 0.5, 0.25, 1.5, 0.3, 0.6)]
    table = tmp_path / "devices.csv"
    table.write_text("client,flops\n" + "\n".join(f"{k},{v}" for k, v in enumerate(speeds)))
    groups, devices, _ = fit(FastestFit(deadline=1.0), levels("a", "b", "c"), Devices(table=table))
    assert [(group.level, group.count) for group in groups] == [("a", 2), ("b", 2), ("c", 2)]
    ordered = devices.of({"all": 6}, seed=0)["flops"].tolist()
    assert ordered == [speeds[k] for k in (0, 3, 1, 5, 2, 4)]
    fed = fleet_of(groups, HeteroFL(), random_data([6] * 6), devices=devices)
    assert run_round(fed, 0)["virtual_time"] == pytest.approx(1.0)  # of devices 0 and 3


def test_groups_that_nobody_fits_are_left_out() -> None:
    slow = Devices(flops=6 * FLOPS["b"] * 1.01)
    groups, _, _ = fit(FastestFit(deadline=1.0), levels("a", "b"), slow)
    assert [(group.level, group.count) for group in groups] == [("b", 6)]


def test_a_budget_of_memory() -> None:
    """Of batches of 10 samples, the most of a client, level a takes 3,815 bytes and c 3,455."""
    roomy = Devices(memory=Uniform(3_460, 4_200))
    groups, devices, _ = fit(FastestFit(memory=True), levels("a", "c"), roomy)
    assert [group.level for group in groups] == ["a", "c"]
    memory = devices.of({"all": 6}, seed=0)["memory"]
    assert memory[: groups[0].count].min() > memory[groups[0].count :].max()


def test_each_client_gets_the_largest_density_in_time() -> None:
    method = DisPFL(density=[0.2, 0.8, 0.4], rounds=2)
    devices = Devices(flops=6 * FLOPS["a"] * 0.5)
    groups, same, dealt = fit(FastestFit(deadline=1.0), [ClientGroup(6, mlp)], devices, method)
    assert same is devices
    assert [group.count for group in groups] == [6]
    assert dealt.parts == [0.4] * 6
    assert method.parts == [0.2, 0.8, 0.4], "the configured algorithm keeps what it may deal"


def test_a_device_that_fits_nothing() -> None:
    with pytest.raises(UserError, match=r"6 clients cannot train any model; c needs") as stated:
        fit(FastestFit(memory=True), levels("a", "c"), Devices(memory=1.0))
    assert stated.value.key == "model.assign.memory"


def test_rules_without_effect() -> None:
    for rule, devices, key in (
        (FastestFit(), Devices(), "model.assign"),
        (FastestFit(deadline=0.0), Devices(), "model.assign.deadline"),
        (FastestFit(deadline=1.0), None, "model.assign"),
    ):
        with pytest.raises(UserError) as stated:
            rule.check(devices)
        assert stated.value.key == key


def test_a_device_of_a_group_is_refused() -> None:
    """The clients of a group are not known before the models have been chosen."""
    devices = Devices(groups={"a": Device(flops=1.0)})
    with pytest.raises(UserError, match=r"model\.assign: given, and group \['a'\] has a device"):
        fit(FastestFit(deadline=1.0), [ClientGroup(6, mlp, level="a")], devices)
