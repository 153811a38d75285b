"""Every kernel compiles for sm_90 without a GPU: no spills, 16-byte accesses, bounded registers."""

import pytest

from tests.kernels.machine.harness import Case, cases, reports


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_compiler_reports_no_spills_and_wide_accesses(case: Case) -> None:
    report = reports()[case.name]
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
