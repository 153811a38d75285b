"""Servers and their devices: which are active, for how long, and errors."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightfed.algorithms.fedbcd.hierarchy import Hierarchy
from lightfed.devices.delays import Constant, Exponential, Uniform
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator

PLAIN = Hierarchy(3, 2, 4, (1, 5), "step", Exponential(1.0))
CLIENTS = 15  # five devices for each server


@given(
    server=st.integers(0, 2),
    t=st.integers(0, 99),
    seed=st.integers(0, 99),
    active=st.integers(1, 5),
    offline=st.integers(0, 4),
    low=st.integers(1, 4),
    width=st.integers(0, 3),
    activation=st.sampled_from(["uniform", "first"]),
    step_delay=st.sampled_from([None, Uniform(0.5, 2.0)]),
)
@settings(max_examples=20, deadline=None)
def test_a_phase(
    server: int,
    t: int,
    seed: int,
    active: int,
    offline: int,
    low: int,
    width: int,
    activation: Any,
    step_delay: Any,
) -> None:
    available = min(5, active + offline)
    high = low + width
    hierarchy = Hierarchy(
        3, active, available, (low, high), "step", Uniform(1.0, 2.0), step_delay, activation
    )
    phase = hierarchy.phase(server, t, clients=CLIENTS, seed=seed)
    assert phase == hierarchy.phase(server, t, clients=CLIENTS, seed=seed)

    # Who takes part.
    assert len(phase.active) == active
    assert len(phase.available) == available
    assert phase.active == sorted(set(phase.active))
    assert phase.available == sorted(set(phase.available))
    assert set(phase.active) <= set(phase.available) <= set(hierarchy.devices(server, CLIENTS))
    assert {hierarchy.server_of(device, CLIENTS) for device in phase.available} == {server}

    # For how long.
    assert list(phase.units) == phase.available
    assert all(low <= k <= high for k in phase.units.values())
    longest = 2.0
    if step_delay is not None:
        longest += 2.0 * max(phase.units[device] for device in phase.active)
    assert 1.0 <= max(phase.delays.values()) <= longest


@pytest.mark.parametrize(("name", "share"), [("active", 2 / 5), ("available", 4 / 5)])
def test_devices_are_drawn_uniformly(name: str, share: float) -> None:
    """Each of five devices takes part in its share of 300 rounds, within 4 deviations."""
    rounds = 300
    devices = []
    for t in range(rounds):
        phase = PLAIN.phase(1, t, clients=CLIENTS, seed=0)
        devices += getattr(phase, name)

    counts = np.bincount(devices, minlength=10)
    assert (counts[:5] == 0).all()  # the devices of server 0
    deviation = (rounds * share * (1 - share)) ** 0.5
    assert abs(counts[5:] - rounds * share).max() < 4 * deviation


@pytest.mark.parametrize("step_delay", [None, Constant(0.5)])
def test_the_first_awake_are_active(step_delay: Any) -> None:
    hierarchy = replace(PLAIN, activation="first", step_delay=step_delay)
    for t in range(30):
        phase = hierarchy.phase(2, t, clients=CLIENTS, seed=3)
        wakes = Exponential(1.0).draw(numpy_generator(3, "delay", t), CLIENTS)

        devices = range(10, 15)  # of server 2
        first_awake = sorted(devices, key=lambda device: wakes[device])
        assert phase.active == sorted(first_awake[:2])
        assert phase.available == sorted(first_awake[:4])

        ends = []
        for device in phase.active:
            end = wakes[device]
            if step_delay is not None:
                end += 0.5 * phase.units[device]
            ends.append(end)
        assert max(phase.delays.values()) == pytest.approx(max(ends), rel=1e-15)


def test_servers_rounds_and_seeds_have_their_own_draws() -> None:
    """Another server, other rounds or another seed: others are active, with another K and delay."""
    active = set()
    units = set()
    delays = set()
    for server, first_round, seed in ((0, 0, 0), (1, 0, 0), (0, 8, 0), (0, 0, 1)):
        phases = []
        for t in range(first_round, first_round + 8):
            phases.append(PLAIN.phase(server, t, clients=CLIENTS, seed=seed))
        active.add(str([[device % 5 for device in phase.active] for phase in phases]))
        units.add(str([list(phase.units.values()) for phase in phases]))
        delays.add(str([list(phase.delays.values()) for phase in phases]))

    assert len(active) == len(units) == len(delays) == 4


def test_draws_of_a_device_do_not_depend_on_others() -> None:
    """K of a device is named by the round and the device alone."""
    few = replace(PLAIN, active=1, available=1)
    many = replace(PLAIN, active=5, available=5)
    for t in range(20):
        units_of_few = few.phase(2, t, clients=CLIENTS, seed=4).units
        units_of_many = many.phase(2, t, clients=CLIENTS, seed=4).units
        assert units_of_few.items() <= units_of_many.items()


def test_delays_of_units_are_added() -> None:
    hierarchy = replace(PLAIN, step_delay=Exponential(2.0))
    phase = hierarchy.phase(1, 3, clients=CLIENTS, seed=7)

    delay = Exponential(1.0).draw(numpy_generator(7, "delay", 3), CLIENTS)
    step_delay = Exponential(2.0).draw(numpy_generator(7, "step-delay", 3), CLIENTS)
    assert phase.delays == {i: delay[i] + step_delay[i] * phase.units[i] for i in phase.active}


@pytest.mark.parametrize(
    ("name", "value"), [("servers", 0), ("active", 0), ("available", 1), ("steps", (4, 3))]
)
def test_impossible_settings(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^model\.algorithm\.init_args\.{name}: "):
        replace(PLAIN, **{name: value})
