"""What the files of the kit share. A file takes some cases, so that two workers can run the kit."""

from dataclasses import replace

from lightfed.local.packing import SideBySide
from lightfed.testing.worker import Plan
from tests.promises.conformance.cases import CASES, COMBINATIONS

QUICK = ((1, 2), ((2, 1), (1, 2)))
FULL = ((1, 2, 4), ((4, 2), (2, 4)))


def plan_of(*, stateful: bool, full: bool = False, side_by_side: SideBySide = "auto") -> Plan:
    """The cases whose clients keep something from round to round, or the others."""
    cases = {
        name: replace(case, federation={"side_by_side": side_by_side} | dict(case.federation))
        for name, case in (CASES | (COMBINATIONS if full else {})).items()
        if case.algorithm().stateful == stateful
    }
    return Plan(cases, *(FULL if full else QUICK))
