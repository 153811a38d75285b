"""The virtual clock against the recorded runs of FedBCD's released code, and by hand."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightfed.devices.event_clock import VirtualClock, check_waits
from lightfed.utils.errors import UserError
from tests.small import GOLDEN

RUNS = json.loads((GOLDEN / "fedbcd" / "runs.json").read_text())

Events = list[list[Any]]


def response_phases(events: Events) -> list[tuple[list[list[int]], float]]:
    """Of each server that starts: the first devices awake, as often as asked, and its delay.

    Wake-up times of all devices start a server. Its active devices follow in ascending order, each
    with its steps and seconds a step; FedBCD-I logs the steps of devices that stay offline, too.
    """
    phases: list[tuple[list[list[int]], float]] = []
    wakes: list[float] = []
    steps, done = 0, 0
    for kind, *values in events:
        if kind == "exp" and isinstance(values[0], list):
            wakes, done = values[0], 0
            phases.append(([], 0.0))
        elif kind == "argpart" and values[0] == wakes:
            phases[-1][0].append(sorted(np.argsort(wakes, kind="stable")[: values[1]].tolist()))
            assert phases[-1][0][-1] == sorted(values[2][: values[1]])
        elif kind == "K":
            steps = values[0]
        elif kind == "exp":
            asked, slowest = phases[-1]
            phases[-1] = (asked, max(slowest, wakes[asked[-1][done]] + steps * values[0]))
            done += 1
    return phases


@pytest.mark.parametrize("name", ["sync_m0", "async_m0", "fedbcd_i_sync_m0"])
def test_the_released_code(name: str) -> None:
    """Active devices, active servers and run time of every round, to the last bit."""
    run = RUNS[name]
    asynchronous = run["log"][0]["active_server"] is not None
    clock = VirtualClock(run["servers"], run["B"] if asynchronous else run["servers"])
    for logged in run["log"]:
        starting = clock.idle
        phases = response_phases(logged["events"])
        assert len(phases) == len(starting)
        assert all(len(asked[-1]) == run["active"] for asked, _ in phases)
        delays = [delay for _, delay in phases]
        if not asynchronous:
            assert delays == logged["clocks"]
        first = clock.advance(delays)
        assert first == sorted(logged["active_server"] or range(run["servers"]))
        assert clock.now == logged["runtime"]


def test_late_servers_continue() -> None:
    clock = VirtualClock(3, 2)
    assert clock.idle == [0, 1, 2]
    assert clock.advance([5.0, 1.0, 2.0]) == [1, 2]
    assert clock.now == 2.0
    # server 1 waited for server 2; server 0 is done at 5
    assert clock.advance([9.0, 4.0]) == [0, 2]
    assert clock.now == 6.0
    assert clock.advance([1.0, 1.0]) == [0, 2]
    assert clock.now == 7.0


def test_ties_go_to_the_lower_number() -> None:
    clock = VirtualClock(5, 2)
    assert clock.advance([1.0] * 5) == [0, 1]
    assert clock.advance([1.0, 1.0]) == [2, 3]
    assert clock.now == 1.0
    assert clock.advance([1.0, 0.0]) == [3, 4]
    assert clock.advance([1.0, 1.0]) == [0, 1]
    assert clock.now == 2.0


DELAYS = st.floats(0.0, 1e6)


@settings(deadline=None)
@given(st.integers(1, 6), st.data())
def test_a_restored_clock_goes_on_alike(servers: int, data: st.DataObject) -> None:
    clock = VirtualClock(servers, data.draw(st.integers(1, servers)))
    for _ in range(8):
        other = VirtualClock(servers, clock.wait)
        before, count = clock.now, len(clock.idle)
        delays = data.draw(st.lists(DELAYS, min_size=count, max_size=count))
        state = {k: v.clone() if torch.is_tensor(v) else v for k, v in clock.state_dict().items()}
        other.load_state_dict(state)
        assert other.idle == clock.idle
        assert other.advance(delays) == clock.advance(delays)
        assert len(clock.idle) == clock.wait
        assert other.now == clock.now >= before


@pytest.mark.parametrize("wait", [0, -1, 4])
def test_waiting_for_too_many_servers_is_refused(wait: int) -> None:
    with pytest.raises(UserError) as caught:
        check_waits("some.key", [1, wait], 3)
    assert caught.value.key == "some.key"
    check_waits("some.key", [1, 3], 3)
