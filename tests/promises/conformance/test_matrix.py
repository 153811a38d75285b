"""Every case on 1, 2 and 4 ranks, stopped and resumed on several: `pytest -m matrix`.

Clients train one after the other, and in packs of two sizes wherever they can.
"""

from pathlib import Path

import pytest

from lightfed.local.packing import SideBySide
from lightfed.testing.conformance import check, digests_of
from lightfed.testing.ranks import in_new_process
from tests.promises.conformance import packs
from tests.promises.conformance.kit import plan_of


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("side_by_side", ["off", 3, 32])
@pytest.mark.parametrize("stateful", [True, False])
def test_every_case_on_every_number_of_ranks(
    stateful: bool, side_by_side: SideBySide, tmp_path: Path
) -> None:
    plan = plan_of(stateful=stateful, full=True, side_by_side=side_by_side)
    digests = digests_of(plan, tmp_path)
    for name in plan.cases:
        check(plan, name, digests)


@pytest.mark.matrix
@pytest.mark.timeout(1500)
def test_packs_of_any_size_on_any_ranks_survive_a_kill_within_one(tmp_path: Path) -> None:
    words = ["--cases", "heterofl, conv, bn, one channel", "--out", str(tmp_path / "table.md")]
    in_new_process(packs.main, words)
    assert "same" in (tmp_path / "table.md").read_text()
