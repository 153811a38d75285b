"""Merge and take against float64 references, element by element, on every backend."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightfed_kernels import (
    Layout,
    Members,
    SliceTable,
    slice_finish_,
    slice_merge_,
    slice_sum,
    slice_take_,
)
from lightfed_kernels._rows import backend
from lightfed_kernels.merge import _merge, _tables, _take
from lightfed_kernels.reference import slices as reference
from lightfed_kernels.slices import TILE
from torch import Tensor

from tests.kernels.backends import INTERPRETED, NOT_INTERPRETED
from tests.kernels.slice_cases import SliceCase, slice_cases

DTYPES = [torch.float32, torch.float64, torch.bfloat16]

# Half a unit in the last place, relative; the interpreter truncates bf16, which is a whole one.
ROUNDING = {
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-50,
    torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8,
}


def canary(row: Tensor, device: torch.device) -> Tensor:
    """The row on a device, with NaN before and behind it: what is read there shows."""
    band = torch.full((64 + row.numel() + 64,), float("nan"), dtype=row.dtype, device=device)
    band[64 : 64 + row.numel()] = row.to(device)
    return band[64 : 64 + row.numel()]


def assert_bands_whole(row: Tensor) -> None:
    """Nothing was written outside the row."""
    assert row._base is not None
    assert row._base[:64].isnan().all()
    assert row._base[-64:].isnan().all()


def merged(case: SliceCase, dtype: torch.dtype, device: torch.device) -> Tensor:
    out = canary(case.old(dtype), device)
    rows = [canary(row, device) for row in case.rows(dtype)]
    assert slice_merge_(out, rows, case.members(device)) is out
    assert_bands_whole(out)
    return out.cpu()


@settings(max_examples=6)
@given(case=slice_cases(), dtype=st.sampled_from(DTYPES))
def test_a_merge_is_the_weighted_mean_of_what_covers(
    device: torch.device, case: SliceCase, dtype: torch.dtype
) -> None:
    expected = case.expected(dtype)
    found = merged(case, dtype, device)
    assert found.dtype == dtype
    # float64 sums and one rounding; a sum of other weights may be off by its float64 rounding.
    bound = ROUNDING[dtype] * expected.abs() * (1 + 1e-9) + 2.0**6 * 2.0**-48
    assert ((found.double() - expected).abs() <= bound).all()


@settings(max_examples=3)
@given(case=slice_cases(), rng=st.randoms(use_true_random=False))
def test_sums_of_any_processes_finished_in_any_shards_have_the_bits_of_the_whole(
    device: torch.device, case: SliceCase, rng: random.Random
) -> None:
    whole = merged(case, torch.float32, device)
    rows = [canary(row, device) for row in case.rows(torch.float32)]
    processes = rng.randint(1, 3)
    owner = [rng.randrange(processes) for _ in rows]
    parts = []
    for process in range(processes):
        mine = [k for k in range(len(rows)) if owner[k] == process]
        rng.shuffle(mine)
        parts.append(slice_sum([rows[k] for k in mine], case.members(device, mine)))
    rng.shuffle(parts)
    sums = torch.stack(parts).sum(0)
    at_once = canary(case.old(torch.float32), device)
    slice_finish_(at_once, sums.clone(), case.members(device, []))
    assert_bands_whole(at_once)
    assert torch.equal(at_once.cpu(), whole)

    out, expected = canary(case.old(torch.float32), device), case.old(torch.float32)
    cuts = sorted({0, len(sums), *(32 * rng.randint(0, len(sums) // 32) for _ in range(2))})
    shards = list(pairwise(cuts))
    rng.shuffle(shards)
    for start, stop in shards:  # none touches what another one finishes
        assert slice_finish_(out, sums[start:stop].clone(), case.members(device, []), start) is out
        expected[start:stop] = whole[start:stop]
        assert torch.equal(out.cpu(), expected)
    assert_bands_whole(out)


@settings(max_examples=6)
@given(case=slice_cases(), dtype=st.sampled_from(DTYPES))
def test_take_copies_what_a_level_covers_and_nothing_else(
    device: torch.device, case: SliceCase, dtype: torch.dtype
) -> None:
    row = canary(case.old(dtype), device)
    layouts = [case.layout(k) for k in range(len(case.level_of))]
    outs = [canary(layout.new_row(dtype=dtype), device) for layout in layouts]
    slice_take_(row, outs, case.table(device), case.level_of)
    for out, layout in zip(outs, layouts, strict=True):
        assert_bands_whole(out)
        expected = reference.take(case.old(dtype), case.target, layout, groups=case.groups)
        assert torch.equal(out.cpu(), expected)


@settings(max_examples=5)
@given(case=slice_cases())
def test_the_same_bits_twice(device: torch.device, case: SliceCase) -> None:
    one, other = (merged(case, torch.float32, device) for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
@settings(max_examples=5)
@given(case=slice_cases())
def test_kernel_and_torch_path_have_the_same_bits(case: SliceCase) -> None:
    cpu, found = torch.device("cpu"), {}
    for choice in ("torch", "triton"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LIGHTFED_KERNELS", choice)
            found[choice] = merged(case, torch.float32, cpu)
    assert torch.equal(found["torch"], found["triton"])


@pytest.mark.parametrize("size", [16, 64])
@settings(max_examples=2)
@given(case=slice_cases())
def test_the_bits_do_not_depend_on_how_the_work_is_cut(
    device: torch.device, size: int, case: SliceCase
) -> None:
    def everything() -> list[Tensor]:
        rows = [row.to(device) for row in case.rows(torch.float32)]
        outs = [torch.zeros_like(row) for row in rows]
        slice_take_(case.old(torch.float32).to(device), outs, case.table(device), case.level_of)
        sums = slice_sum(rows, case.members(device))
        return [merged(case, torch.float32, device), sums, *outs]

    whole = everything()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightfed_kernels.merge.CHUNK", size)
        if device.type == "cpu" and INTERPRETED:  # a compiled tile has 16 bytes a thread at least
            patch.setattr("lightfed_kernels.slices.TILE", size)
            patch.setattr("lightfed_kernels.gpu.slices.TILE", size)
        cut = everything()
    assert all(torch.equal(one, other) for one, other in zip(cut, whole, strict=True))


WIDE = Layout.build([("w", (6, 40)), ("head", (5, 40)), ("b", (5,))])
SLIM = Layout.build([("w", (3, 20)), ("head", (5, 20)), ("b", (5,))])


def table_of(device: torch.device, *levels: Layout) -> SliceTable:
    return SliceTable.build(WIDE, levels, label_rows=("head", "b"), device=device)


def filled(layout: Layout, value: float, device: torch.device) -> Tensor:
    return canary(torch.where(layout.live(), value, 0.0), device)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_where_it_is(device: torch.device, value: float) -> None:
    # In the old row where nobody covers, and in label rows that one client does not hold, while
    # the other does.
    out, rows = filled(WIDE, value, device), [filled(SLIM, 1.0, device) for _ in range(2)]
    SLIM.views(rows[0])["head"][2:4] = value
    SLIM.views(rows[0])["b"][2:4] = value
    members = Members.build(table_of(device, SLIM), [0, 0], labels=[[0, 4], [3]])
    slice_merge_(out, rows, members)
    found = WIDE.views(out.cpu())
    covered = {name: view.isfinite() for name, view in found.items()}
    assert covered["w"][:3, :20].all()
    assert covered["w"].sum() == 60
    assert covered["head"][[0, 3, 4], :20].all()
    assert covered["head"].sum() == 60
    assert covered["b"].tolist() == [True, False, False, True, True]
    assert all((view[covered[name]] == 1.0).all() for name, view in found.items())


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_covered_and_not_finite_stays_visible(device: torch.device, value: float) -> None:
    out, rows = filled(WIDE, 2.0, device), [filled(SLIM, 1.0, device), filled(WIDE, 3.0, device)]
    SLIM.views(rows[0])["w"][1, 2] = value
    slice_merge_(out, rows, Members.build(table_of(device, SLIM, WIDE), [0, 1]))
    found = WIDE.views(out.cpu())["w"]
    assert found.isfinite().logical_not().nonzero().tolist() == [[1, 2]]
    assert found[0, 0] == 2.0
    assert found[5, 39] == 3.0


def test_a_client_of_weight_0_takes_no_part_whatever_it_holds(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS_CHECK", "1")
    table = table_of(device, SLIM, WIDE)
    rows = [filled(SLIM, float("nan"), device), filled(SLIM, 3.0, device)]
    rows += [filled(WIDE, float("inf"), device)]
    weights = [0.0, 2.0, 0.0]
    whole, split = filled(WIDE, 7.0, device), filled(WIDE, 7.0, device)
    slice_merge_(whole, rows, Members.build(table, [0, 0, 1], weights=weights))
    sums = [
        slice_sum(
            [rows[k] for k in local],
            Members.build(table, [0, 0, 1], weights=weights, local=local),
        )
        for local in ([0, 1], [2])
    ]
    everybody = Members.build(table, [0, 0, 1], weights=weights)
    slice_finish_(split, torch.stack(sums).sum(0), everybody)
    for out in (whole, split):
        found = WIDE.views(out.cpu())["w"]
        assert (found[:3, :20] == 3.0).all()
        assert (found[3:] == 7.0).all()
        assert (found[:, 20:] == 7.0).all()


def test_what_lies_in_padding_stays_in_padding(device: torch.device) -> None:
    rows = [filled(SLIM, 1.0, device), filled(SLIM, 3.0, device)]
    for row in rows:
        row[~SLIM.live().to(device)] = float("nan")
    out = filled(WIDE, 0.0, device)
    slice_merge_(out, rows, Members.build(table_of(device, SLIM), [0, 0]))
    assert out[WIDE.live().to(device)].isfinite().all()


def test_nobody_holds_a_label_and_nobody_weighs(device: torch.device) -> None:
    table = table_of(device, SLIM)
    out = filled(WIDE, 7.0, device)
    slice_merge_(out, [filled(SLIM, 1.0, device)], Members.build(table, [0], labels=[[]]))
    found = WIDE.views(out.cpu())
    assert (found["head"] == 7.0).all()
    assert (found["w"][:3, :20] == 1.0).all()
    out = filled(WIDE, 7.0, device)
    slice_merge_(out, [filled(SLIM, 1.0, device)], Members.build(table, [0], weights=[0.0]))
    assert (WIDE.views(out.cpu())["w"] == 7.0).all()


def test_label_rows_of_a_tensor_that_nobody_narrows(device: torch.device) -> None:
    layout = Layout.build([("head", (5, 8)), ("b", (5,))])
    table = SliceTable.build(layout, [layout], label_rows=("head",), device=device)
    out, rows = filled(layout, 7.0, device), [filled(layout, value, device) for value in (1.0, 3.0)]
    slice_merge_(out, rows, Members.build(table, [0, 0], labels=[[0, 2], [2, 3]]))
    found = layout.views(out.cpu())
    assert found["head"].tolist() == [[mean] * 8 for mean in (1.0, 7.0, 2.0, 3.0, 7.0)]
    assert found["b"].tolist() == [2.0] * 5


def test_tensors_may_lie_in_another_order_or_apart(device: torch.device) -> None:
    wide = Layout.build([("a", (40,)), ("b", (40,)), ("c", (40,))])
    others = [
        Layout.build([("b", (40,)), ("a", (40,)), ("c", (40,))]),
        Layout.build([("a", (40,)), ("own", (3,)), ("b", (40,)), ("c", (40,))]),
    ]
    for layout in others:
        row = layout.new_row(device=device)
        for value, name in enumerate("abc"):
            layout.views(row)[name].fill_(float(value))
        out = wide.new_row(device=device)
        table = SliceTable.build(wide, [layout], device=device)
        slice_merge_(out, [row], Members.build(table, [0]))
        assert [view.unique().tolist() for view in wide.views(out).values()] == [
            [0.0],
            [1.0],
            [2.0],
        ]
        back = layout.new_row(device=device)
        slice_take_(out, [back], table, [0])
        assert torch.equal(back, row)


def test_one_element(device: torch.device) -> None:
    layout = Layout.build([("x", ())])
    members = Members.build(SliceTable.build(layout, [layout], device=device), [0, 0])
    out, rows = canary(layout.new_row(), device), [layout.new_row(device=device) for _ in range(2)]
    rows[0][0], rows[1][0] = 1.0, 2.0
    assert slice_merge_(out, rows, members)[0] == 1.5


def test_a_matrix_of_rows_is_as_good_as_a_list(device: torch.device) -> None:
    table = SliceTable.build(WIDE, [WIDE], device=device)
    rows = torch.arange(4.0, device=device)[:, None] * WIDE.live().to(device)
    members = Members.build(table, [0] * 4, weights=[1.0, 2.0, 3.0, 4.0])
    found = slice_merge_(WIDE.new_row(device=device), rows, members)
    assert torch.equal(found, 2.0 * WIDE.live().to(device))


def test_rows_longer_than_two_to_the_31(device: torch.device) -> None:
    """8 GiB of address space, of which a few pages are touched: nobody covers the huge tensor."""
    far = 2**31 + 64
    wide = Layout.build([("huge", (far,)), ("w", (4, 40)), ("odd", (5,))])
    slim = Layout.build([("private", (far,)), ("w", (2, 20)), ("odd", (3,))])
    out = torch.empty(wide.size, dtype=torch.float32, device=device)
    row = torch.empty(slim.size, dtype=torch.float32, device=device)
    views, own = wide.views(out), slim.views(row)
    for name in ("w", "odd"):
        views[name].fill_(5.0)
        own[name].fill_(1.0)
    table = SliceTable.build(wide, [slim], device=device)
    slice_merge_(out, [row], Members.build(table, [0]))
    assert (views["w"][:2, :20] == 1.0).all()
    assert views["w"].sum() == 40 + 120 * 5.0
    assert views["odd"].tolist() == [1.0, 1.0, 1.0, 5.0, 5.0]
    views["w"].fill_(9.0)
    slice_take_(out, [row], table, [0])
    assert (own["w"] == 9.0).all()


def test_the_last_tile_of_a_tensor_longer_than_two_to_the_31(device: torch.device) -> None:
    if backend(torch.empty(0, device=device)) == "torch":
        return  # it knows no tiles, and would go through 8 GiB
    size = 2**31 + 1024
    layout = Layout.build([("x", (size,))])
    table = SliceTable.build(layout, [layout], device=device)
    flat, rest = table.tiles(torch.bfloat16, 0)
    assert len(rest) == 0
    assert len(flat) == size // TILE
    members = Members.build(table, [0, 0])
    out, row = (torch.empty(size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out[-2 * TILE :], row[-2 * TILE :] = 5.0, 3.0
    _merge(out, [row, row], flat[-1:], rest, _tables(members), members.weights)
    assert out[-2 * TILE :].tolist() == [5.0] * TILE + [3.0] * TILE
    row[-TILE:] = 0.0
    _take(out, [row, row], flat[-1:], rest, table.tensors, table.levels, members.first)
    assert row[-2 * TILE :].tolist() == [3.0] * 2 * TILE
