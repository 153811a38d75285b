"""Means over groups: every backend against the float64 reference, whole and split over ranks."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightfed_kernels.groups import Groups
from lightfed_kernels.means import grouped_mean_, grouped_spread_, grouped_sum
from lightfed_kernels.reference import rows as reference
from torch import Tensor

from tests.kernels.test_rows import (
    CANARY,
    DTYPES,
    NAN,
    assert_close,
    banded,
    bound,
    canaries_live,
    values,
)

# A job without weight: what is divided by 0 is not stored.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")

JOBS = [([0, 2], 0, 1056), ([1], 0, 64), ([0, 1, 2], 1056, 1120), ([2, 1], 1184, 1216)]
SIZES = [1120, 1216, 1216]


def ragged(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    return [values(size, dtype=dtype, seed=seed + k) for k, size in enumerate(SIZES)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 5.0], [0.0, 2.0, 0.3]])
def test_grouped_means_are_the_reference(
    device: torch.device, dtype: torch.dtype, weights: list[float] | None
) -> None:
    rows = ragged(dtype)
    # Of all columns that are in a job.
    covered = [torch.zeros(size, dtype=torch.bool) for size in SIZES]
    for members, start, stop in JOBS:
        for member in members:
            covered[member][start:stop] = True
    buffers, found = banded(rows, device)
    plan = Groups.build(JOBS, SIZES, device=device)
    grouped_mean_(found, plan, weights)
    expected = reference.grouped_mean(rows, JOBS, weights)
    for k, row in enumerate(found):
        assert_close(row, expected[k], bound(dtype))
        assert torch.equal(row.cpu()[~covered[k]], rows[k][~covered[k]])
    assert canaries_live(buffers)
    assert torch.equal(found[0][:1056], found[2][:1056])
    again = [row.clone().to(device) for row in rows]
    grouped_spread_(
        again,
        grouped_sum(again, plan, weights),
        plan,
        [sum(1.0 if weights is None else weights[k] for k in members) for members, *_ in JOBS],
    )
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one, other)


@st.composite
def plans(draw: st.DrawFn) -> list[tuple[list[int], int, int]]:
    """Disjoint ranges of columns, each cut into one or two disjoint groups of 4 clients."""
    cuts = sorted(draw(st.sets(st.integers(0, 34), min_size=2, max_size=4)))
    jobs = []
    for start, stop in pairwise(cuts):
        members = draw(st.permutations(range(4)))
        split = draw(st.integers(0, 4))
        jobs += [(members[:split], 32 * start, 32 * stop), (members[split:], 32 * start, 32 * stop)]
    return draw(st.permutations(jobs))


@settings(max_examples=6)
@given(jobs=plans(), seed=st.integers(0, 9))
def test_groups_however_they_are_cut_and_lie_on_ranks(
    device: torch.device, jobs: list[tuple[list[int], int, int]], seed: int
) -> None:
    rows = values(4, 1088, seed=seed)
    weights = [3.0, 0.0, 8.0, 1.0]
    buffer = torch.full((6, 1216), CANARY, device=device)
    whole = buffer[1:-1, 64:-64]
    whole.copy_(rows)
    grouped_mean_(whole, Groups.build(jobs, [1088] * 4, device=device), weights)
    expected = reference.grouped_mean(rows, jobs, weights)
    for found, row in zip(whole, expected, strict=True):
        assert_close(found, row, 1.2e-7)
    assert bool((buffer[:, :64] == CANARY).all() and (buffer[:, -64:] == CANARY).all())
    ranks = [[2, 0], [], [1, 3]]
    plans, held = [], []
    for local in ranks:
        mine = [([local.index(k) for k in m if k in local], a, b) for m, a, b in jobs]
        plans.append(Groups.build(mine, [1088] * len(local), device=device))
        held.append(rows[local].to(device))
    shares = [[weights[k] for k in local] for local in ranks]
    sums = sum(map(grouped_sum, held, plans, shares))
    assert isinstance(sums, Tensor)
    totals = [sum(weights[k] for k in members) for members, *_ in jobs]
    for local, mine, plan in zip(ranks, held, plans, strict=True):
        grouped_spread_(mine, sums, plan, totals)
        assert torch.equal(mine, whole[local])


def test_a_group_without_weight_keeps_its_rows(device: torch.device) -> None:
    rows = values(2, 64)
    rows[0, 3] = NAN
    plan = Groups.build([([0, 1], 0, 64)], [64, 64], device=device)
    found = rows.clone().to(device)
    grouped_mean_(found, plan, [0, 0])
    assert torch.equal(found.cpu().view(torch.int32), rows.view(torch.int32))
    grouped_spread_(found, torch.ones(64, device=device).double(), plan, [0])
    assert torch.equal(found.cpu().view(torch.int32), rows.view(torch.int32))


def test_a_member_of_weight_0_receives_and_its_nan_stays_its_own(device: torch.device) -> None:
    rows = values(3, 64)
    rows[1] = NAN
    rows[2, 9] = NAN
    plan = Groups.build([([0, 1, 2], 0, 32), ([0, 1], 32, 64)], [64] * 3, device=device)
    found = rows.clone().to(device)
    grouped_mean_(found, plan, [1, 0, 1])
    assert torch.nonzero(found.isnan()).tolist() == [[0, 9], [1, 9], [2, 9]]
    assert torch.equal(found[1, :32].nan_to_num(), found[0, :32].nan_to_num())
    assert torch.equal(found[1, 32:].cpu(), rows[0, 32:])


def test_no_jobs_and_no_members(device: torch.device) -> None:
    rows = values(2, 64)
    found = rows.clone().to(device)
    grouped_mean_(found, Groups.build([], [64, 64], device=device))
    plan = Groups.build([([], 0, 64)], [64, 64], device=device)
    grouped_mean_(found, plan)
    assert torch.equal(grouped_sum(found, plan).cpu(), torch.zeros(64).double())
    grouped_spread_(found, torch.ones(64, device=device).double(), plan, [2])
    assert torch.equal(found.cpu(), rows)
    empty = Groups.build([([], 32, 96)], [], device=device)
    assert torch.equal(grouped_sum([], empty).cpu(), torch.zeros(64).double())
    grouped_spread_([], torch.ones(64, device=device).double(), empty, [2])


def test_columns_beyond_2_to_the_31(device: torch.device) -> None:
    """4 GiB of address space, of which a few pages are touched."""
    size = 2**31 + 64
    rows = [torch.empty(size, dtype=torch.bfloat16, device=device) for _ in range(2)]
    rows[0][-64:], rows[1][-64:] = 1.0, 3.0
    grouped_mean_(rows, Groups.build([([0, 1], size - 64, size)], [size] * 2, device=device))
    assert bool((rows[0][-64:] == 2).all() and (rows[1][-64:] == 2).all())
