"""The tables say what the kernels take for granted; what cannot be is refused by name."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from lightfed_kernels import (
    Layout,
    Members,
    SliceTable,
    _rows,
    slice_finish_,
    slice_merge_,
    slice_sum,
    slice_take_,
)
from lightfed_kernels.merge import _finish, _merge, _sum, _tables, _take
from lightfed_kernels.slices import TILE
from torch import Tensor

from tests.kernels.slice_cases import SliceCase, slice_cases

CPU = torch.device("cpu")


def elements(table: SliceTable, tile: list[int]) -> set[int]:
    """Places of a tile's elements in the target's row."""
    tensor, row, column, packed = tile
    offset, a, b, c, _ = table.tensors[tensor].tolist()
    width = 1 << (packed & 65535)
    return {
        offset + i * c + j
        for i in range(row, min(row + TILE // width, a * b))
        for j in range(column, min(column + width, c))
    }


@settings(max_examples=25)
@given(slice_cases())
def test_every_covered_element_is_in_one_tile_that_its_level_reaches(case: SliceCase) -> None:
    table = case.table(CPU)
    for dtype in (torch.float32, torch.bfloat16):
        for rank in range(len(case.levels)):
            flat, rest = table.tiles(dtype, rank)
            tiles = [*flat.tolist(), *rest.tolist()]
            owned = [elements(table, tile) for tile in tiles]
            assert sum(map(len, owned)) == len(set().union(*owned))
            layout = case.levels[table.ranks.index(rank)]
            marks = torch.zeros(case.target.size)
            ones = layout.new_row() + layout.live()
            slice_merge_(marks, [ones], Members.build(table, [table.ranks.index(rank)]))
            for place in marks.masked_fill(~case.target.live(), 0.0).nonzero().flatten().tolist():
                reach = [t[3] >> 16 for t, own in zip(tiles, owned, strict=True) if place in own]
                assert len(reach) == 1
                assert reach[0] > rank


@settings(max_examples=25)
@given(slice_cases())
def test_flat_tiles_keep_what_the_compiler_is_reported(case: SliceCase) -> None:
    table = case.table(CPU)
    for dtype, vector in ((torch.float32, 4), (torch.bfloat16, 8), (torch.float64, 2)):
        for tensor, _, column, packed in table.tiles(dtype, 0)[0].tolist():
            offset, _, b, c, labelled = table.tensors[tensor].tolist()
            sources = table.levels[:, tensor]
            assert (b, labelled) == (1, 0)
            assert offset % 32 == 0
            assert (sources[:, 0] % 32 == 0).all()
            assert (sources[:, 3] % vector == 0).all()
            assert c % vector == 0
            assert column % vector == 0
            assert (1 << (packed & 65535)) % vector == 0


def test_whole_tensors_are_one_run_and_slices_of_resnets_waste_few_lanes() -> None:
    layout = Layout.build([("w", (64, 3, 3, 3)), ("b", (10,)), ("v", (7, 9))])
    same = SliceTable.build(layout, [layout, layout])
    assert same.tensors.tolist() == [[0, 1, 1, layout.size, 0]]
    wide = Layout.build([("w", (512, 256, 3, 3))])
    table = SliceTable.build(wide, [wide, Layout.build([("w", (256, 128, 3, 3))])])
    assert table.tensors.tolist() == [[0, 512, 1, 2304, 0]]
    flat, rest = table.tiles(torch.float32, 0)
    assert len(flat) * TILE == wide.size
    assert len(rest) == 0
    # A quarter of the wide tensor: a merge of the slim level alone has few more programs than that.
    assert 4 * len(table.tiles(torch.float32, 1)[0]) < 1.2 * len(flat)


def test_a_level_that_is_one_leading_run_is_known_to_be() -> None:
    layout = Layout.build([("w", (6, 40)), ("b", (6,)), ("v", (5,))])
    leading = layout.only(["w", "b"])
    levels = [
        layout,  # all of it
        leading,  # not the last tensor
        layout.only(["b", "v"]),  # not from the start
        layout.only(["w", "v"]),  # two runs
        Layout.build([("w", (6, 20)), ("b", (6,))]),  # a slice
        Layout.build([("v", (5,)), ("w", (6, 40)), ("b", (6,))]),  # elsewhere
    ]
    runs = [SliceTable.build(layout, [level]).runs for level in levels]
    assert runs == [{0: layout.size}, {0: leading.span(2) - 32}, {}, {}, {}, {}]
    assert SliceTable.build(layout, levels[:2]).runs == {0: layout.size, 1: leading.span(2) - 32}
    assert SliceTable.build(layout, [layout], label_rows=["v"]).runs == {}


WIDE = Layout.build([("w", (6, 40)), ("b", (6,))])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: SliceTable.build(WIDE, [Layout.build([("w", (7, 4))])]),
            r"w is \[7, 4\], which is no slice of \[6, 40\]",
        ),
        (
            lambda: SliceTable.build(WIDE, [Layout.build([("w", (6,))])]),
            r"w is \[6\], which is no slice of \[6, 40\]",
        ),
        (
            lambda: SliceTable.build(WIDE, [WIDE, Layout.build([("v", (6,))])]),
            r"sources\[1\]: no tensor has a name of the target's",
        ),
        (
            lambda: SliceTable.build(WIDE, [WIDE], label_rows=("head",)),
            "label_rows: the target has no tensor 'head'",
        ),
        (
            lambda: SliceTable.build(WIDE, [WIDE], groups={"w": (4, 1)}),
            "groups: w has 6 elements in 4 equal groups",
        ),
        (
            lambda: SliceTable.build(WIDE, [WIDE], groups={"w": (2,)}),
            "groups: w has 2 dimensions, not 1",
        ),
        (
            lambda: SliceTable.build(
                Layout.build([("x", (3, 3, 3, 3))]), [Layout.build([("x", (2, 2, 2, 2))])]
            ),
            "x: narrowed in 4 separate dimensions; 3 are possible",
        ),
        (
            lambda: SliceTable.build(
                Layout.build([("x", ())]), [Layout.build([("x", ())])], label_rows=("x",)
            ),
            "label_rows: x is a scalar",
        ),
    ],
)
def test_layouts_that_cannot_be_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


TABLE = SliceTable.build(WIDE, [WIDE, Layout.build([("w", (3, 2)), ("b", (3,))])])
LABELS = SliceTable.build(WIDE, [WIDE], label_rows=("b",))
MEMBERS = Members.build(TABLE, [0, 1])
SLIM = TABLE.sources[1]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Members.build(TABLE, []), "levels: no client takes part"),
        (lambda: Members.build(TABLE, [0, 2]), "levels: 2 of client 1; the table has 0 .. 1"),
        (lambda: Members.build(TABLE, [-1]), "levels: -1 of client 0"),
        (lambda: Members.build(TABLE, [0], weights=[1.0, 2.0]), "weights: 2 for 1 clients"),
        (
            lambda: Members.build(TABLE, [0], weights=[-1.0]),
            "weights: -1.0 of client 0; weights are finite and >= 0",
        ),
        (lambda: Members.build(TABLE, [0], weights=[float("nan")]), "weights: nan of client 0"),
        (lambda: Members.build(TABLE, [0], local=[1]), r"local: \[1\]; distinct positions in 0"),
        (lambda: Members.build(TABLE, [0, 0], local=[1, 1]), r"local: \[1, 1\]; distinct"),
        (lambda: Members.build(LABELS, [0], labels=[[0], [1]]), "labels: 2 for 1 clients"),
        (
            lambda: Members.build(LABELS, [0], labels=[[2, 6]]),
            r"labels: client 0 holds labels 2 .. 6; there are 0 .. 5",
        ),
        (
            lambda: slice_merge_(WIDE.new_row(), [WIDE.new_row()], MEMBERS),
            "rows: 1 rows; 2 clients are local",
        ),
        (
            lambda: slice_merge_(WIDE.new_row(), [WIDE.new_row()] * 2, MEMBERS),
            r"rows\[1\]: rows of 288 elements; 64 are needed",
        ),
        (
            lambda: slice_merge_(torch.zeros(32), [WIDE.new_row(), SLIM.new_row()], MEMBERS),
            "out: rows of 32 elements; 288 are needed",
        ),
        (
            lambda: slice_merge_(torch.zeros(576)[::2], [WIDE.new_row(), SLIM.new_row()], MEMBERS),
            "out: elements of a row lie 2 apart; rows are contiguous",
        ),
        (
            lambda: slice_merge_(
                WIDE.new_row(), [WIDE.new_row()], Members.build(TABLE, [0, 1], local=[0])
            ),
            "members: 1 of 2 clients are local",
        ),
        (
            lambda: slice_finish_(
                WIDE.new_row(), torch.zeros(64, dtype=torch.float64), MEMBERS, 256
            ),
            r"partial: \[64\]; at most 32 in a contiguous vector",
        ),
        (
            lambda: slice_finish_(WIDE.new_row(), torch.zeros(32, dtype=torch.float64), MEMBERS, 8),
            "start: 32 columns from 8 on; both are multiples of 32",
        ),
        (
            lambda: slice_merge_(
                WIDE.new_row(device="meta"), [WIDE.new_row(), SLIM.new_row()], MEMBERS
            ),
            "rows: on cpu, but out is on meta",
        ),
        (
            lambda: slice_take_(WIDE.new_row(), [WIDE.new_row()], TABLE, [3]),
            "levels: 3 of client 0; the table has 0 .. 1",
        ),
        (
            lambda: slice_take_(WIDE.new_row(), [], TABLE, [0]),
            "outs: 0 rows; 1 clients are local",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: slice_sum([torch.zeros(288, dtype=torch.float16)], Members.build(TABLE, [0])),
            "float16 rows; float32, bfloat16, float64 are supported",
        ),
        (
            lambda: slice_merge_(
                WIDE.new_row(dtype=torch.float64), [WIDE.new_row()], Members.build(TABLE, [0])
            ),
            "float32 after float64; the rows of a call have one dtype",
        ),
        (
            lambda: slice_finish_(WIDE.new_row(), WIDE.new_row(), MEMBERS),
            "partial: torch.float32; sums are torch.float64",
        ),
    ],
)
def test_dtypes_that_do_not_fit_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        build()


def _operands() -> dict[str, tuple[object, ...]]:
    rows = [WIDE.new_row() + 1.0, SLIM.new_row() + 2.0]
    tiles = TABLE.tiles(torch.float32, 0)
    tables, first = _tables(MEMBERS), MEMBERS.first
    sums = torch.ones(WIDE.size, dtype=torch.float64)
    return {
        "merge": (WIDE.new_row(), rows, *tiles, tables, MEMBERS.weights),
        "sum": (sums.clone(), rows, *tiles, tables, MEMBERS.weights),
        "finish": (WIDE.new_row(), sums, 0, *tiles, tables),
        "take": (WIDE.new_row(), rows, *tiles, TABLE.tensors, TABLE.levels, first),
    }


@pytest.mark.parametrize("name", ["merge", "sum", "finish", "take"])
def test_the_operators_are_registered_as_torch_wants_them(name: str) -> None:
    operator = {"merge": _merge, "sum": _sum, "finish": _finish, "take": _take}[name]
    torch.library.opcheck(operator, _operands()[name])


def test_a_compiled_program_merges_and_takes() -> None:
    def program(out: Tensor, row: Tensor, slim: Tensor) -> Tensor:
        slice_merge_(out, [row, slim], MEMBERS)
        sums = slice_sum([row, slim], MEMBERS)
        other = slice_finish_(torch.zeros_like(out), sums, MEMBERS)
        slice_take_(out, [slim], TABLE, [1])
        return out + other + slim.sum()

    def operands() -> list[Tensor]:
        return [WIDE.new_row(), WIDE.new_row() + 1.0, SLIM.new_row() + 2.0]

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*operands()), program(*operands()))


def test_the_tables_of_a_merge_are_sent_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart they have five, each from memory that is pinned for it."""
    sent: list[np.ndarray] = []
    real = _rows.to_device

    def noted(table: np.ndarray, device: torch.device) -> Tensor:
        sent.append(table)
        return real(table, device)

    monkeypatch.setattr(_rows, "to_device", noted)
    members = Members.build(LABELS, [0, 0, 0], weights=[1.0, 0.0, 2.0], labels=[[0, 5], None, []])
    assert len(sent) == 1
    assert members.weights.tolist() == [1.0, 2.0]
    assert members.totals.sum() == 3.0
    assert members.label_words.tolist() == [[0b100001], [0]]
    assert members.label_totals.sum(0).tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    for table in (members.first, members.weights, members.totals, members.label_words):
        assert (table.data_ptr() - members.first.data_ptr()) % 64 == 0
