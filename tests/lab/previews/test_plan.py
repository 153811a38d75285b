"""A plan is what a run does: bytes against its ledger, loads and memory by hand."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

from lightfed.aggregation.server_optimizers import FedAdam
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.algorithms.fedrep import FedRep
from lightfed.algorithms.peers.dpsgd import DPSGD
from lightfed.algorithms.scaffold import SCAFFOLD
from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.topology.topology import Ring
from lightfed.api.algorithm import Algorithm
from lightfed.devices.timing import Timing
from lightfed.lab.previews.dry_run import DryFleet, PlannedRanks
from lightfed.lab.previews.plan import (
    memory,
    plan_text,
    rank_rows,
    row_bytes,
    speedup,
    state_slots,
)
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import LocalWork
from lightfed.networks.mlp import MLP
from lightfed.state.costs import Ledger
from tests.promises.conformance.cases import CASES, Case
from tests.small import CPU, SGD_HALF, fleet_of, random_data, run_round

NAMES = {"local_epochs": "epochs", "local_steps": "steps", "fraction": "fraction"}
ROUNDS = 2


def work_of(case: Case) -> dict[str, Any]:
    given = {"fraction": 0.4} | case.federation
    return {NAMES[k]: v for k, v in given.items() if k in NAMES} | {"limit": 1}


def spent(ledger: Ledger) -> list[list[float]]:
    """(clients, 2) bytes up and down."""
    return ledger.totals[:, :2].tolist()


def rehearsed(case: Case, world: int = 3) -> DryFleet:
    data, work = case.data(), LocalWork(**work_of(case))
    data.prepare(clients=case.clients, seed=0, device=CPU)
    fleet = DryFleet(case.groups(), case.algorithm(), data, ranks=PlannedRanks(world), work=work)
    fleet.run(ROUNDS)
    return fleet


def trained(case: Case) -> Ledger:
    optimizer = case.federation.get("optimizer", partial(SGD, lr=0.01))
    fleet = fleet_of(
        case.groups(), case.algorithm(), case.data(), optimizer=optimizer, **work_of(case)
    )
    for t in range(ROUNDS):
        run_round(fleet, t)
    return fleet.ledger


@pytest.mark.parametrize(
    "name",
    [
        "cloud_fedprox", "dpsgd", "fedapen", "fedavg", "fedavg_local_statistics", "fedbcd_async",
        "fedbcdi", "flexifed_max", "heterofl", "heterofl_dynamic", "lgfedavg_heads", "standalone",
        "apfl", "depthfl", "fedbuff", "fedrolex_random", "fjord", "pfedme", "ditto", "feddyn",
        "fednova", "moon", "fedexlora", "fedsalora", "ffalora", "flexlora", "flora", "rankmean",
        "rolora", "fedsvd", "fedrotlora", "lorafair",
        "feddpa", "fedsb", "ravan",
    ],
)  # fmt: skip
def test_bytes_are_those_of_a_run(name: str) -> None:
    fleet = rehearsed(CASES[name])
    assert spent(fleet.ledger) == spent(trained(CASES[name]))
    assert fleet.bound == ""
    assert all(not state.store.slots for state in fleet.groups)  # and no client has a row


def test_a_plan_keeps_late_updates_as_a_run_does() -> None:
    """Both have the same bytes and the same clock, though a plan has no update to look at."""
    case = CASES["devices_late"]
    clock = {name: case.federation[name] for name in ("devices", "policy")}
    data, work = case.data(), work_of(case) | {"limit": None}  # times of whole epochs are exact
    data.prepare(clients=case.clients, seed=0, device=CPU)
    ranks = PlannedRanks(2)
    planned = DryFleet(
        case.groups(),
        case.algorithm(),
        data,
        ranks=ranks,
        work=LocalWork(**work),
        timing=Timing(**clock),
    )
    planned.run(ROUNDS)
    fleet = fleet_of(
        case.groups(),
        case.algorithm(),
        case.data(),
        optimizer=partial(SGD, lr=0.01),
        **work,
        **clock,
    )
    rounds = [run_round(fleet, t) for t in range(ROUNDS)]
    assert any(found["late"] for found in rounds)
    assert spent(planned.ledger) == spent(fleet.ledger)
    times = [found["virtual_time"] for found in rounds]
    assert planned.sums["virtual_time"] == pytest.approx(sum(times))


@pytest.mark.parametrize("name", ["dispfl", "my1", "my2"])
def test_masks_send_less_than_planned(name: str) -> None:
    fleet = rehearsed(CASES[name])
    planned, found = np.array(spent(fleet.ledger)), np.array(spent(trained(CASES[name])))
    assert (found < planned).all()
    assert (found > 0.3 * planned).all()
    text = plan_text(fleet, {}, rounds=ROUNDS)
    assert all(said in text for said in ("down at most ", "up at most ", "masks save a part"))


@pytest.mark.parametrize("name", ["fedkd", "fd"])
def test_bytes_that_depend_on_training_are_not_counted(name: str) -> None:
    fleet = rehearsed(CASES[name])
    planned, found = np.array(spent(fleet.ledger)), np.array(spent(trained(CASES[name])))
    assert (planned <= found).all()
    assert planned[:, Ledger.UP].sum() == 0
    text = plan_text(fleet, {}, rounds=ROUNDS)
    assert all(
        said in text for said in ("down at least ", "up at least 0 B", "depends on training")
    )


# Five samples of four features, and so on; a hidden layer of 2 or 9 units, two classes.
SIZES = (5, 3, 4, 6)
GROUPS = [ClientGroup(2, partial(MLP, hidden=(9,))), ClientGroup(2, partial(MLP, hidden=(2,)))]
ALIKE = [ClientGroup(4, partial(MLP, hidden=(9,)))]
PARAMETERS = (4 * 9 + 9 + 9 * 2 + 2, 4 * 2 + 2 + 2 * 2 + 2)
WIDE, NARROW = 4 * 160, 4 * 128  # bytes of a row: tensors begin at multiples of 32


def planned(
    algorithm: Algorithm,
    *,
    world: int = 2,
    groups: list[ClientGroup] = GROUPS,
    rounds: int = 1,
    sizes: tuple[int, ...] = SIZES,
    **settings: Any,
) -> DryFleet:
    data = random_data(sizes, classes=2, batch_size=2)
    data.prepare(clients=4, seed=0, device=CPU)
    fleet = DryFleet(groups, algorithm, data, ranks=PlannedRanks(world), **settings)
    fleet.run(rounds)
    return fleet


def test_everybody_takes_part() -> None:
    fleet = planned(Standalone())
    (call,) = fleet.calls
    # 540 against 324 + 144 + 96
    assert call.loads.tolist() == [540, 564]
    assert call.counts.sum(0).tolist() == [1, 3]
    assert speedup(fleet) == pytest.approx((540 + 564) / 564)
    assert fleet.sums["bytes_down"] == fleet.sums["bytes_up"] == 0


def test_phases_last_as_long_as_their_epochs() -> None:
    fleet, plain = (
        planned(make(), groups=ALIKE) for make in (partial(FedRep, "net.layers.3.", 2, 3), FedAvg)
    )
    assert fleet.calls[0].loads.sum() == 5 * plain.calls[0].loads.sum()


def test_the_longest_session_bounds_the_speed() -> None:
    fleet = planned(Standalone(), world=4)
    assert sorted(fleet.calls[0].loads.tolist()) == [96, 144, 324, 540]
    assert speedup(fleet) == pytest.approx((96 + 144 + 324 + 540) / 540)


def test_memory_of_clients_that_keep_rows() -> None:
    fleet = planned(Standalone())
    assert row_bytes(fleet).tolist() == [WIDE, NARROW]
    assert rank_rows(fleet).tolist() == [WIDE, WIDE + 2 * NARROW]
    found = memory(fleet, SGD_HALF)
    assert {what: size for what, size in found.items() if size} == {
        "rows of its clients": WIDE + 2 * NARROW,
        "live modules, one per group": WIDE + NARROW,
        "gradients and optimizer state": 4 * PARAMETERS[0],  # plain SGD keeps gradients alone
    }


def test_rows_on_the_host_leave_two_of_a_group_on_the_device() -> None:
    found = memory(planned(Standalone(), host_rows=True), SGD_HALF)
    assert found["two rows of every group, the others in host memory"] == 2 * (WIDE + NARROW)
    assert found["rows of its clients"] == 0


def test_rows_of_clients_that_keep_nothing_are_as_many_as_were_ever_there() -> None:
    half = LocalWork(clients_per_round=2)
    fleet = planned(FedAvg(), groups=ALIKE, rounds=3, work=half)
    assert rank_rows(fleet).tolist() == [WIDE, WIDE]
    assert memory(fleet, None)["server models"] == WIDE
    assert sum(call.counts.sum() for call in fleet.calls) == 3 * 2
    assert fleet.sums["bytes_down"] == fleet.sums["bytes_up"] == 3 * 2 * 4 * PARAMETERS[0]


def test_memory_of_a_server_s_optimiser() -> None:
    fleet = planned(FedAvg(), groups=ALIKE)
    fleet.server_step.make = FedAdam
    assert memory(fleet, None)["state of the server's optimizer"] == 2 * WIDE  # m and v


def test_bytes_between_servers() -> None:
    fleet = planned(FedBCD(2, 1, wait=1), groups=ALIKE, rounds=3)
    assert fleet.sums["server_bytes"] == 3 * 2 * 4 * PARAMETERS[0]
    assert "between servers " in plan_text(fleet, {}, rounds=3)


def test_rows_of_other_ranks_are_there_as_packages_and_as_rows() -> None:
    fleet = planned(DPSGD(Ring()), groups=ALIKE)
    owner = fleet.places.owner
    near = [{(k - 1) % 4, (k + 1) % 4} for k in range(4)]
    heard = [{j for k in range(4) if owner[k] == r for j in near[k]} for r in range(2)]
    coming = max(sum(owner[j] != r for j in heard[r]) for r in range(2))
    assert memory(fleet, None)["rows of other ranks, at most"] == 2 * coming * WIDE


def test_a_part_that_trains_at_home_may_wait_for_one_rank() -> None:
    """Of four equal clients on two ranks two train: of home ranks they may have the same one."""
    half = LocalWork(clients_per_round=2)
    settings = {"sizes": (4, 4, 4, 4), "groups": ALIKE, "work": half, "rounds": 20}
    placed, at_home = planned(FedAvg(), **settings), planned(SCAFFOLD(), **settings)
    together = sum(len({k % 2 for k in placed.participants(t)}) == 1 for t in range(20))
    assert 0 < together < 20
    assert speedup(placed) == 2
    assert speedup(at_home) == pytest.approx(2 / (1 + together / 20))


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (partial(SGD, lr=0.1), 0),
        (partial(SGD, lr=0.1, momentum=0.9), 1),
        (partial(Adam, lr=0.1), 2),
        (partial(ASPG, lr=0.1), 1),
        (partial(torch.optim.Adafactor, lr=0.1), 16 / 64),  # a row and a column of 8 x 8
    ],
)
def test_what_optimisers_keep(optimizer: Any, slots: float) -> None:
    assert state_slots(optimizer) == slots
    made: Optimizer = optimizer([torch.nn.Parameter(torch.zeros(3))])
    assert not made.state


def test_the_text_has_a_line_for_every_group_and_one_of_a_few_ranks() -> None:
    fleet = planned(Standalone())
    lines = plan_text(fleet, {"rows": 1500, "nothing": 0}, rounds=1).splitlines()
    assert lines[0] == "Standalone, 4 clients on 2 ranks: the first round, 4 sessions in each"
    # FLOPs: two for each of 4 x 9 and 9 x 2 weights.
    assert lines[3].split() == ["MLP", "1", "2", "65", "108", "640", "B"]
    assert [line.split() for line in lines[7:9]] == [
        ["0", "1", "540", "640", "B"],
        ["1", "3", "564", "1.664", "kB"],
    ]
    assert lines[10].startswith("speed    1.96 times that of one rank: ")
    assert lines[12] == "bytes    a round: down 0 B, up 0 B"
    assert lines[14].endswith(": 1.5 kB")
    assert lines[15].split() == ["1.5", "kB", "rows"]
    assert len(lines) == 17


def test_a_round_trains_on_one_chunk() -> None:
    lines = plan_text(planned(Standalone()), {}, rounds=1, chunks=2).splitlines()
    assert [line.split()[2] for line in lines[7:9]] == ["270", "282"]


def test_the_text_of_many_ranks_is_a_summary() -> None:
    fleet = rehearsed(CASES["heterofl"], world=17)
    names = [line.split()[0] for line in plan_text(fleet, {}, rounds=2).splitlines() if line]
    assert {"least", "median", "most"} <= set(names)
    assert "16" not in names


def test_flops_that_are_not_known_are_said_to_be() -> None:
    fleet = planned(Standalone())
    fleet.groups[0].flops = 0.0
    assert plan_text(fleet, {}, rounds=1).count("not known") == 1
