"""Take and merge against a loop over elements; sums do not depend on how they are split."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightfed_kernels import Layout
from torch import Tensor

from lightfed.core.coverage import (
    FIXED_SCALE,
    Accumulate,
    Merge,
    leading_slices,
    take,
)
from tests.core.oracle import Case, cases, finish, merged
from tests.small import CPU

EPSILON = 2.0**-24  # half a unit in the last place of float32, relative


def merge_of(case: Case, accumulate: Accumulate, *, counted: int | None = None) -> Merge:
    merge = Merge(case.target.size, total=case.total, accumulate=accumulate, device=CPU)
    for part in case.parts[:counted]:
        merge.count(part.coverage, weight=part.weight, labels=part.labels)
    return merge


def add(merge: Merge, case: Case, order: list[int]) -> Merge:
    for k in order:
        part = case.parts[k]
        merge.add(part.row, part.coverage, weight=part.weight, labels=part.labels)
    return merge


def in_order(case: Case) -> list[int]:
    return list(range(len(case.parts)))


@settings(max_examples=200)
@given(cases())
def test_take_copies_the_leading_slices_and_nothing_else(case: Case) -> None:
    for part in case.parts:
        out = take(case.old, part.coverage, part.layout.new_row())
        for entry in part.layout:
            wide = next(e for e in case.target if e.name == entry.name)
            corner = case.target.view(case.old, wide)[tuple(slice(n) for n in entry.shape)]
            assert torch.equal(part.layout.view(out, entry), corner)
        assert not out.masked_select(~part.layout.live()).any()


@settings(max_examples=200)
@given(cases())
def test_a_float64_merge_is_the_loop_over_elements(case: Case) -> None:
    expected, _ = merged(case)
    found = finish(add(merge_of(case, "float64"), case, in_order(case)), case.old)
    assert found.dtype == torch.float32
    # Both add float64 products in the order of the clients and round once to float32; torch may
    # fuse a product and its addition: the same where the product is exact, with whole weights.
    if all(part.weight.is_integer() for part in case.parts):
        assert torch.equal(found, expected.float())
    else:
        bound = EPSILON * expected.abs() + 1e-12 * 2.0**8
        assert ((found.double() - expected).abs() <= bound).all()


@settings(max_examples=200)
@given(cases())
def test_a_fixed_merge_is_within_its_resolution_of_the_loop_over_elements(case: Case) -> None:
    expected, weights = merged(case)
    found = finish(add(merge_of(case, "fixed"), case, in_order(case)), case.old)
    # Every addend is rounded to 2^-40 of the total weight; then one rounding to float32. The mean
    # of an element is over the weight that covers it, which may be a small part of the total.
    units = len(case.parts) / 2 * case.total / FIXED_SCALE / weights.clamp(min=1e-9)
    bound = torch.where(weights > 0, units + 2 * EPSILON * expected.abs() + 1e-10, 0.0)
    assert ((found.double() - expected).abs() <= bound).all()


@settings(max_examples=200)
@given(cases(), st.sampled_from(["float64", "fixed"]))
def test_elements_that_nobody_covers_keep_their_bits(case: Case, accumulate: Accumulate) -> None:
    found = finish(add(merge_of(case, accumulate), case, in_order(case)), case.old)
    _, weights = merged(case)
    assert torch.equal(found[weights == 0], case.old[weights == 0])


@settings(max_examples=200)
@given(
    cases(whole_weights=True),
    st.sampled_from(["float64", "fixed"]),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_sums_have_the_same_bits_in_any_order_on_any_number_of_ranks(
    case: Case, accumulate: Accumulate, ranks: int, rng: random.Random
) -> None:
    whole = add(merge_of(case, accumulate), case, in_order(case))
    owner = [rng.randrange(ranks) for _ in case.parts]
    partial = []
    for rank in range(ranks):
        mine = [k for k in in_order(case) if owner[k] == rank]
        rng.shuffle(mine)
        partial.append(add(merge_of(case, accumulate), case, mine))
    rng.shuffle(partial)
    # An all-reduce adds in whatever order the backend likes.
    partial[0].partial = torch.stack([m.partial for m in partial]).sum(0)
    assert torch.equal(partial[0].partial, whole.partial)
    assert torch.equal(finish(partial[0], case.old), finish(whole, case.old))


@settings(max_examples=100)
@given(cases(), st.randoms(use_true_random=False))
def test_fixed_sums_are_exact_for_any_weights_and_values(case: Case, rng: random.Random) -> None:
    # Magnitudes 2^-100 to 2^21 beside each other, which no float64 sum survives in every order.
    for part in case.parts:
        part.row.mul_(torch.tensor(rng.choice([2.0**-92, 1.0, 2.0**13])))
    whole = add(merge_of(case, "fixed"), case, in_order(case)).partial
    shuffled = in_order(case)
    rng.shuffle(shuffled)
    assert torch.equal(add(merge_of(case, "fixed"), case, shuffled).partial, whole)


def test_an_order_that_float64_does_not_survive_does_not_matter_in_fixed_point() -> None:
    layout = Layout.build([("w", (1,))])
    same = leading_slices(layout, layout)
    values = [2.0**20, 2.0**-36, -(2.0**20), 2.0**-36]

    def sum_of(accumulate: Accumulate, order: list[int]) -> float:
        merge = Merge(layout.size, total=4.0, accumulate=accumulate, device=CPU)
        for k in order:
            row = layout.new_row()
            row[0] = values[k]
            merge.add(row, same, weight=1.0)
        return float(merge.partial[0])

    assert sum_of("float64", [0, 1, 2, 3]) != sum_of("float64", [0, 2, 1, 3])
    assert sum_of("fixed", [0, 1, 2, 3]) == sum_of("fixed", [0, 2, 1, 3])


@pytest.mark.parametrize("accumulate", ["float64", "fixed"])
def test_equal_rows_of_equal_layouts_merge_to_themselves(accumulate: Accumulate) -> None:
    layout = Layout.build([("w", (3, 5)), ("b", (3,))])
    same = leading_slices(layout, layout)
    assert same.identity
    row = torch.arange(layout.size, dtype=torch.float32) * layout.live() / 8
    merge = Merge(layout.size, total=10.0, accumulate=accumulate, device=CPU)
    for weight in (3.0, 7.0):
        merge.count(same, weight=weight)
        merge.add(row, same, weight=weight)
    # Eighths are far coarser than 2^-40: what .3 and .7 of them lose there is gone in float32.
    assert torch.equal(finish(merge, torch.full_like(row, 9.0)), row)


def test_only_the_leading_tensors_are_covered_where_so_many_are_given() -> None:
    layout = Layout.build([("w", (40,)), ("mean", (3,))])
    weights_only = leading_slices(layout, layout, tensors=1)
    assert weights_only.elements == 40
    old, row = torch.full((layout.size,), 5.0), torch.full((layout.size,), 1.0)
    merge = Merge(layout.size, total=1.0, accumulate="float64", device=CPU)
    merge.count(weights_only, weight=1.0)
    merge.add(row, weights_only, weight=1.0)
    assert finish(merge, old).tolist() == [1.0] * 64 + [5.0] * 32
    out = take(row, weights_only, torch.zeros(layout.size))
    assert out.tolist() == [1.0] * 64 + [0.0] * 32


def test_a_merge_of_identities_and_slices_counts_both() -> None:
    wide, narrow = Layout.build([("w", (2, 2))]), Layout.build([("w", (1, 2))])
    merge = Merge(wide.size, total=3.0, accumulate="float64", device=CPU)
    full, slim = leading_slices(wide, wide), leading_slices(wide, narrow)
    for coverage, layout, weight, value in ((full, wide, 1.0, 4.0), (slim, narrow, 2.0, 1.0)):
        merge.count(coverage, weight=weight)
        merge.add(_filled(layout, value), coverage, weight=weight)
    new = finish(merge, wide.new_row())
    # (1 x 4 + 2 x 1) / 3 in the common row, 4 where only the wide client is.
    assert wide.views(new)["w"].tolist() == [[2.0, 2.0], [4.0, 4.0]]


def _filled(layout: Layout, value: float) -> Tensor:
    return layout.new_row() + value * layout.live()


@pytest.mark.parametrize(
    ("narrow", "found"),
    [
        ([("w", (2, 4))], r"w is \[2, 4\], which is no slice of \[2, 3\]"),
        ([("w", (2, 3, 1))], r"w is \[2, 3, 1\], which is no slice"),
        ([("v", (2, 3))], "differ in v, w"),
        ([("w", (2, 3)), ("b", (2,))], "differ in b"),
    ],
)
def test_layouts_that_do_not_nest_are_refused(
    narrow: list[tuple[str, tuple[int, ...]]], found: str
) -> None:
    with pytest.raises(ValueError, match=found):
        leading_slices(Layout.build([("w", (2, 3))]), Layout.build(narrow))


def test_tensors_in_another_order_are_refused() -> None:
    shapes = [("w", (2,)), ("b", (2,))]
    with pytest.raises(ValueError, match="differ in order"):
        leading_slices(Layout.build(shapes), Layout.build(shapes[::-1]))
