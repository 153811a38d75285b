"""FedBCD and FedBCD-I in their compatibility mode, against runs of the released notebooks."""

from typing import Any

import pytest
import torch
from typing_extensions import override

from lightfed.algorithms.fedbcd.cloudfedavg import CloudFedAvg
from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.algorithms.fedbcd.fedbcdi import FedBCDI
from lightfed.algorithms.fedbcd.hierarchy import Phase
from lightfed.api.fleet import Fleet
from tests.algorithms.fedbcd.fedbcd_cases import (
    DEVICES,
    RUNS,
    SERVERS,
    Events,
    events,
    federation,
    recorded_phase,
)
from tests.algorithms.peers.dispfl_cases import row_of
from tests.small import run_round


class Recorded:
    """A mix-in whose phases are those of a recorded run."""

    stated: Events
    with_offline = False

    def phase(self, fed: Fleet, server: int, t: int) -> Phase:
        return recorded_phase(self.stated, server, offline=self.with_offline)


class RecordedBCD(Recorded, FedBCD):
    pass


class RecordedBCDI(Recorded, FedBCDI):
    with_offline = True

    @override
    def phase(self, fed: Fleet, server: int, t: int) -> Phase:
        return super().phase(fed, server, t)


CASES: dict[str, Any] = {
    "sync_m0": lambda: RecordedBCD(SERVERS, 2, server_lr=1.0, compatibility=True),
    "async_m0": lambda: RecordedBCD(SERVERS, 2, wait=2, server_lr=0.5, compatibility=True),
    "fedbcd_i_sync_m0": lambda: RecordedBCDI(
        SERVERS, 2, 3, gamma=0.2, server_lr=0.5, compatibility=True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_golden_run(name: str) -> None:
    algorithm = CASES[name]()
    fleet, vectors = federation(algorithm, name)
    layout = fleet.groups[0].layout
    for t, logged in enumerate(RUNS[name]["log"]):
        algorithm.stated = events(name, t)
        metrics = run_round(fleet, t)
        assert metrics["virtual_time"] == pytest.approx(logged["runtime"], rel=1e-12)
        for device in range(DEVICES):
            expected = row_of(vectors, f"r{t}/para_device/{device}", layout)
            torch.testing.assert_close(fleet.row(device).floats, expected, rtol=0, atol=1e-6)
        for server in range(SERVERS):
            expected = row_of(vectors, f"r{t}/para_server/{server}", layout)
            found = algorithm.clouds.of(server).floats
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


class RecordedProx(CloudFedAvg):
    stated: list[Any]

    @override
    def phase(self, fed: Fleet, server: int, t: int) -> Phase:
        samples = [e[1] for e in self.stated if e[0] == "sample"]
        steps = [e[1] for e in self.stated if e[0] == "K"][2 * server : 2 * server + 2]
        active = samples[server]
        units, delays = dict(zip(sorted(active), steps, strict=True)), dict.fromkeys(active, 0.0)
        return Phase(sorted(active), sorted(active), units, delays)


def test_golden_prox() -> None:
    """The released code pulls with twice mu = 5, and gives the mean to all devices."""
    algorithm = RecordedProx(SERVERS, 2, mu=10.0)
    fleet, vectors = federation(algorithm, "prox_m0")
    layout = fleet.groups[0].layout
    for t, logged in enumerate(RUNS["prox_m0"]["log"]):
        algorithm.stated = logged["events"]
        run_round(fleet, t)
        for device in range(DEVICES):
            expected = row_of(vectors, f"r{t}/para_set/{device}", layout)
            torch.testing.assert_close(algorithm.model.floats, expected, rtol=0, atol=1e-6)
