"""Sums over clients: every backend against the float64 reference, and the promise of equal bits."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightfed_kernels import groups, means
from lightfed_kernels._rows import Rows, as_list, each_row
from lightfed_kernels.groups import Groups
from lightfed_kernels.means import grouped_mean_, grouped_spread_, grouped_sum
from lightfed_kernels.reference import rows as reference
from torch import Tensor

from tests.kernels.backends import INTERPRETED, NOT_INTERPRETED

# A job without weight: what is divided by 0 is not stored.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")

CANARY = 7.0
NAN = float("nan")
INF = float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
BOUNDS = {torch.float32: 1.2e-7, torch.bfloat16: 4e-3, torch.float64: 1e-15}


def bound(dtype: torch.dtype) -> float:
    """Of an error relative to the largest value; the interpreter truncates bfloat16."""
    interpreted = os.environ["LIGHTFED_KERNELS"] == "triton"
    return 1e-2 if dtype == torch.bfloat16 and interpreted else BOUNDS[dtype]


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def banded(rows: Sequence[Tensor], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Buffers of canaries, and in their middles copies of the rows."""
    buffers = [
        torch.full((row.shape[0] + 128,), CANARY, dtype=row.dtype, device=device) for row in rows
    ]
    middles = [buffer[64:-64] for buffer in buffers]
    for middle, row in zip(middles, rows, strict=True):
        middle.copy_(row)
    return buffers, middles


def canaries_live(buffers: Sequence[Tensor]) -> bool:
    return all(
        bool((buffer[:64] == CANARY).all() and (buffer[-64:] == CANARY).all()) for buffer in buffers
    )


def assert_close(found: Tensor, expected: Tensor, limit: float) -> None:
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    assert float((found.cpu() - expected).abs().max()) <= limit * largest


def as_given(rows: Tensor, form: str) -> Tensor | list[Tensor]:
    if form == "matrix":
        return rows
    if form == "rows":
        return [row.clone() for row in rows]
    return [rows[0].clone(), rows[1:]]


def all_columns(rows: Rows) -> Groups:
    """One group of all rows, which share all columns."""
    each = each_row(as_list(rows))
    size = each[0].shape[-1]
    return Groups.build([(range(len(each)), 0, size)], [size] * len(each), device=each[0].device)


def weighted_sum(rows: Rows, weights: Sequence[float]) -> Tensor:
    return grouped_sum(rows, all_columns(rows), weights)


def weighted_mean(rows: Rows, weights: Sequence[float]) -> Tensor:
    """The rows' mean, which each of them gets."""
    copies = [row.clone() for row in as_list(rows)]
    grouped_mean_(copies, all_columns(rows), weights)
    every = each_row(copies)
    assert all(row.equal(every[0]) or row.isnan().any() for row in every)
    return every[0]


@settings(max_examples=6)
@given(
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(["matrix", "rows", "both"]),
    size=st.sampled_from([32, 64, 1024, 1056]),
    weights=st.lists(st.sampled_from([0.0, 1.0, 2.0, 0.3, 1e-3, 117.0]), min_size=1, max_size=5),
)
@example(torch.float32, "both", 1056, [1.0, 0.0, 3.0, 2.5])
@example(torch.bfloat16, "rows", 32, [1.0])
def test_a_weighted_mean_is_the_reference(
    device: torch.device, dtype: torch.dtype, form: str, size: int, weights: list[float]
) -> None:
    weights = [*weights[:-1], weights[-1] or 1.0]
    rows = values(len(weights), size, dtype=dtype, seed=size)
    found = weighted_mean(as_given(rows.to(device), form), weights)
    assert_close(found, reference.weighted_mean(rows, weights), bound(dtype))
    assert torch.equal(weighted_mean(rows.to(device), weights), found)
    total = weighted_sum(as_given(rows.to(device), form), weights)
    assert total.dtype == torch.float64
    assert_close(total, reference.weighted_sum(rows, weights), 1e-15)


def test_columns_and_clients_of_a_larger_matrix_are_rows(device: torch.device) -> None:
    whole = values(6, 256).to(device)
    part = whole[1::2, 64:160]
    expected = reference.weighted_mean(part.cpu(), [1, 2, 3])
    assert_close(weighted_mean(part, [1, 2, 3]), expected, 1.2e-7)


def test_a_client_of_weight_0_takes_no_part_and_other_nans_show(device: torch.device) -> None:
    rows = values(3, 64).to(device)
    rows[1] = NAN
    rows[2, 5], rows[2, 6] = NAN, INF
    out = weighted_mean(rows, [1.0, 0.0, 1.0])
    assert torch.nonzero(out.isnan()).flatten().tolist() == [5]
    assert torch.nonzero(out.isinf()).flatten().tolist() == [6]
    sums = weighted_sum(rows, [1.0, 0.0, 1.0])
    assert torch.nonzero(~sums.isfinite()).flatten().tolist() == [5, 6]


def test_the_order_of_clients_does_not_change_a_bit(device: torch.device) -> None:
    """In float32 sums it does; whole-number weights, magnitudes within 2^18."""
    rows = values(9, 1056).to(device) * torch.tensor([2.0**k for k in range(-4, 5)])[:, None].to(
        device
    )
    weights = [1, 500, 7, 33, 2, 90, 61, 5, 12]
    expected = weighted_mean(rows, weights)
    for seed in range(2):
        order = torch.randperm(9, generator=torch.Generator().manual_seed(seed)).tolist()
        mixed, shares = rows[order], [weights[k] for k in order]
        assert torch.equal(weighted_mean(mixed, shares), expected)
        parts = weighted_sum(mixed[:2], shares[:2]) + weighted_sum(mixed[2:], shares[2:])
        assert torch.equal((parts / sum(weights)).float(), expected)


def test_no_clients_sum_to_0(device: torch.device) -> None:
    plan = Groups.build([([], 0, 64)], [], device=device)
    assert torch.equal(grouped_sum([], plan).cpu(), torch.zeros(64).double())


def outcomes(device: torch.device) -> list[Tensor]:
    rows = values(3, 1120).to(device)
    plan = Groups.build([([0, 2], 0, 1056), ([2, 1], 1056, 1120)], [1120] * 3, device=device)
    weights = [3, 1, 8]
    out = [weighted_mean(rows, weights), weighted_sum(rows, weights), grouped_sum(rows, plan)]
    grouped_mean_(grouped := rows.clone(), plan)
    return [*out, grouped]


def test_a_tile_and_a_chunk_do_not_change_a_bit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = outcomes(device)
    for repeat in range(2):
        if repeat:
            monkeypatch.setattr(means, "CHUNK", 256)
            monkeypatch.setattr(groups, "TILE", 256)
        for one, other in zip(outcomes(device), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_both_backends_give_the_same_bits(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "torch")
    expected = outcomes(torch.device("cpu"))
    monkeypatch.setenv("LIGHTFED_KERNELS", "triton")
    for one, other in zip(outcomes(torch.device(kernel)), expected, strict=True):
        assert torch.equal(one.cpu(), other)


ROWS = torch.zeros(2, 64)
R = ROWS[0]
PLAN = Groups.build([([0, 1], 0, 64)], [64, 64])
SUMS = torch.zeros(64, dtype=torch.float64)
ERRORS: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (ValueError, "weights: 1 given; 2 numbers", lambda: weighted_mean(ROWS, [1])),
    (ValueError, "weights[1]: -1; a weight is", lambda: weighted_mean(ROWS, [1, -1])),
    (ValueError, "weights[0]: nan", lambda: weighted_sum(ROWS, [NAN, 1])),
    (ValueError, "weights[0]: inf", lambda: grouped_mean_(ROWS, PLAN, [INF, 1])),
    (ValueError, "weights[0]: inf", lambda: grouped_sum(ROWS, PLAN, [INF, 1])),
    (TypeError, "rows: float16", lambda: grouped_sum(ROWS.half(), PLAN)),
    (ValueError, "rows: rows of 33", lambda: grouped_sum(torch.zeros(2, 33), PLAN)),
    (ValueError, "rows: 0 dimensions", lambda: grouped_sum(torch.zeros(()), PLAN)),
    (
        ValueError,
        "rows: row 0 starts 4 bytes",
        lambda: grouped_mean_(ROWS.view(-1)[1:33], Groups.build([([0], 0, 32)], [32])),
    ),
    (ValueError, "rows: 3; groups is built for 2", lambda: grouped_mean_([*ROWS, ROWS[0]], PLAN)),
    (
        ValueError,
        "rows: row 1 has 32 elements; groups is built for 64",
        lambda: grouped_sum([ROWS[0], torch.zeros(32)], PLAN),
    ),
    (ValueError, "rows: rows 0 and 1 share memory", lambda: grouped_mean_([R, R], PLAN)),
    (
        ValueError,
        "sums: shares memory with rows",
        lambda: grouped_spread_([SUMS, SUMS.clone()], SUMS, PLAN, [1]),
    ),
    (TypeError, "sums: torch.float32", lambda: grouped_spread_(ROWS, R, PLAN, [1])),
    (ValueError, "sums: of shape [32]", lambda: grouped_spread_(ROWS, SUMS[:32], PLAN, [1])),
    (ValueError, "totals: 2 given; 1", lambda: grouped_spread_(ROWS, SUMS, PLAN, [1, 2])),
    (ValueError, "totals[0]: nan", lambda: grouped_spread_(ROWS, SUMS, PLAN, [NAN])),
    (ValueError, "job 0: columns 0 to 0; 0 <=", lambda: Groups.build([([0], 0, 0)], [64])),
    (ValueError, "job 0: columns -32 to 32; 0", lambda: Groups.build([([0], -32, 32)], [64])),
    (
        ValueError,
        "job 0: columns 8 to 64; jobs",
        lambda: Groups.build([([0], 8, 64)], [64]),
    ),
    (ValueError, "job 0: columns 0 to 40", lambda: Groups.build([([0], 0, 40)], [64])),
    (ValueError, "job 0: member 1 out of range 0 .. 0", lambda: Groups.build([([1], 0, 32)], [64])),
    (ValueError, "job 0: member -1 out of", lambda: Groups.build([([-1], 0, 32)], [64])),
    (ValueError, "job 0: member 0 occurs twice", lambda: Groups.build([([0, 0], 0, 32)], [64])),
    (
        ValueError,
        "job 1: columns 32 to 96; row 1 has 64 elements",
        lambda: Groups.build([([0], 0, 32), ([0, 1], 32, 96)], [96, 64]),
    ),
    (
        ValueError,
        "jobs 0 and 2: both have column 64 of row 1",
        lambda: Groups.build([([1, 0], 64, 96), ([0], 0, 32), ([1], 32, 96)], [96, 96]),
    ),
]


@pytest.mark.parametrize(("kind", "message", "call"), ERRORS, ids=[m for _, m, _ in ERRORS])
def test_what_does_not_fit_is_named(
    kind: type[Exception], message: str, call: Callable[[], Any]
) -> None:
    with pytest.raises(kind) as found:
        call()
    assert str(found.value).startswith(message)
    assert "\n" not in str(found.value)
