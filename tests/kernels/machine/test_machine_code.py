"""Every launch compiles for sm_90 without a GPU: no spills, 16-byte accesses, bounded registers."""

import pytest

from tests.kernels.machine.harness import Case, cases
from tests.kernels.machine.launches import launches, of_case


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_compiler_reports_no_spills_and_wide_accesses(case: Case) -> None:
    report = of_case(case, launches(named=True)).report
    assert report is not None
    assert report.stack == 0
    assert report.local == 0
    assert report.registers <= case.registers
    assert report.shared <= case.shared
    assert report.wide_loads >= case.wide_loads
    assert report.wide_stores >= case.wide_stores
    assert report.blocks >= case.blocks
    assert case.barriers is None or report.barriers <= case.barriers
    assert case.loop is None or report.loop <= case.loop
    if not case.atomics:
        assert report.atomics == 0


@pytest.mark.matrix  # it compiles as many kernels again
def test_no_launch_spills() -> None:
    """Also those that no case names: other dtypes, without weights, without masks."""
    found = launches()
    assert len(found) >= len(cases())
    spilling = []
    for launch in found:
        assert launch.report is not None
        if launch.report.stack or launch.report.local:
            spilling.append(launch.title)
    assert spilling == []
