"""FedBCD and FedBCD-I against the paper's equations, over servers, protocols and settings."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.algorithms.fedbcd.fedbcdi import FedBCDI
from lightfed.devices.delays import Exponential
from lightfed.devices.devices import Devices
from tests.algorithms.fedbcd.fedbcd_oracle import Local, Oracle, federation
from tests.small import run_round

GAMMAS = [1.0, 0.2, 0.0, [1.0, 0.25], [0.3, 0.0, 0.7], [1 / 3, 0.5]]


@st.composite
def clouds(draw: st.DrawFn) -> tuple[FedBCD, int]:
    """An algorithm, and how many devices it has."""
    servers, each = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    active = draw(st.integers(1, each))
    wait = draw(st.none() | st.integers(1, servers))
    gammas = draw(st.sampled_from(GAMMAS))
    step = draw(st.sampled_from(["mean", "sum"]))
    mixing = None
    if wait is None and draw(st.booleans()):
        shares = draw(st.lists(st.floats(0.1, 1), min_size=servers, max_size=servers))
        shifts = [np.roll(np.eye(servers), k, axis=0) for k in range(servers)]
        mixing = (np.tensordot(np.array(shares) / sum(shares), np.array(shifts), 1)).tolist()
    largest = max(gammas) if isinstance(gammas, list) else gammas
    rate = 0.7 if step == "mean" else 0.7 / (servers * each * max(largest, 0.1))
    common: dict[str, Any] = {
        "wait": wait, "gamma": gammas, "server_lr": rate, "server_step": step,
        "steps": draw(st.sampled_from([(1, 1), (1, 3)])), "mixing": mixing,
        "activation": draw(st.sampled_from(["uniform", "first"])),
        "compatibility": draw(st.booleans()),
    }  # fmt: skip
    if draw(st.booleans()):
        available = draw(st.integers(active, each))
        patience = draw(st.integers(1, 3))
        return FedBCDI(servers, active, available, patience=patience, **common), servers * each
    return FedBCD(servers, active, **common), servers * each


LOCALS = [Local(), Local(zeta=0.0), Local(zeta=0.9, box=(-0.75, 1.25)), Local(0.1, 0.6, (-2, 2))]


PLAIN = Devices(delay=Exponential(1.0))
BY_STEP = Devices(delay=Exponential(1.0), step_delay=Exponential(0.5))


@given(
    cloud=clouds(), local=st.sampled_from(LOCALS), seed=st.integers(0, 9),
    delays=st.sampled_from([PLAIN, BY_STEP]),
)  # fmt: skip
@example(
    (FedBCD(3, 2, wait=1, gamma=[0.3, 0.7], server_step="sum", server_lr=0.2), 12), Local(), 0,
    PLAIN,
)  # fmt: skip
@example((FedBCD(3, 1, wait=1, gamma=[0.3, 0.0, 0.7]), 3), Local(), 0, PLAIN)
@example((FedBCDI(3, 1, 4, wait=2, gamma=[0.5, 0.2, 0.9], patience=2), 12), LOCALS[2], 1, BY_STEP)
@settings(max_examples=14, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_equations_of_the_paper(
    cloud: tuple[FedBCD, int], local: Local, seed: int, delays: Devices
) -> None:
    algorithm, devices = cloud
    oracle = Oracle(algorithm, devices, local, seed)
    fleet = federation(algorithm, devices, local, seed=seed, devices=delays)
    for t in range(5):
        stated, found = oracle.round(t), run_round(fleet, t)
        for name, value in stated.items():
            assert found.get(name, 0.0) == pytest.approx(value, rel=1e-5, abs=2e-5), (t, name)
        rows = np.stack([fleet.row(k).floats[:2].numpy() for k in range(devices)])
        np.testing.assert_allclose(rows, oracle.x, rtol=0, atol=1e-5)
        models = [
            algorithm.clouds.of(n).floats[:2].numpy() for n in range(algorithm.hierarchy.servers)
        ]
        np.testing.assert_allclose(np.stack(models), oracle.z, rtol=0, atol=1e-5)
