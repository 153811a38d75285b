"""What selection refuses, and its operators under torch.compile."""

import math

import pytest
import torch
from lightfed_kernels import Layout
from lightfed_kernels.masks import pack_mask
from lightfed_kernels.segments import Segments
from lightfed_kernels.select import (
    prune_counts,
    prune_regrow,
    select_by_magnitude,
    select_random,
)
from torch import Tensor

from tests.kernels.backends import INTERPRETED, NOT_INTERPRETED


def layout_of(*sizes: int) -> Layout:
    return Layout.build((f"t{i}", (size,)) for i, size in enumerate(sizes))


def test_the_number_to_drop_is_rounded_up() -> None:
    assert prune_counts([0, 1, 10, 11, 3], 0.5) == [0, 1, 5, 6, 2]
    assert prune_counts([100, 7], 0.0) == [0, 0]
    assert prune_counts([100, 7], 1.0) == [100, 7]
    # As the product comes out in float64: 3 * 0.1 is above 0.3.
    assert prune_counts([30], 0.1) == [math.ceil(0.1 * 30)]
    for rate in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"rate: .* lies in \[0, 1\]"):
            prune_counts([3], rate)


def test_wrong_arguments_are_named() -> None:
    layout = layout_of(40, 7)
    segments = Segments.build(layout)
    row, words = torch.zeros(layout.size), segments.live
    with pytest.raises(ValueError, match=r"scores: of shape \[1, 96\]; one row at a time"):
        select_by_magnitude(row[None], words, [1, 1], segments, largest=True)
    with pytest.raises(ValueError, match="scores: rows of 64 elements; 96 are needed"):
        select_by_magnitude(row[:64], words, [1, 1], segments, largest=True)
    with pytest.raises(TypeError, match="weights: float16 rows"):
        prune_regrow(row.half(), words, [1, 1], segments, regrow=row)
    with pytest.raises(TypeError, match="regrow: int64 rows"):
        prune_regrow(row, words, [1, 1], segments, regrow=row.long())
    with pytest.raises(ValueError, match="candidates: 2 words; 3 are needed"):
        select_random(words[:2], [1, 1], segments, seed=0)
    with pytest.raises(ValueError, match=r"words: of shape \[1, 3\]"):
        prune_regrow(row, words[None], [1, 1], segments, regrow=row)
    with pytest.raises(ValueError, match="candidates: on meta, but scores is on cpu"):
        select_by_magnitude(row, words.to("meta"), [1, 1], segments, largest=True)
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match=rf"seed: {seed}; a seed lies in \[0, 2\^63\)"):
            select_random(words, [1, 1], segments, seed=seed)
        with pytest.raises(ValueError, match=rf"regrow: {seed}; a seed lies in \[0, 2\^63\)"):
            prune_regrow(row, words, [1, 1], segments, regrow=seed)


def test_wrong_counts_are_named() -> None:
    segments = Segments.build(layout_of(40, 7))
    live = segments.live
    with pytest.raises(ValueError, match="counts: 3 numbers for 2 tensors"):
        select_random(live, [1, 2, 3], segments, seed=0)
    with pytest.raises(ValueError, match=r"counts: of shape \[1\]; one of each of 2 tensors"):
        select_random(live, torch.tensor([1]), segments, seed=0)
    with pytest.raises(ValueError, match=r"counts: of shape \[2, 1\]"):
        select_random(live, torch.tensor([[1], [2]]), segments, seed=0)
    with pytest.raises(TypeError, match=r"counts: torch.int32; numbers of elements are int64"):
        select_random(live, torch.tensor([1, 2], dtype=torch.int32), segments, seed=0)
    with pytest.raises(ValueError, match="counts: on meta, but the rows are on cpu"):
        select_random(live, torch.tensor([1, 2], device="meta"), segments, seed=0)
    for counts in ([1, -2], torch.tensor([1, -2])):
        with pytest.raises(ValueError, match="counts: -2 of tensor 1; at least 0 is chosen"):
            select_random(live, counts, segments, seed=0)


def test_bits_in_padding_are_refused() -> None:
    layout = layout_of(40, 7)
    segments = Segments.build(layout)
    row, words = torch.zeros(layout.size), torch.full((3,), -1, dtype=torch.int32)
    for name, call in [
        ("candidates", lambda: select_random(words, [1, 1], segments, seed=0)),
        (
            "candidates",
            lambda: select_by_magnitude(row, words, [1, 1], segments, largest=True),
        ),
        ("words", lambda: prune_regrow(row, words, [1, 1], segments, regrow=row)),
    ]:
        message = f"{name}: 49 bits are set in padding, the first at element 40"
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.gpu
def test_a_gpu_is_asked_for_wrong_values_only_if_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = Segments.build(layout_of(40), device="cuda")
    live = segments.live.cuda()
    counts = torch.tensor([-3], device="cuda")
    assert not select_random(live, counts, segments, seed=0).any()
    monkeypatch.setenv("LIGHTFED_KERNELS_CHECK", "1")
    with pytest.raises(ValueError, match="counts: -3 of tensor 0"):
        select_random(live, counts, segments, seed=0)
    with pytest.raises(ValueError, match="candidates: 24 bits are set in padding"):
        select_random(live | -1, [1], segments, seed=0)


@pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
def test_a_kernel_refuses_a_row_that_does_not_start_at_16_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "triton")
    segments = Segments.build(layout_of(40))
    row = torch.zeros(65)[1:]
    with pytest.raises(ValueError, match="row 0 starts 4 bytes past a multiple of 16"):
        select_by_magnitude(row, segments.live, [1], segments, largest=True)


def test_the_operators_are_sound_and_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "torch")
    layout = layout_of(40, 7)
    segments = Segments.build(layout)
    row = torch.randn(layout.size, generator=torch.Generator().manual_seed(9))
    words = pack_mask((torch.arange(layout.size) % 3 == 0) & layout.live())
    counts = torch.tensor([5, 3])
    tables = (segments.bounds, segments.tiles)
    operators = torch.ops.lightfed
    for operator, args in [
        (operators.select, (row, words, counts, *tables, 0, True)),
        (operators.select, (None, words, counts, *tables, 3, False)),
        (operators.prune_regrow, (row, row, words, counts, *tables, 0)),
        (operators.prune_regrow, (row, None, words, counts, *tables, 3)),
    ]:
        torch.library.opcheck(operator.default, (torch.empty_like(words), *args))

    def all_three(row: Tensor, words: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        return (
            select_by_magnitude(row, words, counts, segments, largest=False),
            select_random(words, [5, 3], segments, seed=3),
            prune_regrow(row, words, counts, segments, regrow=row),
            prune_regrow(row, words, counts, segments, regrow=3),
        )

    compiled = torch.compile(all_three, fullgraph=True, backend="aot_eager")
    for got, expected in zip(
        compiled(row, words, counts), all_three(row, words, counts), strict=True
    ):
        assert torch.equal(got, expected)


def test_other_seeds_and_counts_do_not_break_a_compiled_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "torch")
    segments = Segments.build(layout_of(40, 7))
    live = segments.live
    compiled = torch.compile(select_random, fullgraph=True, backend="aot_eager")
    for counts, seed in [([5, 3], 3), ([9, 2], 4), ([1, 1], 2**62)]:
        expected = select_random(live, counts, segments, seed=seed)
        assert torch.equal(compiled(live, counts, segments, seed=seed), expected)
