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
CLIENTS = 15  # five devices a server
ROUNDS = range(300)


def phases(hierarchy: Hierarchy, server: int = 1, seed: int = 0) -> list[Any]:
    return [hierarchy.phase(server, t, clients=CLIENTS, seed=seed) for t in ROUNDS]


@given(
    server=st.integers(0, 2), t=st.integers(0, 99), seed=st.integers(0, 99),
    active=st.integers(1, 5), offline=st.integers(0, 4), low=st.integers(1, 4),
    width=st.integers(0, 3), activation=st.sampled_from(["uniform", "first"]),
    step_delay=st.sampled_from([None, Uniform(0.5, 2.0)]),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_a_phase(
    server: int, t: int, seed: int, active: int, offline: int, low: int, width: int,
    activation: Any, step_delay: Any,
) -> None:  # fmt: skip
    available = min(5, active + offline)
    hierarchy = Hierarchy(
        3, active, available, (low, low + width), "step", Uniform(1.0, 2.0), step_delay, activation
    )
    phase = hierarchy.phase(server, t, clients=CLIENTS, seed=seed)
    assert phase == hierarchy.phase(server, t, clients=CLIENTS, seed=seed)
    assert {hierarchy.server_of(device, CLIENTS) for device in phase.available} == {server}
    assert phase.active == sorted(set(phase.active))
    assert phase.available == sorted(set(phase.available))
    assert (len(phase.active), len(phase.available)) == (active, available)
    assert set(phase.active) <= set(phase.available) <= set(hierarchy.devices(server, CLIENTS))
    assert list(phase.units) == phase.available
    assert all(low <= units <= low + width for units in phase.units.values())
    most = max(phase.units[i] for i in phase.active)
    assert 1.0 <= max(phase.delays.values()) <= 2.0 + (2.0 * most if step_delay else 0.0)


def test_devices_are_drawn_uniformly() -> None:
    """300 rounds, 2 of 5 active and 4 available: 120 and 240 each, within 4 standard deviations."""
    for name, share in (("active", 2 / 5), ("available", 4 / 5)):
        counts = np.bincount([i for p in phases(PLAIN) for i in getattr(p, name)], minlength=10)
        assert (counts[:5] == 0).all()
        spread = (len(ROUNDS) * share * (1 - share)) ** 0.5
        assert abs(counts[5:] - len(ROUNDS) * share).max() < 4 * spread


@pytest.mark.parametrize("step_delay", [None, Constant(0.5)])
def test_the_first_awake_are_active(step_delay: Any) -> None:
    hierarchy = replace(PLAIN, activation="first", step_delay=step_delay)
    for t in range(30):
        phase = hierarchy.phase(2, t, clients=CLIENTS, seed=3)
        wakes = Exponential(1.0).draw(numpy_generator(3, "delay", t), CLIENTS)[10:]
        order = [10 + int(i) for i in np.argsort(wakes)]
        assert phase.active == sorted(order[:2])
        assert phase.available == sorted(order[:4])
        ends = [wakes[i - 10] + (0.5 * phase.units[i] if step_delay else 0) for i in phase.active]
        assert max(phase.delays.values()) == pytest.approx(max(ends), rel=1e-15)


def test_servers_rounds_and_seeds_have_their_own_draws() -> None:
    """Of who is active, of K and of delays, in eight rounds each."""
    found: list[Any] = [[], [], []]
    for server, first, seed in ((0, 0, 0), (1, 0, 0), (0, 8, 0), (0, 0, 1)):
        times = range(first, first + 8)
        drawn = [PLAIN.phase(server, t, clients=CLIENTS, seed=seed) for t in times]
        found[0].append(str([[i % 5 for i in p.active] for p in drawn]))
        found[1].append(str([[*p.units.values()] for p in drawn]))
        found[2].append(str([[*p.delays.values()] for p in drawn]))
    assert [len(set(draws)) for draws in found] == [4, 4, 4]


def test_draws_of_a_device_do_not_depend_on_others() -> None:
    """K of a device is named by the round and the device alone."""
    few, many = replace(PLAIN, active=1, available=1), replace(PLAIN, active=5, available=5)
    for t in range(20):
        units = [each.phase(2, t, clients=CLIENTS, seed=4).units for each in (few, many)]
        assert units[0].items() <= units[1].items()


def test_delays_of_units_are_added() -> None:
    random = replace(PLAIN, step_delay=Exponential(2.0))
    phase = random.phase(1, 3, clients=CLIENTS, seed=7)
    first = Exponential(1.0).draw(numpy_generator(7, "delay", 3), CLIENTS)
    each = Exponential(2.0).draw(numpy_generator(7, "step-delay", 3), CLIENTS)
    assert phase.delays == {i: first[i] + each[i] * phase.units[i] for i in phase.active}


@pytest.mark.parametrize(
    ("name", "value"), [("servers", 0), ("active", 0), ("available", 1), ("steps", (4, 3))]
)
def test_impossible_settings(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^model\.algorithm\.init_args\.{name}: "):
        replace(PLAIN, **{name: value})
