"""Means over neighbors: every backend is compared with the float64 reference."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightfed_kernels import _masked_mean_cpu
from lightfed_kernels.masked_mean import (
    Neighbours,
    masked_mean,
    masked_mean_expression,
)
from lightfed_kernels.masks import pack_mask
from lightfed_kernels.reference import masked_mean as reference

from tests.kernels import far
from tests.kernels.backends import INTERPRETED, NOT_INTERPRETED
from tests.kernels.mean_cases import (
    BOUNDS,
    LISTS,
    WEIGHTS,
    banded,
    bits,
    canaries_live,
    run,
    values,
)


@settings(max_examples=12)
@example(31, [[0, 1], [1, 1, 2]], 0.5, True, True, True, "covered", torch.float32)
@example(32, [[0, 1], [1, 1, 2]], 0.5, True, True, True, "neighbours", torch.float32)
@example(33, [[0, 1, 2]], 0.5, True, True, False, "covered", torch.float64)
@example(33, [[0, 1, 2], []], 0.5, True, True, True, "covered", torch.bfloat16)
@given(
    st.sampled_from([1, 2, 3]),
    st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["covered", "neighbours"]),
    st.sampled_from(list(BOUNDS)),
)
def test_every_mean_is_the_reference(
    device: torch.device,
    words: int,
    lists: list[list[int]],
    density: float,
    masked: bool,
    kept: bool,
    weighted: bool,
    over: str,
    dtype: torch.dtype,
) -> None:
    size = 32 * words
    x = values(3, size, dtype=dtype)

    masks = None
    if masked:
        masks = bits(3, size, density=density, seed=1)
        x[~masks] = float("nan")  # has no influence where a mask is 0

    receivers = None
    if kept:
        receivers = bits(len(lists), size, density=0.7, seed=2)

    weights = None
    if weighted:
        weights = []
        for r, senders in enumerate(lists):
            weights.append([0.5 + (k + 3 * r) % 4 for k in range(len(senders))])

    run(device, x, lists, masks=masks, receivers=receivers, weights=weights, over=over)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_no_mask_covers_has_no_influence_and_what_one_covers_shows(
    device: torch.device, dtype: torch.dtype, bad: float
) -> None:
    x = values(3, 64, dtype=dtype)
    x[1, 5] = bad
    x[1, 40] = bad
    masks = torch.ones(3, 64, dtype=torch.bool)
    masks[1, 5] = False

    mean = run(device, x, [[0, 1, 2], [0, 2]], masks=masks)

    assert mean[0, 5].isfinite()
    assert not mean[0, 40].isfinite()
    assert mean[1].isfinite().all()


# Not of any kind: garbage of other tests may be collected here, and warn.
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("weights", [None, [[1.0, 2.0]]])
def test_a_sum_that_is_no_number_is_one_without_a_warning(
    weights: list[list[float]] | None,
) -> None:
    x = torch.ones(2, 32)
    x[:, 1] = torch.tensor([float("inf"), -float("inf")])
    x[:, 2] = 3e38  # the sum overflows
    everything = torch.full((2, 1), -1, dtype=torch.int32)

    neighbours = Neighbours.build([[0, 1]], senders=2, weights=weights)
    mean = masked_mean(x, neighbours, masks=everything)

    assert mean[0, 1].isnan()
    assert mean[0, 2] == float("inf")
    assert (mean[0, 3:] == 1).all()


def test_what_a_receiver_does_not_keep_is_zero_be_it_nan(device: torch.device) -> None:
    x = values(2, 32)
    x[1, 3] = float("nan")
    kept = torch.ones(1, 32, dtype=torch.bool)
    kept[0, 3] = False
    kept[0, 9] = False

    mean = run(device, x, [[0, 1]], receivers=kept)

    assert mean[0, 3] == 0
    assert mean[0, 9] == 0
    assert (mean[0, kept[0]] != 0).all()


@pytest.mark.parametrize("over", ["covered", "neighbours"])
@pytest.mark.parametrize("weights", [None, [[2.0, 1.0], [], [3.0]]])
def test_elements_without_coverage_and_receivers_without_neighbours_get_zero(
    device: torch.device, over: str, weights: list[list[float]] | None
) -> None:
    masks = torch.zeros(2, 64, dtype=torch.bool)
    masks[0, :7] = True

    mean = run(device, values(2, 64), [[0, 1], [], [1]], masks=masks, over=over, weights=weights)

    assert (mean[0, 7:] == 0).all()
    assert (mean[1:] == 0).all()
    assert not torch.signbit(mean[1:]).any(), "a zero is -0"


def test_a_neighbour_of_weight_zero_takes_no_part(device: torch.device) -> None:
    x = values(3, 32)
    x[1] = float("nan")
    mean = run(device, x, [[0, 1, 2], [1]], weights=[[1.0, 0.0, 1.0], [0.0]])
    assert torch.equal(mean[1], torch.zeros(32))
    assert mean.isfinite().all()


def test_neighbours_are_added_in_the_order_of_their_list(device: torch.device) -> None:
    # In float32, 1 is lost beside 2^25, unless it is added last.
    x = torch.tensor([[2.0**25], [1.0], [-(2.0**25)]]).expand(3, 32).contiguous()
    neighbours = Neighbours.build([[0, 1, 2], [0, 2, 1], [1, 0, 2]], senders=3)
    everything = torch.full((3, 1), -1, dtype=torch.int32, device=device)
    mean = masked_mean(x.to(device), neighbours, masks=everything)
    third = (torch.ones(1) / 3).item()
    assert mean.cpu()[:, 0].tolist() == [0.0, third, 0.0]


@pytest.mark.parametrize("count", [255, 256, 300])
def test_hundreds_of_neighbours_are_counted(device: torch.device, count: int) -> None:
    x = torch.full((1, 32), 3.0)
    masks = torch.arange(32)[None] > 4
    mean = run(device, x, [[0] * count], masks=masks)
    assert torch.equal(mean[0], torch.where(masks[0], 3.0, 0.0))


def test_rows_come_as_matrix_as_list_and_as_both(device: torch.device) -> None:
    masks = bits(5, 96, density=0.5, seed=3)
    x = values(5, 96).to(device)
    words = pack_mask(masks).to(device)
    neighbours = Neighbours.build(LISTS, senders=5)
    whole = masked_mean(x, neighbours, masks=words)

    separate_rows = [row.clone() for row in x]
    separate_masks = [mask.clone() for mask in words]
    assert torch.equal(masked_mean(separate_rows, neighbours, masks=separate_masks), whole)

    mixed_rows = [x[:2].clone(), x[2].clone(), x[3:]]
    mixed_masks = [words[:4], words[4]]
    assert torch.equal(masked_mean(mixed_rows, neighbours, masks=mixed_masks), whole)

    reference_mean = reference.masked_mean(x.cpu(), LISTS, masks=masks)
    assert torch.allclose(whole.cpu().double(), reference_mean, atol=1e-6)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_blocks_of_columns_make_up_the_whole(
    device: torch.device, weights: list[list[float]] | None
) -> None:
    x = values(5, 160).to(device)
    words = pack_mask(bits(5, 160, density=0.5, seed=3)).to(device)
    kept = pack_mask(bits(4, 160, density=0.5, seed=4)).to(device)
    neighbours = Neighbours.build(LISTS, senders=5, weights=weights)
    whole = masked_mean(x, neighbours, masks=words, receivers=kept)

    blocks = torch.full_like(whole, float("nan"))
    for begin, end in ((0, 32), (32, 128), (128, 160)):
        of_block = slice(begin // 32, end // 32)
        masked_mean(
            x[:, begin:end],
            neighbours,
            masks=words[:, of_block],
            receivers=kept[:, of_block],
            out=blocks[:, begin:end],
        )
    assert torch.equal(blocks, whole)


@pytest.mark.parametrize("width", [32, 96, 160, 512])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("weights", [None, [*WEIGHTS, []]])
@pytest.mark.parametrize("over", ["covered", "neighbours"])
def test_rows_are_replaced_by_the_means_of_their_old_values(
    device: torch.device, over: Any, weights: list[list[float]] | None, masked: bool, width: int
) -> None:
    buffer, rows = banded(5, 160, torch.float32, device)
    rows.copy_(values(5, 160))
    words = pack_mask(bits(5, 160, density=0.5, seed=3)).to(device) if masked else None
    kept = None if words is None else [*words.flip(0)]
    neighbours = Neighbours.build([*LISTS, []], senders=5, weights=weights)

    expected = masked_mean(rows, neighbours, masks=words, receivers=kept, over=over)
    means = masked_mean(rows, neighbours, masks=words, receivers=kept, over=over, width=width)
    assert means is rows
    assert torch.equal(rows, expected)
    assert canaries_live(buffer)

    without_neighbours = Neighbours.build([[]] * 5, senders=5)
    masked_mean(rows, without_neighbours, width=width)
    assert not rows.any()


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("over", ["covered", "neighbours"])
@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_the_size_of_a_chunk_does_not_matter(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    over: Any,
    weights: list[list[float]] | None,
) -> None:
    x, words = values(5, 224, dtype=dtype), pack_mask(bits(5, 224, density=0.5, seed=3))
    kept = pack_mask(bits(4, 224, density=0.5, seed=4))
    neighbours = Neighbours.build(LISTS, senders=5, weights=weights)
    whole = masked_mean(x, neighbours, masks=words, receivers=kept, over=over)
    assert torch.equal(masked_mean(x, neighbours, masks=words, receivers=kept, over=over), whole)
    monkeypatch.setattr(_masked_mean_cpu, "CHUNK", 64)
    assert torch.equal(masked_mean(x, neighbours, masks=words, receivers=kept, over=over), whole)
    # Room for 64 elements of the four senders that are kept, and a bit.
    monkeypatch.setattr(_masked_mean_cpu, "KEPT", 4 * 66)
    assert torch.equal(masked_mean(x, neighbours, masks=words, receivers=kept, over=over), whole)
    unmasked = masked_mean(x, neighbours)
    expected = reference.masked_mean(x, LISTS, weights=weights)
    assert torch.allclose(unmasked.double(), expected, atol=4 * BOUNDS[dtype].torch)


@pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("over", ["covered", "neighbours"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_backends_and_all_tiles_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, over: Any, masked: bool
) -> None:
    from lightfed_kernels import _rows
    from lightfed_kernels.gpu.masked_mean import launch

    x = values(5, 96, dtype=dtype)
    words = pack_mask(bits(5, 96, density=0.5, seed=3)) if masked else None
    kept = pack_mask(bits(4, 96, density=0.5, seed=4))
    neighbours = Neighbours.build(LISTS, senders=5)
    monkeypatch.setenv("LIGHTFED_KERNELS", "torch")
    by_torch = masked_mean(x, neighbours, masks=words, receivers=kept, over=over)
    monkeypatch.setenv("LIGHTFED_KERNELS", "triton")
    assert torch.equal(masked_mean(x, neighbours, masks=words, receivers=kept, over=over), by_torch)
    for tile in (1, 2, 64):
        out = torch.full_like(by_torch, float("nan"))
        launch(
            out, _rows.addresses("rows", [x]), [] if words is None else [words], [kept],
            neighbours.first, neighbours.index, None, over == "neighbours", words=tile,
        )  # fmt: skip
        assert torch.equal(out, by_torch)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("over", ["covered", "neighbours"])
def test_the_expression_is_the_operation(dtype: torch.dtype, over: Any) -> None:
    x, words = values(5, 96, dtype=dtype), pack_mask(bits(5, 96, density=0.4, seed=3))
    x[2, :5] = float("nan")
    words[2, 0] &= ~0b11111
    kept = pack_mask(bits(1, 96, density=0.5, seed=4))
    chosen = [4, 0, 2]
    plain = Neighbours.build([chosen], senders=5)
    expected = masked_mean(x, plain, masks=words, receivers=kept, over=over)[0]
    assert torch.equal(
        masked_mean_expression(x[chosen], words[chosen], kept[0], over=over), expected
    )
    weights = torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)
    weighted = Neighbours.build([chosen], senders=5, weights=[weights.tolist()])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    torch.testing.assert_close(
        masked_mean_expression(
            list(x[chosen]), list(words[chosen]), weights=weights.to(wide), over=over
        ),
        masked_mean(x, weighted, masks=words, over=over)[0],
    )
    x = x.nan_to_num(1.0)
    assert torch.equal(masked_mean_expression(x[chosen], over=over), masked_mean(x, plain)[0])


def test_rows_of_the_output_lie_further_apart_than_32_bits_reach(device: torch.device) -> None:
    # Virtual memory: only the elements of the rows are touched. A stride has 32 bits, two do not.
    apart = 2**30 + 64
    memory = torch.empty(2 * apart + 32, dtype=torch.bfloat16, device=device)
    out = memory.as_strided((3, 32), (apart, 1))
    words = torch.empty(2 * apart + 1, dtype=torch.int32, device=device)
    words = words.as_strided((3, 1), (apart, 1))
    out.fill_(float("nan"))
    words.copy_(torch.tensor([[-1], [0xFF], [0xF]]))
    x = torch.arange(1.0, 97.0).view(3, 32).to(device, torch.bfloat16)
    masked_mean(x, Neighbours.build([[0], [1], [2]], senders=3), receivers=words, out=out)
    for row, kept in enumerate((32, 8, 4)):
        assert torch.equal(out[row, :kept], x[row, :kept])
        assert (out[row, kept:] == 0).all()


@pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
def test_a_tile_lies_beyond_32_bits() -> None:
    import triton.language as tl
    from lightfed_kernels.gpu.masked_mean import masked_mean as kernel

    # Virtual memory: only the last tile is touched.
    tile = 2**21 + 1
    words = 32 * (tile + 1)
    row, out = (torch.empty(32 * words, dtype=torch.bfloat16) for _ in range(2))
    mask, kept = (torch.empty(words, dtype=torch.int32) for _ in range(2))
    row[-1024:] = values(1024, dtype=torch.bfloat16)
    mask[-32:], kept[-32:] = 0x0FFFFFFF, 0x7FFFFFF0
    out[-1024:] = float("nan")
    table = torch.tensor([0, 1, row.data_ptr(), mask.data_ptr(), kept.data_ptr()])
    with far.program(tile):
        kernel[(1,)](
            table, None, out, out.shape[0], words, 1, WORDS=32,
            DTYPE=tl.bfloat16, ACC=tl.float32, MASKED=True, COUNTED=True, KEPT=True,
        )  # fmt: skip
    expected = masked_mean(
        [row[-1024:]], Neighbours.build([[0]], senders=1),
        masks=[mask[-32:]], receivers=kept[None, -32:],
    )  # fmt: skip
    assert torch.equal(out[-1024:], expected[0])


@pytest.mark.gpu
def test_rows_are_longer_than_32_bits_reach() -> None:
    size = 2**31 + 64
    x = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.tensor([1.0, 2.0, 3.0])
    got = masked_mean([x], Neighbours.build([[0]], senders=1))
    assert torch.equal(got[0], x)


@pytest.mark.gpu
def test_no_value_of_an_argument_compiles_a_kernel_again() -> None:
    from lightfed_kernels.gpu import masked_mean as gpu

    def variants() -> int:
        return sum(len(cache[0]) for cache in gpu.masked_mean.device_caches.values())

    before = variants()
    for receivers, words in ((1, 1), (2, 1), (16, 3), (3, 16), (1, 33)):
        x = torch.randn(3, 32 * words, device="cuda")
        masks = torch.full((3, words), -1, dtype=torch.int32, device="cuda")
        neighbours = Neighbours.build([[0, 1, 2]] * receivers, senders=3)
        masked_mean(x, neighbours, masks=masks)
    assert variants() - before <= 1
