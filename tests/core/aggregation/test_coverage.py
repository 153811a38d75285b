"""Take and merge against a loop over elements; sums do not depend on how they are split."""

import random
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
from tests.core.aggregation.oracle import Case, Part, cases, coverage_of, merge, merged
from tests.core.distributed import threads

EPSILON = 2.0**-24  # half a unit in the last place of float32, relative


@settings(max_examples=30)
@given(cases())
def test_take_copies_the_leading_slices_and_nothing_else(case: Case) -> None:
    coverage = coverage_of(case)
    for k, part in enumerate(case.parts):
        out = coverage.take(case.old, k, part.layout.new_row())
        for entry in part.layout:
            wide = next(e for e in case.target if e.name == entry.name)
            corner = case.target.view(case.old, wide)[tuple(slice(n) for n in entry.shape)]
            assert torch.equal(part.layout.view(out, entry), corner)
        assert not out.masked_select(~part.layout.live()).any()
        assert coverage.elements[k] == part.layout.numel


@settings(max_examples=30)
@given(cases())
def test_a_float64_merge_is_the_loop_over_elements(case: Case) -> None:
    expected, weights = merged(case)
    found = merge(case)
    assert found.dtype == torch.float32
    assert torch.equal(found[weights == 0], case.old[weights == 0])  # that nobody covers
    # Both add float64 products and round once to float32; torch may fuse a product and its
    # addition: the same where the product is exact, with whole weights.
    if all(part.weight.is_integer() for part in case.parts):
        assert torch.equal(found, expected.float())
    else:
        bound = EPSILON * expected.abs() + 1e-12 * 2.0**8
        assert ((found.double() - expected).abs() <= bound).all()


def on_ranks(case: Case, owners: list[int]) -> list[Tensor]:
    """What every rank ends up with, if a client is on the rank of its owner."""
    mine = [[k for k, owner in enumerate(owners) if owner == rank] for rank in range(4)]
    return threads.on_ranks(
        max(owners) + 1,
        lambda ranks: merge(case, mine=mine[ranks.rank], ranks=ranks),
    )


@settings(max_examples=30)
@given(
    cases(whole_weights=True),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_the_bits_are_those_of_one_rank_on_any_number_of_ranks(
    case: Case, ranks: int, rng: random.Random
) -> None:
    owners = [rng.randrange(ranks) for _ in case.parts]
    expected = merge(case)
    for found in on_ranks(case, owners):
        assert torch.equal(found, expected)


def test_a_merge_of_ranks_is_one_all_reduce_of_float64() -> None:
    """Together they send 2 (W - 1) times 8 bytes an element; the rows of a rank are a matrix."""
    layout = Layout.build([("w", (17, 3)), ("b", (3,))])
    coverage = Coverage.build(layout, [layout])
    rows = torch.randn(4, layout.size, generator=torch.Generator().manual_seed(1)) * layout.live()
    expected = layout.new_row()
    coverage.merge_(expected, [0] * 4, range(4), list(rows), weights=[3.0, 1.0, 5.0, 2.0])

    def work(ranks: Ranks) -> tuple[Tensor, float]:
        mine = [k for k in range(4) if k % 2 == ranks.rank]  # the third rank has none
        out = layout.new_row()
        block: Any = rows[mine] if mine else []
        coverage.merge_(out, [0] * 4, mine, block, weights=[3.0, 1.0, 5.0, 2.0], ranks=ranks)
        return out, ranks.take_wire_bytes()

    parts = threads.on_ranks(3, work)
    assert all(torch.equal(found, expected) for found, _ in parts)
    assert sum(sent for _, sent in parts) == 2 * (3 - 1) * 8 * layout.size


def test_rows_that_lie_elsewhere_are_moved_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = Layout.build([("w", (3, 5)), ("b", (3,))])
    rows = [torch.full((layout.size,), float(k)) * layout.live() for k in range(5)]
    case = Case(layout, layout.new_row(), (), [Part(layout, r, 1.0, ()) for r in rows])
    expected = merge(case)
    assert torch.equal(expected, 2.0 * layout.live())

    class Elsewhere(Tensor):
        device = torch.device("meta")

        def to(self, *_: object, **__: object) -> Tensor:
            return self.as_subclass(Tensor)

    for k, part in enumerate(case.parts):
        case.parts[k] = Part(part.layout, part.row.as_subclass(Elsewhere), 1.0, ())
    monkeypatch.setattr(module, "HOST_ROWS", 2)
    assert torch.equal(merge(case), expected)


def test_only_the_leading_tensors_are_covered_where_so_many_are_given() -> None:
    layout = Layout.build([("w", (40,)), ("mean", (3,))])
    weights_only = Coverage.build(layout, [layout], tensors=["w"])
    assert weights_only.elements[0] == 40
    server, row = torch.full((layout.size,), 5.0), torch.full((layout.size,), 1.0)
    weights_only.merge_(server, [0], [0], [row], weights=[1.0])
    assert server.tolist() == [1.0] * 64 + [5.0] * 32
    out = weights_only.take(row, 0, torch.zeros(layout.size))
    assert out.tolist() == [1.0] * 64 + [0.0] * 32


@pytest.mark.parametrize("part", [["w"], ["w", "mean"]])
@pytest.mark.parametrize("weights", [[3.0, 1.0, 5.0, 2.0], [3.0, 0.0, 5.0, 2.0]])
def test_rows_in_one_matrix_have_the_same_mean(weights: list[float], part: list[str]) -> None:
    layout = Layout.build([("w", (40, 3)), ("mean", (3,))])
    coverage = Coverage.build(layout, [layout], tensors=part)
    block = torch.randn(4, layout.size, generator=torch.Generator().manual_seed(1))
    if 0.0 in weights:
        block[weights.index(0.0)] = torch.nan
    rows, local = list(block), range(4)
    old, one = (torch.full((layout.size,), 5.0) for _ in range(2))
    coverage.merge_(old, [0] * 4, local, rows, weights=weights)
    coverage.merge_(one, [0] * 4, local, block, weights=weights)
    assert torch.equal(one, old)


WIDE = Layout.build([("w", (2, 3))])


def test_tensors_in_another_order_are_unfit() -> None:
    shapes = [("w", (2,)), ("b", (2,))]
    with pytest.raises(ValueError, match="differ in order"):
        Coverage.build(Layout.build(shapes), [Layout.build(shapes[::-1])])


DEEP = Layout.build([("a", (4, 3)), ("a_head", (2, 4)), ("b", (4, 4)), ("b_head", (2, 4))])
SHALLOW = Layout.build([("a", (4, 3)), ("a_head", (2, 4))])
# Not a leading run of the row: a layer is left out, and another is narrow.
GAP = Layout.build([("b_head", (2, 2)), ("a", (4, 3))])


def test_layers_are_averaged_over_the_clients_that_have_them() -> None:
    sources = [DEEP, SHALLOW, GAP]
    coverage = Coverage.build(DEEP, sources, depths=True)
    assert dict(coverage.elements) == {0: 44, 1: 20, 2: 16}
    server = torch.arange(float(DEEP.size)) * DEEP.live()
    wide = DEEP.views(server)
    for k, layout in enumerate(sources):
        for name, view in layout.views(coverage.take(server, k, layout.new_row())).items():
            assert torch.equal(view, wide[name][tuple(slice(n) for n in view.shape)])
    old = wide["b_head"].clone()
    rows = [SHALLOW.live() * 1.0, GAP.live() * 4.0]
    coverage.merge_(server, [1, 2], [0, 1], rows, weights=[1.0, 2.0])
    assert (wide["a"] == 3.0).all()
    assert (wide["a_head"] == 1.0).all()
    assert torch.equal(wide["b"], torch.arange(64.0, 80.0).view(4, 4))
    assert (wide["b_head"][:, :2] == 4.0).all()
    assert torch.equal(wide["b_head"][:, 2:], old[:, 2:])


@pytest.mark.parametrize(
    ("target", "own", "tensors", "found"),
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
    target: Layout, own: Any, tensors: list[str] | None, found: str
) -> None:
    layouts = [target, Layout.build(own)]
    coverage = Coverage.build(target, layouts, tensors=tensors, depths=target is DEEP)
    assert coverage.unfit == {1: found}
    assert list(coverage.levels) == [0]
