"""Every kernel compiles for sm_90 without a GPU: no spills, 16-byte accesses, bounded registers."""

import pytest

from tests.kernels.machine.harness import Case, cases, reports

FIRST = tuple({case.kernel: case.name for case in reversed(cases())}.values())
OTHERS = tuple(case.name for case in cases() if case.name not in FIRST)


def check(case: Case, names: tuple[str, ...]) -> None:
    report = reports(names)[case.name]
    assert report.stack == 0
    assert report.local == 0
    assert report.registers <= case.registers
    assert report.shared <= case.shared
    assert report.wide_loads >= case.wide_loads
    assert report.wide_stores >= case.wide_stores
    assert report.asynchronous >= case.asynchronous
    assert report.blocks >= case.blocks
    if not case.atomics:
        assert report.atomics == 0


@pytest.mark.parametrize("case", [c for c in cases() if c.name in FIRST], ids=lambda c: c.name)
def test_the_compiler_reports_no_spills_and_wide_accesses(case: Case) -> None:
    check(case, FIRST)


@pytest.mark.matrix
@pytest.mark.parametrize("case", [c for c in cases() if c.name in OTHERS], ids=lambda c: c.name)
def test_so_does_it_for_every_variant(case: Case) -> None:
    check(case, OTHERS)
