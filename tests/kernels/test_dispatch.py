"""Where operations run, and the limits that all of them share."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from lightfed_kernels import (
    Groups,
    Layout,
    Members,
    Neighbours,
    Segments,
    SliceTable,
    grouped_mean_,
    masked_mean,
    select_by_magnitude,
    slice_merge_,
    slice_take_,
)
from lightfed_kernels._rows import addresses, backend, check_grid, checking, resident

from tests.kernels.backends import INTERPRETED, NOT_INTERPRETED

LAYOUT = Layout.build([("w", (40,)), ("b", (5,))])
ROW = LAYOUT.new_row()
TABLE = SliceTable.build(LAYOUT, [LAYOUT])
GROUPS = Groups.build([([0, 1], 0, LAYOUT.size)], [LAYOUT.size] * 2)


def test_cpu_tensors_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for choice in ("auto", "torch"):
        monkeypatch.setenv("LIGHTFED_KERNELS", choice)
        assert backend(ROW) == "torch"
    monkeypatch.delenv("LIGHTFED_KERNELS")
    assert backend(ROW) == "torch"


def test_what_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "cuda")
    with pytest.raises(ValueError, match="LIGHTFED_KERNELS: 'cuda' is not one of auto, triton"):
        backend(ROW)
    monkeypatch.setenv("LIGHTFED_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="these tensors are not on a CUDA device; set TRITON_INT"):
        backend(ROW)


@pytest.mark.gpu
def test_cuda_tensors_go_to_triton() -> None:
    assert backend(ROW.cuda()) == "triton"


def test_checks_on_the_device_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTFED_KERNELS_CHECK", raising=False)
    assert not checking()
    monkeypatch.setenv("LIGHTFED_KERNELS_CHECK", "1")
    assert checking()


def test_a_grid_ends_at_two_to_the_31() -> None:
    check_grid("masked_mean", 2**31 - 1)
    with pytest.raises(ValueError, match="masked_mean: 2147483648 programs in one launch; 2147483"):
        check_grid("masked_mean", 2**31)


@pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("slice_merge_", lambda: slice_merge_(ROW, [ROW] * 2, Members.build(TABLE, [0, 0]))),
        ("slice_take_", lambda: slice_take_(ROW, [ROW.clone()], TABLE, [0])),
        ("masked_mean", lambda: masked_mean([ROW] * 2, Neighbours.build([[0], [1]], senders=2))),
        ("rows", lambda: grouped_mean_([ROW, ROW.clone()], GROUPS)),
        (
            "select",
            lambda: select_by_magnitude(
                ROW, torch.zeros(3, dtype=torch.int32), [1, 1], Segments.build(LAYOUT), largest=True
            ),
        ),
    ],
)
def test_every_launch_looks_at_its_grid(
    name: str, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "triton")
    monkeypatch.setattr("lightfed_kernels._rows.MAX_PROGRAMS", 0)
    with pytest.raises(ValueError, match=rf"{name}\w*: \d programs in one launch; 0 are possible"):
        call()


def test_the_package_does_not_import_triton() -> None:
    """It is slow to import, and need not be there on a machine without CUDA."""
    code = "import sys, lightfed_kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_addresses_are_copied_to_a_device_once_while_rows_stay(device: torch.device) -> None:
    rows = torch.zeros(3, 64, device=device)
    first = resident(addresses("rows", [rows]), rows.device)
    assert resident(addresses("rows", [rows[0], rows[1:]]), rows.device) is first
    moved = resident(addresses("rows", [rows[0], rows[2], rows[1]]), rows.device)
    assert torch.equal(moved.cpu(), first.cpu()[[0, 2, 1]])
