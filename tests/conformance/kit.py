"""What the files of the kit share. A file takes some cases, so that two workers can run the kit."""

from lightfed.testing.worker import Plan
from tests.conformance.cases import CASES

QUICK = ((1, 2), ((2, 1), (1, 2)))
FULL = ((1, 2, 4), ((4, 2), (2, 4)))


def plan_of(*, stateful: bool, full: bool = False) -> Plan:
    """The cases whose clients keep something from round to round, or the others."""
    cases = {name: c for name, c in CASES.items() if c.algorithm().stateful == stateful}
    return Plan(cases, *(FULL if full else QUICK))
