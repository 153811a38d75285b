"""A plan is what a run does: bytes against its ledger, loads and memory by hand."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd import FedBCD
from lightfed.algorithms.shared.aspg import ASPG
from lightfed.algorithms.standalone import Standalone
from lightfed.api.algorithm import Algorithm
from lightfed.distributed.placement import Rates
from lightfed.local.client_group import Cohort
from lightfed.local.local_work import LocalWork
from lightfed.models.networks.mlp import MLP
from lightfed.previews.dry_run import NoRank, Rehearsal
from lightfed.previews.plan import Plan, plan, state_slots
from lightfed.previews.plan_text import plan_text
from lightfed.state.costs import Ledger
from tests.conformance.cases import CASES, Case
from tests.small import CPU, SGD_HALF, fleet_of, random_data, run_round

NAMES = {"local_epochs": "epochs", "local_steps": "steps", "fraction": "fraction"}
ROUNDS = 2


def work_of(case: Case) -> dict[str, Any]:
    given = {"fraction": 0.4} | case.federation
    return {NAMES[k]: v for k, v in given.items() if k in NAMES} | {"limit": 1}


def spent(ledger: Ledger) -> list[list[float]]:
    """(clients, 2) bytes up and down."""
    return ledger.totals[:, :2].tolist()


def rehearsed(case: Case, world: int = 3) -> Rehearsal:
    data = case.data()
    data.prepare(clients=case.clients, seed=0, device=CPU, folder=None)
    fleet = Rehearsal(
        case.cohorts(), case.algorithm(), data, ranks=NoRank(world), work=LocalWork(**work_of(case))
    )
    for t in range(ROUNDS):
        run_round(fleet, t)
    return fleet


def trained(case: Case) -> Ledger:
    optimizer = case.federation.get("optimizer", partial(SGD, lr=0.01))
    fleet = fleet_of(
        case.cohorts(), case.algorithm(), case.data(), optimizer=optimizer, **work_of(case)
    )
    for t in range(ROUNDS):
        run_round(fleet, t)
    return fleet.ledger


@pytest.mark.parametrize(
    "name",
    [
        "cloud_fedprox", "dpsgd", "fedapen", "fedavg", "fedavg_local_statistics", "fedbcd_async",
        "fedbcdi", "flexifed_max", "heterofl_dynamic", "lgfedavg_heads", "standalone",
    ],
)  # fmt: skip
def test_bytes_are_those_of_a_run(name: str) -> None:
    fleet = rehearsed(CASES[name])
    assert spent(fleet.ledger) == spent(trained(CASES[name]))
    assert not fleet.at_most
    assert not fleet.depends


@pytest.mark.parametrize("name", ["dispfl", "my1", "my2"])
def test_masks_send_less_than_planned(name: str) -> None:
    fleet = rehearsed(CASES[name])
    planned, found = np.array(spent(fleet.ledger)), np.array(spent(trained(CASES[name])))
    assert fleet.at_most
    assert (found < planned).all()
    assert (found > 0.3 * planned).all()


@pytest.mark.parametrize("name", ["fedkd", "fd"])
def test_bytes_that_depend_on_training_are_said_to(name: str) -> None:
    case = CASES[name]
    fleet = rehearsed(case)
    assert fleet.depends
    assert fleet.ledger.totals[:, Ledger.UP].sum() == 0


def test_a_size_of_its_own_holds_for_the_initial_values_alone() -> None:
    fleet = rehearsed(CASES["fedavg"])
    fleet.open_round()
    fleet.send(fleet.algorithm.model, [1], size=5)  # type: ignore[arg-type]
    assert fleet.depends
    assert fleet.close_round()["bytes_down"] == 5


def test_no_client_has_a_row() -> None:
    for name in ("flexifed_max", "heterofl"):
        assert all(not state.store.slots for state in rehearsed(CASES[name]).cohorts)


# Five samples of four features, and so on; a hidden layer of 2 or 9 units, two classes.
SIZES = (5, 3, 4, 6)
COHORTS = [Cohort(2, partial(MLP, hidden=(9,))), Cohort(2, partial(MLP, hidden=(2,)))]
PARAMETERS = (4 * 9 + 9 + 9 * 2 + 2, 4 * 2 + 2 + 2 * 2 + 2)
FLOPS = (2 * (4 * 9 + 9 * 2), 2 * (4 * 2 + 2 * 2))
PADDED = (160, 128)  # of a row: tensors begin at multiples of 32


def planned(
    algorithm: Algorithm,
    *,
    world: int = 2,
    cohorts: list[Cohort] | None = None,
    rates: Rates | None = None,
    rounds: int = 1,
    work: LocalWork | None = None,
    **options: Any,
) -> Plan:
    data = random_data(SIZES, classes=2, batch_size=2)
    data.prepare(clients=4, seed=0, device=CPU, folder=None)
    cohorts = COHORTS if cohorts is None else cohorts
    fleet = Rehearsal(cohorts, algorithm, data, ranks=NoRank(world), rates=rates, work=work)
    return plan(fleet, rounds=rounds, **({"optimizer": SGD_HALF} | options))


def test_everybody_takes_part() -> None:
    found = planned(Standalone())
    # 540, 324 | 96, 144: the longest, 540, against 324 + 144 + 96.
    assert found.loads.tolist() == [540, 564]
    assert found.sessions.tolist() == [1, 3]
    assert found.balance.planned == found.balance.other == pytest.approx(564 / 552)
    assert (found.traffic.down, found.traffic.up) == (0, 0)
    assert found.participants == 4


def test_what_cohorts_are() -> None:
    first, second = planned(Standalone()).cohorts
    assert (first.parameters, second.parameters) == PARAMETERS
    assert (first.flops, second.flops) == FLOPS
    assert (first.row, second.row) == (4 * PADDED[0], 4 * PADDED[1])
    assert (first.clients, second.name) == (2, "1")


def test_the_bound_is_the_longest_session_where_that_is_more_than_the_mean() -> None:
    found = planned(Standalone(), world=4)
    assert sorted(found.loads.tolist()) == [96, 144, 324, 540]
    assert found.balance.planned == 1


def test_memory_of_clients_that_keep_rows() -> None:
    memory = planned(Standalone()).memory
    wide, narrow = 4 * PADDED[0], 4 * PADDED[1]
    assert memory.rows.tolist() == [wide, wide + 2 * narrow]
    assert memory.modules == wide + narrow
    assert (memory.server, memory.exchange, memory.staged) == (0, 0, 0)
    assert memory.training == 4 * PARAMETERS[0]  # plain SGD keeps gradients alone
    assert memory.device == wide + 2 * narrow + wide + narrow + 4 * PARAMETERS[0]


def test_rows_on_the_host_leave_two_of_a_cohort_on_the_device() -> None:
    memory = planned(Standalone(), host_rows=True).memory
    assert memory.staged == 2 * memory.modules
    assert memory.device == 3 * memory.modules + memory.training


def test_rows_of_clients_that_keep_nothing_are_as_many_as_were_ever_there() -> None:
    alike = [Cohort(4, partial(MLP, hidden=(9,)))]
    half = LocalWork(clients_per_round=2)
    found = planned(FedAvg(), cohorts=alike, rounds=3, work=half, optimizer=partial(SGD, lr=1))
    row = 4 * PADDED[0]
    assert found.memory.rows.tolist() == [row, row]
    assert found.memory.server == row
    assert found.participants == 2
    assert found.traffic.down == found.traffic.up == 2 * 4 * PARAMETERS[0]
    assert found.traffic.servers == 0


def test_bytes_between_servers_are_a_mean_of_a_round() -> None:
    alike = [Cohort(4, partial(MLP, hidden=(9,)))]
    found = planned(FedBCD(2, 1, wait=1), cohorts=alike, rounds=3)
    assert found.traffic.servers == 2 * 4 * PARAMETERS[0]


def test_a_part_that_trains_at_home_may_wait_for_one_rank() -> None:
    """Of four equal clients on two ranks two train: of home ranks they may have the same one."""
    data = random_data((4, 4, 4, 4), classes=2)
    data.prepare(clients=4, seed=0, device=CPU, folder=None)
    alike, work = [Cohort(4, partial(MLP, hidden=(9,)))], LocalWork(clients_per_round=2)
    figures = {}
    for algorithm in (FedAvg(), FedAvg(buffers="local")):
        fleet = Rehearsal(alike, algorithm, data, ranks=NoRank(2), work=work)
        together = sum(len({k % 2 for k in fleet.participants(t)}) == 1 for t in range(20))
        figures[algorithm.stateful] = plan(fleet, rounds=20, optimizer=None).balance
    assert 0 < together < 20
    same = pytest.approx(1 + together / 20)
    assert (figures[False].planned, figures[False].other) == (1, same)
    assert (figures[True].planned, figures[True].other) == (same, 1)


def test_measured_times_are_the_costs() -> None:
    found = planned(Standalone(), rates=Rates({0: [1.0], 1: [7.0]}))
    assert found.timed
    # 42 | 28, then 5 joins the 28, and 3 the 33.
    assert found.loads.tolist() == [42, 36]
    assert not planned(Standalone(), rates=Rates({1: [7.0]})).timed


def test_a_round_trains_on_one_chunk() -> None:
    whole, halves = planned(Standalone()), planned(Standalone(), chunks=2)
    assert halves.loads.tolist() == (whole.loads / 2).tolist()
    assert halves.balance == whole.balance


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


def test_the_text_has_a_line_for_every_one_of_a_few_ranks() -> None:
    lines = plan_text(planned(Standalone())).splitlines()
    assert lines[0] == ("Standalone, 4 clients on 2 ranks: the first round, 4 sessions in each")
    assert lines[2].split()[:3] == ["cohort", "clients", "parameters"]
    assert lines[3].split() == ["0", "2", "65", "108", "640", "B"]
    assert [line.split() for line in lines[7:9]] == [
        ["0", "1", "540", "640", "B"],
        ["1", "3", "564", "1.66", "kB"],
    ]
    assert lines[10].startswith("balance  1.022: ")


def test_the_text_of_many_ranks_is_a_summary() -> None:
    found = planned(Standalone())
    many = replace(
        found, sessions=np.arange(17.0), loads=np.arange(17.0) * 1e6,
        memory=replace(found.memory, rows=np.arange(17) * 1000),
    )  # fmt: skip
    lines = [line.split() for line in plan_text(many).splitlines()]
    assert ["least", "0", "0", "0", "B"] in lines
    assert ["median", "8", "8.00", "M", "8.00", "kB"] in lines
    assert ["most", "16", "16.0", "M", "16.0", "kB"] in lines


def test_the_text_says_what_is_not_known() -> None:
    found = planned(Standalone())
    assert "at most" not in plan_text(found)
    clouds = replace(found.traffic, servers=3e6)
    assert ", between servers 3.00 MB" in plan_text(replace(found, traffic=clouds))
    masked = replace(found.traffic, at_most=True, down=2e6)
    assert "down at most 2.00 MB, up at most 0 B" in plan_text(replace(found, traffic=masked))
    trained = replace(found.traffic, depends=True)
    assert "up not known" in plan_text(replace(found, traffic=trained))
    unknown = [replace(cohort, flops=0.0) for cohort in found.cohorts]
    assert plan_text(replace(found, cohorts=unknown)).count("not known") == 2
    assert "seconds" in plan_text(replace(found, timed=True))


@pytest.mark.parametrize(
    ("stateful", "line"),
    [
        (True, "with home ranks 1.500, with ranks for whoever trains 1.250"),
        (False, "with home ranks 1.250, with ranks for whoever trains 1.500"),
    ],
)
def test_the_text_says_both_ratios_where_a_part_trains(stateful: bool, line: str) -> None:
    found = planned(Standalone())
    balance = replace(found.balance, planned=1.5, other=1.25)
    some = replace(found, stateful=stateful, participants=2.0, balance=balance)
    assert line in plan_text(some)
    assert "home ranks" not in plan_text(found)
