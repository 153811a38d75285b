"""Every case has the same bits on any number of ranks, also stopped and resumed on another one.

The default tier has a case for each kind of state that may depend on ranks or get lost, on 1 and 2
ranks. `pytest -m matrix` has all of them on 1, 2 and 4 ranks; there clients train one after the
other, and in packs of two sizes wherever they can.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from lightfed.packs.packing import SideBySide
from lightfed.testing.case import Case
from lightfed.testing.conformance import Digests, check, digests_of
from lightfed.testing.worker import Plan
from tests.forked import in_new_process
from tests.promises.conformance.cases import CASES, COMBINATIONS
from tests.small import fit

EVERY = CASES | COMBINATIONS
KINDS = {
    "devices_dropout_partial": "who is there, and parts of sessions",
    "devices_late_host": "sessions that come a round late, and rows on the host",
    "ditto_unseen": "clients that never train, and what they train in evaluations",
    "devices_unseen": "who is there, without those that never train",
    "dispfl_statistics": "masks, and rows of neighbours",
    "fedavg_columns": "batches in dicts",
    "fedavg_kept_adam": "optimizers of clients",
    "fedavg_kept_callback": "what a callback keeps of a client",
    "fedavg_kept_gan": "several optimizers of each client",
    "fedavg_step_schedule": "steps of the lives of clients",
    "fedavg_local_statistics": "statistics of clients",
    "fedbcdi_async": "clouds, drawn seconds, and their patience",
    "fedbuff": "updates under way",
    "feddyn_norms": "vectors of the server and of clients, and parts of rows",
    "fedkd": "a second network of each client",
    "fednova_momentum": "what the server's optimizer keeps",
    "fedrep": "two phases of a session",
    "fedrolex_random": "drawn windows of rows",
    "fedtgp": "prototypes, and a network that the server trains",
    "flexifed_clustered": "layers that clusters share",
    "flora": "a base that adapters are added to",
    "heterofl_drawn_statistics": "statistics that are drawn for a test",
    "late_ditto": "late updates beside rows that clients go on with",
    "late_feddyn": "late updates that change sums over clients",
    "late_rankmean": "late adapters",
    "lgfedavg_validation": "tests on validation samples, in sessions and after them",
    "metric_objects": "metrics that are objects",
    "moon_packed": "earlier models of clients, in packs",
    "standalone": "rows of clients",
}


def plan_of(
    cases: Mapping[str, Case], worlds: tuple[int, ...], side_by_side: SideBySide = "auto"
) -> Plan:
    """Stopped on the most of the ranks and resumed on the fewest but one, or the reverse."""
    few, many = worlds[-2:]
    packed = {
        name: replace(case, federation={"side_by_side": side_by_side} | dict(case.federation))
        for name, case in cases.items()
    }
    return Plan(packed, worlds, ((many, few), (few, many)))


PLAN = plan_of({name: EVERY[name] for name in KINDS}, (1, 2))


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    with pytest.MonkeyPatch.context() as patch:
        # The kit's own server of processes imports everything anew; see test_new_processes.py.
        patch.setattr(sys.modules[digests_of.__module__], "in_new_process", in_new_process)
        return digests_of(PLAN, tmp_path_factory.mktemp("kinds"))


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_state_has_the_bits_of_one_rank(name: str, digests: Digests) -> None:
    check(PLAN, name, digests)


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("side_by_side", ["off", 3, 32])
@pytest.mark.parametrize("stateful", [True, False])
def test_every_case_on_every_number_of_ranks(
    stateful: bool, side_by_side: SideBySide, tmp_path: Path
) -> None:
    cases = {name: case for name, case in EVERY.items() if case.algorithm().stateful == stateful}
    plan = plan_of(cases, (1, 2, 4), side_by_side)
    digests = digests_of(plan, tmp_path)
    for name in plan.cases:
        check(plan, name, digests)


@pytest.mark.parametrize(
    "name", ["fedavg_packed_norms", "fedsb_packed", "moon_packed", "rankmean_packed"]
)
def test_the_kit_has_statistics_adapters_and_losses_that_auto_packs(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    federation = case.federation_of()
    fit(federation, case.data(), tmp_path)

    how = federation.fleet.training.side_by_side
    assert len(how) == max(1, len(case.levels))
    for clients_at_once in how.values():
        assert isinstance(clients_at_once, int)
