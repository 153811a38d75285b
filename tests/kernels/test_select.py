"""Selection: exactly so many of every tensor, by magnitude or at random, ties by position."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightfed_kernels import Layout
from lightfed_kernels import select as subject
from lightfed_kernels.masks import pack_mask, unpack_mask
from lightfed_kernels.reference import select as reference
from lightfed_kernels.segments import TILE, Segments, _tiles, count_per_tensor
from lightfed_kernels.select import (
    prune_regrow,
    select_by_magnitude,
    select_random,
)
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
INF, NAN = math.inf, math.nan

# Values with many ties, and with the ends of every range; all exist in bfloat16.
VALUES = [0.0, -0.0, 1.0, -1.0, 1.0078125, 2.0**-130, -(2.0**-130), 3e38, -INF, INF, NAN, -NAN]


def layout_of(*sizes: int) -> Layout:
    return Layout.build((f"t{i}", (size,)) for i, size in enumerate(sizes))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_mask(layout: Layout, density: float, seed: int = 0) -> Tensor:
    return (torch.rand(layout.size, generator=generator(seed)) < density) & layout.live()


def random_row(layout: Layout, dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.randn(layout.size, generator=generator(seed)) * layout.live()).to(dtype)


def words_of(mask: Tensor, device: torch.device) -> Tensor:
    return pack_mask(mask).to(device)


def mask_of(words: Tensor) -> Tensor:
    return unpack_mask(words.cpu())


def test_results_are_written_where_they_belong(device: torch.device) -> None:
    """Where a kernel writes elsewhere, this is the test that says so, so it comes first."""
    layout = layout_of(40, 33, 64)
    segments = Segments.build(layout)
    cpu_row, mask = random_row(layout, torch.float32, 7), random_mask(layout, 0.5)
    row, words = cpu_row.to(device), words_of(mask, device)
    wanted = [5, 6, 7]
    counts = torch.tensor(wanted, device=device)
    tables = (segments.bounds, segments.tiles_on(words.device))
    count = words.shape[0]
    poison = 0x5A5A5A5A
    for operator, args, expected in [
        (
            subject._select,
            (row, words, counts, *tables, 0, True),
            reference.select_by_magnitude(cpu_row, mask, wanted, layout, largest=True),
        ),
        (
            subject._select,
            (None, words, counts, *tables, 8, False),
            reference.select_random(mask, wanted, layout, seed=8),
        ),
        (
            subject._prune_regrow,
            (row, row, words, counts, *tables, 0),
            reference.prune_regrow(cpu_row, mask, wanted, layout, regrow=cpu_row),
        ),
    ]:
        # The words start at a multiple of 4 bytes only.
        buffer = torch.full((count + 300,), poison, dtype=torch.int32, device=device)
        out = buffer[129 : 129 + count]
        operator(out, *args)
        assert torch.equal(mask_of(out), expected)
        assert (buffer[:129] == poison).all()
        assert (buffer[129 + count :] == poison).all()


@settings(max_examples=6)
@given(st.data(), st.sampled_from(DTYPES), st.booleans())
def test_chooses_by_magnitude_and_then_by_position(
    device: torch.device, data: st.DataObject, dtype: torch.dtype, largest: bool
) -> None:
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 31, 32, 33, 70]), max_size=3))
    layout = layout_of(*sizes)
    values = st.lists(st.sampled_from(VALUES), min_size=layout.size, max_size=layout.size)
    scores = torch.tensor(data.draw(values)).to(dtype)
    density = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    mask = random_mask(layout, density, data.draw(st.integers(0, 9)))
    counts = [data.draw(st.integers(0, size + 2)) for size in sizes]
    chosen = select_by_magnitude(
        scores.to(device), words_of(mask, device), counts, Segments.build(layout), largest=largest
    )
    expected = reference.select_by_magnitude(scores, mask, counts, layout, largest=largest)
    assert torch.equal(mask_of(chosen), expected)


@settings(max_examples=6)
@given(st.data(), st.integers(0, 2**63 - 1))
def test_chooses_at_random_by_the_hash_of_seed_and_position(
    device: torch.device, data: st.DataObject, seed: int
) -> None:
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 31, 32, 33, 70]), max_size=3))
    layout = layout_of(*sizes)
    mask = random_mask(layout, data.draw(st.sampled_from([0.0, 0.5, 1.0])))
    counts = [data.draw(st.integers(0, size + 2)) for size in sizes]
    chosen = select_random(words_of(mask, device), counts, Segments.build(layout), seed=seed)
    expected = reference.select_random(mask, counts, layout, seed=seed)
    assert torch.equal(mask_of(chosen), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("random", [False, True])
def test_drops_the_smallest_and_grows_as_many(
    device: torch.device, dtype: torch.dtype, random: bool
) -> None:
    layout = layout_of(300, 0, 1, 33, 40, 64)
    segments = Segments.build(layout, device=device)
    mask = random_mask(layout, 0.5)
    views = layout.views(mask)
    views["t3"].fill_(False)
    views["t5"].fill_(True)
    active = reference.count_per_tensor(mask, layout)
    # Some, none of none, more than there are, all.
    counts = [active[0] // 2, 0, 1, 5, active[4] + 3, 64]
    weights, scores = random_row(layout, dtype, 1), random_row(layout, dtype, 2)
    regrow = 77 if random else scores.to(device)
    words = words_of(mask, device)
    result = prune_regrow(weights.to(device), words, counts, segments, regrow=regrow)
    expected = reference.prune_regrow(
        weights, mask, counts, layout, regrow=77 if random else scores
    )
    assert torch.equal(mask_of(result), expected)
    assert torch.equal(mask_of(words), mask)
    assert count_per_tensor(result, segments).tolist() == active


@pytest.mark.parametrize("largest", [False, True])
def test_ties_cross_tiles_in_the_order_of_the_elements(device: torch.device, largest: bool) -> None:
    layout = layout_of(40, 2 * TILE + 100, 33)
    mask = random_mask(layout, 0.9)
    # Every third element decides before the others; of those, only some can be taken.
    scores = torch.where(torch.arange(layout.size) % 3 == 0, 2.0 if largest else -0.5, -1.0)
    first = int((mask & (torch.arange(layout.size) % 3 == 0))[64 : 64 + 2 * TILE + 100].sum())
    counts = [3, first + TILE, 33]
    chosen = select_by_magnitude(
        scores.to(device), words_of(mask, device), counts, Segments.build(layout), largest=largest
    )
    expected = reference.select_by_magnitude(scores, mask, counts, layout, largest=largest)
    assert torch.equal(mask_of(chosen), expected)
    assert int(mask_of(chosen)[64:-64].sum()) == first + TILE


@pytest.mark.parametrize("largest", [False, True])
def test_every_digit_of_a_key_decides(device: torch.device, largest: bool) -> None:
    layout = layout_of(130)
    segments = Segments.build(layout)
    for dtype, bits in [(torch.int32, 31), (torch.int64, 63), (torch.int16, 15)]:
        real = {31: torch.float32, 63: torch.float64, 15: torch.bfloat16}[bits]
        scores = torch.zeros(layout.size, dtype=dtype)
        # One bit in every position, with either sign: subnormal numbers to start with.
        sign = torch.iinfo(dtype).min
        for bit in range(bits):
            scores[2 * bit] = 1 << bit
            scores[2 * bit + 1] = sign | 1 << bit
        row = scores.view(real)
        for count in (1, 30, 113):
            chosen = select_by_magnitude(
                row.to(device), segments.live.to(device), [count], segments, largest=largest
            )
            expected = reference.select_by_magnitude(
                row, layout.live(), [count], layout, largest=largest
            )
            assert torch.equal(mask_of(chosen), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [False, True])
def test_large_tensors_on_the_cpu(
    dtype: torch.dtype, largest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "torch")
    layout = layout_of(7, 3 * 65536 + 11)
    segments = Segments.build(layout)
    mask = random_mask(layout, 0.4)
    scores = random_row(layout, dtype, 3)
    constant = torch.ones_like(scores)
    words, live = pack_mask(mask), segments.live
    for count in (1, 20_000, 77_777, 200_000):
        counts = [2, count]
        for row in (scores, constant):
            chosen = select_by_magnitude(row, words, counts, segments, largest=largest)
            expected = reference.select_by_magnitude(row, mask, counts, layout, largest=largest)
            assert torch.equal(unpack_mask(chosen), expected)
        drawn = select_random(live, counts, segments, seed=count)
        expected = reference.select_random(layout.live(), counts, layout, seed=count)
        assert torch.equal(unpack_mask(drawn), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_above_inf_and_both_zeros_are_one(device: torch.device, dtype: torch.dtype) -> None:
    layout = layout_of(8)
    segments = Segments.build(layout)
    scores = torch.zeros(layout.size, dtype=dtype)
    scores[:8] = torch.tensor([-NAN, INF, -0.0, 0.0, -INF, NAN, 3e38, -1.0])
    live = segments.live.to(device)

    def chosen(count: int, largest: bool) -> list[int]:
        words = select_by_magnitude(scores.to(device), live, [count], segments, largest=largest)
        return mask_of(words).nonzero().flatten().tolist()

    assert chosen(1, True) == [0]
    assert chosen(2, True) == [0, 5]
    assert chosen(3, True) == [0, 1, 5]
    assert chosen(5, True) == [0, 1, 4, 5, 6]
    assert chosen(7, True) == [0, 1, 2, 4, 5, 6, 7]
    assert chosen(1, False) == [2]
    assert chosen(3, False) == [2, 3, 7]
    assert chosen(6, False) == [1, 2, 3, 4, 6, 7]
    assert chosen(7, False) == [0, 1, 2, 3, 4, 6, 7]
    assert chosen(9, False) == list(range(8))


def test_the_payload_of_a_nan_does_not_matter(device: torch.device) -> None:
    layout = layout_of(8)
    segments = Segments.build(layout)
    for real, bits in [
        (torch.float32, [0x7F800001, -1, 0x7FC00000, 0x7F800000]),
        (torch.bfloat16, [0x7F81, -1, 0x7FC0, 0x7F80]),
        (torch.float64, [0x7FF0000000000001, -1, 0x7FF8000000000000, 0x7FF0000000000000]),
    ]:
        width = {4: torch.int32, 2: torch.int16, 8: torch.int64}[real.itemsize]
        scores = torch.zeros(layout.size, dtype=width)
        scores[:4] = torch.tensor(bits, dtype=width)
        live = segments.live.to(device)
        row = scores.view(real).to(device)
        for count, expected in [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 3])]:
            words = select_by_magnitude(row, live, [count], segments, largest=True)
            assert mask_of(words).nonzero().flatten().tolist() == expected


def test_scores_of_padding_and_of_no_candidates_do_not_matter(device: torch.device) -> None:
    layout = layout_of(33, 7)
    segments = Segments.build(layout)
    mask = random_mask(layout, 0.5)
    scores = random_row(layout, torch.float32, 4)
    for largest in (False, True):
        expected = reference.select_by_magnitude(scores, mask, [9, 2], layout, largest=largest)
        for value in (NAN, INF, 0.0):
            row = torch.where(mask, scores, value).to(device)
            words = words_of(mask, device)
            chosen = select_by_magnitude(row, words, [9, 2], segments, largest=largest)
            assert torch.equal(mask_of(chosen), expected)


def test_nothing_is_chosen_or_grown_in_padding(device: torch.device) -> None:
    layout = layout_of(33, 1, 63)
    segments = Segments.build(layout)
    row = torch.ones(layout.size, device=device)
    empty = torch.zeros_like(segments.live).to(device)
    live = segments.live.to(device)
    everything = [99, 99, 99]
    for regrow in (row, 3):
        assert torch.equal(prune_regrow(row, live, everything, segments, regrow=regrow), live)
        assert torch.equal(prune_regrow(row, empty, everything, segments, regrow=regrow), empty)
    assert torch.equal(select_random(live, everything, segments, seed=1), live)
    assert torch.equal(select_random(empty, everything, segments, seed=1), empty)


def test_a_dropped_element_may_grow_again(device: torch.device) -> None:
    layout = layout_of(4)
    segments = Segments.build(layout)
    weights = torch.zeros(layout.size, device=device)
    weights[:4] = torch.tensor([3.0, 1.0, 2.0, 9.0])
    scores = torch.zeros(layout.size, device=device)
    scores[:4] = torch.tensor([0.0, 5.0, 0.0, 4.0])
    words = torch.tensor([0b0111], dtype=torch.int32, device=device)
    result = prune_regrow(weights, words, [2], segments, regrow=scores)
    assert result.tolist() == [0b1011]


def test_rows_without_elements(device: torch.device) -> None:
    for layout in (layout_of(), layout_of(0, 0)):
        segments = Segments.build(layout)
        counts = [1] * len(segments)
        row = torch.zeros(0, device=device)
        words = torch.zeros(0, dtype=torch.int32, device=device)
        assert select_by_magnitude(row, words, counts, segments, largest=True).shape == (0,)
        assert select_random(words, counts, segments, seed=1).shape == (0,)
        assert prune_regrow(row, words, counts, segments, regrow=row).shape == (0,)


def test_counts_may_lie_on_the_device(device: torch.device) -> None:
    layout = layout_of(40, 7)
    segments = Segments.build(layout)
    words, row = segments.live.to(device), random_row(layout, torch.float32, 5).to(device)
    counts = torch.tensor([[11, 0], [3, 0]], device=device)[:, 0]
    listed = select_by_magnitude(row, words, [11, 3], segments, largest=True)
    assert torch.equal(select_by_magnitude(row, words, counts, segments, largest=True), listed)
    drawn = select_random(words, [11, 3], segments, seed=1)
    assert torch.equal(select_random(words, counts, segments, seed=1), drawn)
    assert counts.tolist() == [11, 3]


def test_two_runs_and_every_tiling_give_the_same_bits(device: torch.device) -> None:
    layout = layout_of(700, 33)
    segments = Segments.build(layout)
    # Half of the elements tie.
    row = random_row(layout, torch.float32, 6).clamp(min=0).to(device)
    words = words_of(random_mask(layout, 0.8), device)
    first = prune_regrow(row, words, [150, 9], segments, regrow=row)
    assert torch.equal(prune_regrow(row, words, [150, 9], segments, regrow=row), first)
    for size in (96, 512):
        tiles = torch.from_numpy(_tiles(segments.bounds.numpy(), size))
        other = replace(segments, tiles=tiles, _copies={})
        assert torch.equal(prune_regrow(row, words, [150, 9], other, regrow=row), first)


def far(first: int, numel: int) -> tuple[Tensor, Tensor]:
    """Tables of one tensor that begins at this element of a row."""
    bounds = torch.tensor([[first, numel]])
    return bounds, torch.tensor([[0, first // 32, numel, 0]])


def test_positions_beyond_32_bits(device: torch.device) -> None:
    """Of the long rows, little more is ever touched than the tensor."""
    first = 2**32 - 64
    bounds, tiles = far(first, 128)
    words = torch.empty(first // 32 + 4, dtype=torch.int32, device=device)
    out = torch.empty_like(words)
    words[-4:] = -1
    counts = torch.tensor([40], device=device)
    subject._select(out, None, words, counts, bounds, tiles.to(device), 5, False)
    keys = reference.random_keys(5, 128, first=first)
    expected = torch.zeros(128, dtype=torch.bool)
    expected[torch.from_numpy(np.argsort(keys, kind="stable")[:40])] = True
    assert torch.equal(mask_of(out[-4:]), expected)


def test_rows_beyond_32_bits(device: torch.device) -> None:
    first = 2**31 + 64
    bounds, tiles = far(first, 64)
    row = torch.empty(first + 64, dtype=torch.bfloat16, device=device)
    row[-64:] = torch.arange(64).to(torch.bfloat16)
    words = torch.empty(first // 32 + 2, dtype=torch.int32, device=device)
    out = torch.empty_like(words)
    words[-2:] = -1
    counts = torch.tensor([10], device=device)
    subject._select(out, row, words, counts, bounds, tiles.to(device), 0, True)
    assert mask_of(out[-2:]).nonzero().flatten().tolist() == list(range(54, 64))


def test_parameters_that_record_gradients_are_rows_too(device: torch.device) -> None:
    segments = Segments.build(layout_of(40))
    live = segments.live.to(device)
    row = torch.arange(64.0, device=device, requires_grad=True)
    chosen = select_by_magnitude(row, live, [3], segments, largest=True)
    assert mask_of(chosen).nonzero().flatten().tolist() == [37, 38, 39]
    assert prune_regrow(row, live, [3], segments, regrow=row).tolist() == live.tolist()


@pytest.mark.gpu
def test_torch_on_a_gpu_chooses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(5000, 0, 33)
    segments = Segments.build(layout, device="cuda")
    mask = random_mask(layout, 0.5)
    row = random_row(layout, torch.float32, 1)
    for regrow in (row, 7):
        expected = reference.prune_regrow(row, mask, [900, 3, 4], layout, regrow=regrow)
        other = regrow.cuda() if isinstance(regrow, Tensor) else regrow
        for choice in ("torch", "triton"):
            monkeypatch.setenv("LIGHTFED_KERNELS", choice)
            words = pack_mask(mask.cuda())
            result = prune_regrow(row.cuda(), words, [900, 3, 4], segments, regrow=other)
            # Not on the CPU, where no kernel can be asked for.
            assert torch.equal(unpack_mask(result).cpu(), expected)
