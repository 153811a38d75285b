"""Energy of clients' devices: joules by FLOP and by byte, by hand."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbuff import FedBuff
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.devices.delays import Exponential
from lightfed.devices.devices import Device, Devices
from lightfed.devices.policy import Policy
from lightfed.devices.timing import Timing
from lightfed.lab.previews.dry_run import DryFleet, PlannedRanks
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.small import Line, data_of, fleet_of, random_data, run_round

mlp = partial(MLP, hidden=(6,))
FRUGAL = Device(joules_per_flop=1e-3, joules_per_byte=0.5)
GREEDY = Device(joules_per_flop=4e-3)


def federation(algorithm: Algorithm | None = None, **settings: Any) -> Fleet:
    """Make clients 0 and 1 of a frugal device, and clients 2 and 3 of one with cheap messages."""
    groups = [ClientGroup(2, mlp, name="frugal"), ClientGroup(2, mlp, name="greedy")]
    devices = Devices(joules_per_byte=0.25, groups={"frugal": FRUGAL, "greedy": GREEDY})
    settings = {"devices": devices} | settings
    return fleet_of(groups, algorithm or FedAvg(), random_data([5, 9, 4, 7]), **settings)


def expected(fed: Fleet) -> list[float]:
    """Return the joules of each client from what the ledger has counted."""
    joules = []
    for client, (sent, flops) in enumerate(zip(fed.ledger.bytes, fed.ledger.flops, strict=True)):
        per_flop, per_byte = (1e-3, 0.5) if client < 2 else (4e-3, 0.25)
        joules.append(flops * per_flop + sent.sum() * per_byte)
    return joules


def test_a_client_spends_energy_on_flops_and_bytes() -> None:
    fed = federation(clients_per_round=2)
    in_all = 0.0
    for t in range(3):
        before = expected(fed)
        row = run_round(fed, t)
        spent = sum(expected(fed)) - sum(before)
        assert row["joules"] == pytest.approx(spent, rel=1e-12)
        assert spent > 0
        in_all += row["joules"]
    joules = fed.clock.joules()
    assert joules is not None
    assert joules.tolist() == pytest.approx(expected(fed), rel=1e-12)
    assert joules.sum() == pytest.approx(in_all, rel=1e-12)


def test_work_that_comes_to_nothing_takes_energy() -> None:
    fed = federation(policy=Policy(dropout=0.9))
    row = run_round(fed, 0)
    lost = fed.clock.leaving(range(4), 0)
    joules = fed.clock.joules()
    assert lost
    assert joules is not None
    assert (joules > 0).all()
    assert row["joules"] == pytest.approx(sum(expected(fed)))


def test_a_method_with_a_clock_of_its_own_spends_energy() -> None:
    devices = Devices(delay=Exponential(1.0), joules_per_byte=2.0)
    fed = federation(FedBuff(buffer=2), devices=devices)
    row = run_round(fed, 0)
    assert row["joules"] == 2.0 * (row["bytes_up"] + row["bytes_down"])


def test_energy_goes_on_after_a_stop() -> None:
    whole, resumed = federation(), federation()
    rows = [run_round(whole, t) for t in range(3)]
    for t in range(2):
        run_round(resumed, t)
    again = federation()
    again.ledger.bytes[:] = resumed.ledger.bytes
    again.ledger.flops[:] = resumed.ledger.flops
    again.clock.load_state_dict(resumed.clock.state_dict())
    assert run_round(again, 2)["joules"] == rows[2]["joules"]


def test_without_joules_there_is_no_column() -> None:
    fed = federation(devices=Devices(flops=1e6))
    assert fed.clock.joules() is None
    assert "joules" not in run_round(fed, 0)


def test_a_plan_prices_energy() -> None:
    fed = federation()
    dry = DryFleet(
        [state.group for state in fed.groups],
        FedAvg(),
        fed.data,
        ranks=PlannedRanks(1),
        work=fed.work,
        timing=Timing(fed.clock.devices),
    )
    dry.run(1)
    assert dry.sums["joules"] == pytest.approx(run_round(fed, 0)["joules"], rel=1e-12)


def test_joules_from_a_table(tmp_path: Path) -> None:
    table = tmp_path / "devices.csv"
    rows = ["client,joules_per_flop", "0,1e-9", "1,2e-9", "2,0", "3,4e-9"]
    table.write_text("\n".join(rows))
    fed = federation(devices=Devices(table=table))
    run_round(fed, 0)
    joules = fed.clock.joules()
    assert joules is not None
    assert (joules / fed.ledger.flops).tolist() == pytest.approx([1e-9, 2e-9, 0, 4e-9])


@pytest.mark.parametrize("name", ["joules_per_flop", "joules_per_byte"])
def test_negative_energy_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"model.devices.{name}: .*-1.* give 0 or more"):
        federation(devices=Devices(**{name: -1.0}))


def test_flops_that_are_not_known_have_no_energy() -> None:
    data = data_of(torch.ones(2, 2), torch.arange(2), [[0], [1]])
    with pytest.raises(UserError, match=r"model.devices.joules_per_flop: given, and the FLOPs"):
        fleet_of([ClientGroup(2, Line)], FedAvg(), data, devices=Devices(joules_per_flop=1e-9))
