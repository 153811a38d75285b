"""Take and merge against a loop over elements; sums do not depend on how they are split."""

import random
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightfed_kernels import Layout
from torch import Tensor

from lightfed.aggregation import coverage as module
from lightfed.aggregation.coverage import Coverage
from lightfed.distributed.collectives import Ranks
from tests.core.aggregation.oracle import Case, cases, coverage_of, merge, merged
from tests.core.distributed import threads

EPSILON = 2.0**-24  # half a unit in the last place of float32, relative


@settings(max_examples=30)
@given(cases())
def test_take_copies_the_leading_slices_and_nothing_else(case: Case) -> None:
    coverage = coverage_of(case)
    server = case.target.views(case.old)

    for client, part in enumerate(case.parts):
        row = coverage.take(case.old, client, part.layout.new_row())

        for name, taken in part.layout.views(row).items():
            leading_slice = server[name][tuple(slice(size) for size in taken.shape)]
            assert torch.equal(taken, leading_slice)
        padding = row.masked_select(~part.layout.live())
        assert not padding.any()
        assert coverage.elements[client] == part.layout.numel


@settings(max_examples=30)
@given(cases())
def test_a_float64_merge_is_the_loop_over_elements(case: Case) -> None:
    expected, weights = merged(case)

    row = merge(case)

    assert row.dtype == torch.float32
    covered_by_nobody = weights == 0
    assert torch.equal(row[covered_by_nobody], case.old[covered_by_nobody])
    # Both add float64 products and round once to float32. torch may fuse a product and its
    # addition, which is the same where the product is exact: with whole weights.
    if all(part.weight.is_integer() for part in case.parts):
        assert torch.equal(row, expected.float())
    else:
        bound = EPSILON * expected.abs() + 1e-12 * 2.0**8
        assert ((row.double() - expected).abs() <= bound).all()


def on_ranks(case: Case, rank_of: list[int]) -> list[Tensor]:
    """Return the row that every rank ends up with, if client k is on rank `rank_of[k]`."""

    def merge_on(ranks: Ranks) -> Tensor:
        mine = [client for client, rank in enumerate(rank_of) if rank == ranks.rank]
        return merge(case, mine=mine, ranks=ranks)

    return threads.on_ranks(max(rank_of) + 1, merge_on)


@settings(max_examples=30)
@given(
    cases(whole_weights=True),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_the_bits_are_those_of_one_rank_on_any_number_of_ranks(
    case: Case, ranks: int, rng: random.Random
) -> None:
    alone = merge(case)

    rank_of = [rng.randrange(ranks) for _ in case.parts]
    for row in on_ranks(case, rank_of):
        assert torch.equal(row, alone)


def test_a_merge_of_ranks_is_one_all_reduce_of_float64() -> None:
    """Together they send 2 (W - 1) times 8 bytes an element; the rows of a rank are a matrix."""
    layout = Layout.build([("w", (17, 3)), ("b", (3,))])
    coverage = Coverage.build(layout, [layout])
    rows = torch.randn(4, layout.size, generator=torch.Generator().manual_seed(1)) * layout.live()
    sources = [0] * 4
    weights = [3.0, 1.0, 5.0, 2.0]
    alone = layout.new_row()
    coverage.merge_(alone, sources, range(4), list(rows), weights=weights)

    def merge_on(ranks: Ranks) -> tuple[Tensor, float]:
        mine = [client for client in range(4) if client % 2 == ranks.rank]  # none on the third rank
        block: Any = rows[mine] if mine else []
        row = layout.new_row()
        coverage.merge_(row, sources, mine, block, weights=weights, ranks=ranks)
        return row, ranks.take_wire_bytes()

    results = threads.on_ranks(3, merge_on)
    assert all(torch.equal(row, alone) for row, _ in results)
    assert sum(sent for _, sent in results) == 2 * (3 - 1) * 8 * layout.size


@pytest.mark.parametrize("as_block", [False, True])
def test_rows_that_lie_elsewhere_are_moved_a_few_at_a_time(
    as_block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout.build([("w", (3, 5)), ("b", (3,))])
    coverage = Coverage.build(layout, [layout])
    rows = torch.arange(5.0)[:, None] * layout.live()
    copies: list[weakref.ref[Tensor]] = []
    copies_alive: list[int] = []

    class Elsewhere(Tensor):
        """Seems to lie on another device."""

        device = torch.device("meta")

        def to(self, *_: object, **__: object) -> Tensor:
            copy = self.as_subclass(Tensor).clone()
            copies.append(weakref.ref(copy))
            copies_alive.append(sum(each() is not None for each in copies))
            return copy

    def merged(rows: Any) -> Tensor:
        row = layout.new_row()
        coverage.merge_(row, [0] * 5, range(5), rows, weights=[1.0] * 5)
        return row

    monkeypatch.setattr(module, "HOST_ROWS", 2)
    here = merged(list(rows))
    block = rows.as_subclass(Elsewhere)
    elsewhere = merged(block if as_block else list(block))
    assert torch.equal(here, 2.0 * layout.live())
    assert torch.equal(elsewhere, here)
    # Each row is copied once. A copy is gone before a third one is made.
    assert len(copies) == 5
    assert max(copies_alive) == 2


def test_only_the_leading_tensors_are_covered_where_so_many_are_given() -> None:
    layout = Layout.build([("w", (40,)), ("mean", (3,))])
    weights_only = Coverage.build(layout, [layout], tensors=["w"])
    assert weights_only.elements[0] == 40

    server = torch.full((layout.size,), 5.0)
    row = torch.full((layout.size,), 1.0)
    weights_only.merge_(server, [0], [0], [row], weights=[1.0])
    assert server.tolist() == [1.0] * 64 + [5.0] * 32  # w and its padding, then the mean

    taken = weights_only.take(row, 0, torch.zeros(layout.size))
    assert taken.tolist() == [1.0] * 64 + [0.0] * 32


@pytest.mark.parametrize("tensors", [["w"], ["w", "mean"]])
@pytest.mark.parametrize("weights", [[3.0, 1.0, 5.0, 2.0], [3.0, 0.0, 5.0, 2.0]])
def test_rows_in_one_matrix_have_the_same_mean(weights: list[float], tensors: list[str]) -> None:
    layout = Layout.build([("w", (40, 3)), ("mean", (3,))])
    coverage = Coverage.build(layout, [layout], tensors=tensors)
    matrix = torch.randn(4, layout.size, generator=torch.Generator().manual_seed(1))
    if 0.0 in weights:
        # A row of weight 0 is not read.
        matrix[weights.index(0.0)] = torch.nan

    def merged_row(rows: Any) -> Tensor:
        server = torch.full((layout.size,), 5.0)
        coverage.merge_(server, [0] * 4, range(4), rows, weights=weights)
        return server

    assert torch.equal(merged_row(matrix), merged_row(list(matrix)))


WIDE = Layout.build([("w", (2, 3))])


def test_tensors_in_another_order_are_unfit() -> None:
    shapes = [("w", (2,)), ("b", (2,))]
    with pytest.raises(ValueError, match="differ in order"):
        Coverage.build(Layout.build(shapes), [Layout.build(shapes[::-1])])


DEEP = Layout.build([("a", (4, 3)), ("a_head", (2, 4)), ("b", (4, 4)), ("b_head", (2, 4))])
SHALLOW = Layout.build([("a", (4, 3)), ("a_head", (2, 4))])
# Not a leading run of the row: a layer is missing, and another is narrow.
GAP = Layout.build([("b_head", (2, 2)), ("a", (4, 3))])


def test_layers_are_averaged_over_the_clients_that_have_them() -> None:
    sources = [DEEP, SHALLOW, GAP]
    coverage = Coverage.build(DEEP, sources, depths=True)
    assert dict(coverage.elements) == {0: 44, 1: 20, 2: 16}

    row = torch.arange(float(DEEP.size)) * DEEP.live()
    server = DEEP.views(row)
    for source, layout in enumerate(sources):
        taken = coverage.take(row, source, layout.new_row())
        for name, view in layout.views(taken).items():
            assert torch.equal(view, server[name][tuple(slice(n) for n in view.shape)])

    old_head = server["b_head"].clone()
    rows = [SHALLOW.live() * 1.0, GAP.live() * 4.0]
    coverage.merge_(row, [1, 2], [0, 1], rows, weights=[1.0, 2.0])
    assert (server["a"] == 3.0).all()  # (1 * 1 + 2 * 4) / 3
    assert (server["a_head"] == 1.0).all()  # of the shallow client alone
    assert torch.equal(server["b"], torch.arange(64.0, 80.0).view(4, 4))  # of nobody
    assert (server["b_head"][:, :2] == 4.0).all()  # of the other client, which is narrow
    assert torch.equal(server["b_head"][:, 2:], old_head[:, 2:])


@pytest.mark.parametrize(
    ("target", "shapes", "tensors", "reason"),
    [
        (WIDE, [("w", (2, 4))], None, "w is [2, 4], which is no slice of [2, 3]"),
        (WIDE, [("w", (2, 3, 1))], None, "w is [2, 3, 1], which is no slice of [2, 3]"),
        (WIDE, [("v", (2, 3))], None, "the models differ in v, w"),
        (WIDE, [("w", (2, 3)), ("b", (2,))], None, "the models differ in b"),
        (DEEP, [("a", (4, 3)), ("c", (2,)), ("d", (2,))], None, "the server model lacks c, d"),
        (DEEP, [("a", (4, 4))], None, "a is [4, 4], which is no slice of [4, 3]"),
        (DEEP, [("a", (4, 3))], ["b", "b_head"], "it lacks b, b_head"),
    ],
)
def test_models_that_do_not_fit_are_said_to_be_unfit(
    target: Layout, shapes: Any, tensors: list[str] | None, reason: str
) -> None:
    layouts = [target, Layout.build(shapes)]
    coverage = Coverage.build(target, layouts, tensors=tensors, depths=target is DEEP)
    assert coverage.unfit == {1: reason}
    assert list(coverage.levels) == [0]
