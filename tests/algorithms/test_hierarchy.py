"""Servers and their devices: which are active, for how long, and errors."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightfed.algorithms.shared.hierarchy import Hierarchy
from lightfed.simulation.delays import Constant, Exponential, Uniform
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator

PLAIN = Hierarchy(3, 2, 4, (1, 5), "step", Exponential(1.0))
CLIENTS = 15  # five devices a server
ROUNDS = range(300)


def phases(hierarchy: Hierarchy, server: int = 1, seed: int = 0) -> list[Any]:
    return [hierarchy.phase(server, t, clients=CLIENTS, seed=seed) for t in ROUNDS]


@given(servers=st.integers(1, 9), each=st.integers(1, 9))
def test_every_client_is_a_device_of_one_server(servers: int, each: int) -> None:
    hierarchy, clients = replace(PLAIN, servers=servers), servers * each
    parts = [list(hierarchy.devices(n, clients)) for n in range(servers)]
    assert [device for part in parts for device in part] == list(range(clients))
    for server, part in enumerate(parts):
        assert len(part) == each
        assert {hierarchy.server_of(device, clients) for device in part} == {server}


@given(
    server=st.integers(0, 2), t=st.integers(0, 99), seed=st.integers(0, 99),
    active=st.integers(1, 5), offline=st.integers(0, 4), low=st.integers(1, 4),
    width=st.integers(0, 3), activation=st.sampled_from(["uniform", "first"]),
    step_delay=st.sampled_from([None, Uniform(0.5, 2.0)]),
)  # fmt: skip
@settings(deadline=None)
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


def test_servers_rounds_and_seeds_have_their_own_draws() -> None:
    def shape(server: int, seed: int) -> list[Any]:
        found = phases(PLAIN, server, seed)
        return [[i % 5 for i in p.active] for p in found]

    assert shape(1, 0) != shape(0, 0)
    assert shape(1, 0) != shape(1, 1)
    assert shape(1, 0)[:10] != shape(1, 0)[10:20]
    first = PLAIN.phase(0, 0, clients=CLIENTS, seed=0)
    assert len({tuple(p.units.values()) for p in phases(PLAIN)[:5]}) > 1
    assert first.delays != PLAIN.phase(0, 0, clients=CLIENTS, seed=1).delays


def test_draws_of_a_device_do_not_depend_on_others() -> None:
    """K of a device is named by the round and the device alone."""
    few, many = replace(PLAIN, active=1, available=1), replace(PLAIN, active=5, available=5)
    for t in range(20):
        (device,) = few.phase(2, t, clients=CLIENTS, seed=4).active
        all_of_them = many.phase(2, t, clients=CLIENTS, seed=4)
        assert few.phase(2, t, clients=CLIENTS, seed=4).units[device] == all_of_them.units[device]


def test_delays_of_units_are_added() -> None:
    """Constant delays: 3 seconds, and half a second for each of K steps of the slowest."""
    hierarchy = replace(PLAIN, delay=Constant(3.0), step_delay=Constant(0.5))
    for t in range(20):
        phase = hierarchy.phase(1, t, clients=CLIENTS, seed=7)
        assert max(phase.delays.values()) == 3.0 + 0.5 * max(phase.units[i] for i in phase.active)
    random = replace(PLAIN, step_delay=Exponential(2.0))
    phase = random.phase(1, 3, clients=CLIENTS, seed=7)
    first = Exponential(1.0).draw(numpy_generator(7, "delay", 3), CLIENTS)
    each = Exponential(2.0).draw(numpy_generator(7, "step-delay", 3), CLIENTS)
    assert phase.delays == {i: first[i] + each[i] * phase.units[i] for i in phase.active}


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


def refusal(call: Any) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"servers": 0}, "servers: 0; give at least 1"),
        ({"active": 0}, "active: 0; give at least 1"),
        ({"available": 1}, "available: 1, with 2 active; give at least as many"),
        ({"steps": (0, 3)}, "steps: [0, 3]; give 1 <= low <= high"),
        ({"steps": (4, 3)}, "steps: [4, 3]; give 1 <= low <= high"),
    ],
)
def test_impossible_settings(changes: dict[str, Any], line: str) -> None:
    found = refusal(lambda: replace(PLAIN, **changes))
    assert found == f"model.algorithm.init_args.{line}"
