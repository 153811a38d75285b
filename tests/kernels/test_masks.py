"""Packed masks and compressed rows: every backend against plain torch."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightfed_kernels import masks as operators
from lightfed_kernels.masks import (
    apply_mask_,
    compress,
    expand,
    pack_mask,
    popcount,
    unpack_mask,
)
from lightfed_kernels.reference import masks as reference
from torch import Tensor

from tests.kernels import far
from tests.kernels.backends import INTERPRETED, NOT_INTERPRETED

CANARY = 7.0
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
# Word counts around the tiles of the kernels, 32 and 64 words.
SIZES = [1, 2, 31, 33, 65]


def bits(*shape: int, density: float = 0.5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator) < density


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def banded(like: Tensor, *, full_of: float = CANARY) -> tuple[Tensor, Tensor]:
    """A buffer with 32 canaries on either side of its middle, which is given to be written."""
    buffer = torch.full((like.numel() + 64,), full_of, dtype=like.dtype, device=like.device)
    middle = buffer[32:-32]
    middle.fill_(float("nan") if like.dtype.is_floating_point else -77)
    return buffer, middle


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN included; the bits decide."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.cpu().view(kind), b.cpu().view(kind))


@pytest.mark.parametrize("words", SIZES)
@pytest.mark.parametrize("kernel", ["pack", "unpack"])
def test_packing_writes_no_further_than_its_words(
    device: torch.device, kernel: str, words: int
) -> None:
    mask = bits(32 * words)
    packed = reference.pack_mask(mask).to(device)
    mask = mask.to(device)
    if kernel == "pack":
        buffer, out = banded(packed)
        operators._pack_into(out, mask)
        assert same_bits(out, packed)
    else:
        buffer, out = banded(mask.to(torch.uint8))
        operators._unpack_into(out.view(torch.bool), packed)
        assert same_bits(out, mask)
    assert (buffer[:32] == CANARY).all()
    assert (buffer[-32:] == CANARY).all()


@pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
@pytest.mark.parametrize("tiles", [1, 31, 32, 33])
def test_tiles_are_counted_and_nothing_is_written_behind(tiles: int) -> None:
    from lightfed_kernels.gpu import masks as gpu

    words = reference.pack_mask(bits(2, 1024 * tiles - 32))
    buffer, counts = banded(torch.empty(2 * tiles, dtype=torch.int32))
    programs = -(-tiles // gpu.TILES)
    gpu.count[(2 * programs,)](
        counts, words, words.stride(0), words.shape[1], tiles, programs,
        TILES=gpu.TILES, WORDS=gpu.WORDS,
    )  # fmt: skip
    expected = (
        torch.nn.functional.pad(reference.unpack_mask(words), (0, 32)).view(2, tiles, 1024).sum(-1)
    )
    assert torch.equal(counts.view(2, -1).long(), expected)
    assert torch.equal(gpu.tile_counts(words), counts.view(2, -1))
    assert (buffer[:32] == CANARY).all()
    assert (buffer[-32:] == CANARY).all()


@settings(max_examples=6)
@example(1, 31, 0.5)
@example(2, 64, 0.5)
@example(2, 65, 1.0)
@given(st.integers(0, 2), st.sampled_from([1, 2, 33]), st.sampled_from([0.0, 0.01, 0.5, 1.0]))
def test_a_mask_packs_unpacks_and_counts(
    device: torch.device, clients: int, words: int, density: float
) -> None:
    shape = (clients, 32 * words) if clients else (32 * words,)
    mask = bits(*shape, density=density)
    packed = pack_mask(mask.to(device))
    assert same_bits(packed, reference.pack_mask(mask))
    unpacked = unpack_mask(packed)
    assert unpacked.dtype == torch.bool
    assert torch.equal(unpacked.cpu(), mask)
    count = popcount(packed)
    assert count.dtype == torch.int64
    assert torch.equal(count.cpu(), mask.sum(-1))


def test_bit_i_of_word_w_is_element_32_w_plus_i(device: torch.device) -> None:
    for element in (0, 1, 7, 8, 30, 31, 32, 63):
        mask = torch.zeros(64, dtype=torch.bool, device=device)
        mask[element] = True
        words = pack_mask(mask).cpu().numpy().view(np.uint32)
        assert words[element // 32] == 1 << (element % 32)
        assert words[1 - element // 32] == 0


def test_masks_may_be_blocks_of_columns(device: torch.device) -> None:
    mask = bits(3, 192).to(device)
    words = pack_mask(mask)
    assert torch.equal(pack_mask(mask[:, 64:160]), words[:, 2:5])
    assert torch.equal(pack_mask(mask[1:, 3:67]), pack_mask(mask[1:, 3:67].clone()))
    assert torch.equal(pack_mask(mask[0, 5:37]), pack_mask(mask[0, 5:37].clone()))
    assert torch.equal(unpack_mask(words[:, 2:5]), mask[:, 64:160])
    assert torch.equal(popcount(words[:, 1:2]), mask[:, 32:64].sum(-1))
    rows = values(3, 192).to(device)
    expected = torch.where(mask[:, 64:160], rows[:, 64:160], 0)
    rest = rows[:, :64].clone()
    assert torch.equal(apply_mask_(rows[:, 64:160], words[:, 2:5]), expected)
    assert torch.equal(rows[:, 64:160], expected)
    assert torch.equal(rows[:, :64], rest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", SIZES)
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_values_are_compressed_and_expanded(
    device: torch.device, dtype: torch.dtype, words: int, density: float
) -> None:
    mask = bits(32 * words, density=density)
    row = values(32 * words, dtype=dtype)
    row[::3] = float("nan")
    packed = pack_mask(mask).to(device)
    got = compress(row.to(device), packed, nnz=int(mask.sum()))
    assert same_bits(got, reference.compress(row, pack_mask(mask)))
    buffer, out = banded(row.to(device))
    assert expand(got, packed, out=out) is out
    assert same_bits(out, reference.expand(got.cpu(), pack_mask(mask)))
    assert same_bits(expand(got, packed), out)
    assert (buffer[:32] == CANARY).all()
    assert (buffer[-32:] == CANARY).all()
    assert same_bits(compress(row.to(device), packed, nnz=len(got)), got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [2, 33])
def test_values_come_from_anywhere_in_a_buffer(
    device: torch.device, dtype: torch.dtype, words: int
) -> None:
    """What arrives over a network lies where it lies; rows start at 16 bytes, values need not."""
    mask = bits(32 * words)
    row = values(32 * words, dtype=dtype).to(device)
    packed = pack_mask(mask).to(device)
    count = int(mask.sum())
    buffer, _ = banded(torch.empty(count, dtype=dtype, device=device))
    operators._compress_into(buffer[31 : 31 + count], row, packed)
    assert (buffer[:31] == CANARY).all()
    assert (buffer[31 + count + 1 :][-31:] == CANARY).all()
    got = expand(buffer[31 : 31 + count], packed)
    assert same_bits(got, torch.where(mask, row.cpu(), 0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [1, 31, 33])
def test_a_mask_zeroes_what_it_does_not_cover_even_nan(
    device: torch.device, dtype: torch.dtype, words: int
) -> None:
    mask = bits(2, 32 * words)
    rows = values(2, 32 * words, dtype=dtype)
    rows[0, ~mask[0]] = float("nan")
    rows[1, mask[1]] = float("inf")
    packed = pack_mask(mask).to(device)
    buffer, middle = banded(rows.to(device))
    got = middle.view(2, -1).copy_(rows)
    assert apply_mask_(got, packed) is got
    assert same_bits(got, reference.apply_mask(rows, pack_mask(mask)))
    assert (buffer[:32] == CANARY).all()
    assert (buffer[-32:] == CANARY).all()
    single = rows[0].to(device)
    assert same_bits(apply_mask_(single, packed[0]), got[0])


def test_one_mask_covers_all_rows(device: torch.device) -> None:
    rows, mask = values(3, 96), bits(96)
    got = apply_mask_(rows.to(device), pack_mask(mask).to(device))
    assert same_bits(got, torch.where(mask, rows, 0.0))


def test_chunks_of_the_cpu_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    row, mask = values(224), bits(224)
    packed, count = pack_mask(mask), int(mask.sum())
    monkeypatch.setattr(operators, "CHUNK", 64)
    assert torch.equal(unpack_mask(packed), mask)
    assert torch.equal(unpack_mask(torch.stack([packed, ~packed])), torch.stack([mask, ~mask]))
    got = compress(row, packed, nnz=count)
    assert torch.equal(got, row[mask])
    assert torch.equal(expand(got, packed), row * mask)
    assert torch.equal(apply_mask_(row.clone(), packed), row * mask)


def test_rows_that_lie_further_apart_than_32_bits_reach(device: torch.device) -> None:
    # Virtual memory: only the elements of the rows are touched. A stride has 32 bits, two do not.
    apart = 2**30 + 64

    def memory(size: int, dtype: torch.dtype) -> Tensor:
        whole = torch.empty(2 * apart + size, dtype=dtype, device=device)
        return whole.as_strided((3, size), (apart, 1))

    rows, words, mask = memory(32, torch.bfloat16), memory(1, torch.int32), memory(32, torch.bool)
    rows.fill_(3.0)
    mask.copy_(bits(3, 32))
    operators._pack_into(words, mask)
    assert same_bits(words.contiguous(), reference.pack_mask(bits(3, 32)))
    assert torch.equal(popcount(words), mask.sum(-1))
    assert torch.equal(unpack_mask(words), mask)
    assert torch.equal(apply_mask_(rows, words) == 3, mask)
    mask.fill_(False)
    operators._unpack_into(mask, words)
    assert torch.equal(mask.cpu(), bits(3, 32))


@pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
def test_tiles_and_ranks_beyond_32_bits() -> None:
    from lightfed_kernels.gpu import masks as gpu

    # Virtual memory: only the last tile is touched.
    tile = 2**21 + 1
    n_words = 32 * (tile + 1)
    rows, target, packed = (torch.empty(32 * n_words, dtype=torch.bfloat16) for _ in range(3))
    words = torch.empty(n_words, dtype=torch.int32)
    mask = torch.empty(32 * n_words, dtype=torch.int8)
    tail, row = bits(1024), values(1024, dtype=torch.bfloat16)
    mask[-1024:], rows[-1024:] = tail, row
    with far.program(tile):
        gpu.pack[(1,)](words, mask, 0, 0, n_words, tile + 1, WORDS=32)
        assert torch.equal(words[-32:], pack_mask(tail))
        mask[-1024:] = -1
        gpu.unpack[(1,)](mask, words, 0, 0, n_words, tile + 1, WORDS=32)
        assert torch.equal(mask[-1024:], tail.to(torch.int8))
        ends = torch.empty(tile + 1, dtype=torch.int64)
        ends[tile - 1] = before = 2**31 + 5
        nnz = before + int(tail.sum())
        gpu.compress[(1,)](packed, rows, words, ends, n_words, nnz, WORDS=32)
        assert torch.equal(packed[before:nnz], row[tail])
        gpu.expand[(1,)](target, packed, words, ends, n_words, nnz, WORDS=32)
        expected = torch.where(tail, row, 0)
        assert torch.equal(target[-1024:], expected)
        gpu.apply[(1,)](rows, words, 0, 0, n_words, tile + 1, WORDS=32)
        assert torch.equal(rows[-1024:], expected)


@pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
def test_masks_are_moved_to_a_multiple_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter reads anything anywhere, a GPU does not."""
    from lightfed_kernels.gpu import masks as gpu

    started: list[Tensor] = []
    monkeypatch.setattr(
        gpu, "_start", lambda kernel, programs, words, mask, *_, **__: started.append(mask)
    )
    mask = bits(3, 192)
    for part in (mask[:, 32:64], mask[:, 3:35], mask[:1, 8:40], bits(3, 200)[:, :192]):
        gpu.launch_pack(torch.empty(3, 1, dtype=torch.int32), part)
        assert torch.equal(started[-1].bool(), part)
        assert started[-1].data_ptr() % 16 == 0
        assert len(part) == 1 or started[-1].stride(0) % 16 == 0


def test_empty_inputs(device: torch.device) -> None:
    nothing = torch.empty(2, 0, dtype=torch.int32, device=device)
    assert pack_mask(torch.empty(2, 0, dtype=torch.bool, device=device)).shape == (2, 0)
    assert unpack_mask(nothing).shape == (2, 0)
    assert popcount(nothing).tolist() == [0, 0]
    assert popcount(nothing[:0]).shape == (0,)
    assert apply_mask_(torch.empty(2, 0, device=device), nothing).shape == (2, 0)
    assert compress(torch.empty(0, device=device), nothing[0], nnz=0).shape == (0,)
    assert expand(torch.empty(0, device=device), nothing[0]).shape == (0,)


@pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
@pytest.mark.parametrize("claimed", [1, 5, 60])
def test_no_count_that_is_wrong_reaches_beyond_the_values(claimed: int) -> None:
    """On a GPU the count is not checked: the kernels are bounded by it all the same."""
    from lightfed_kernels.gpu.masks import launch_compress, launch_expand

    row, mask = values(64), bits(64)
    count = int(mask.sum())
    assert 5 < count < 60
    buffer, out = banded(torch.empty(claimed))
    launch_compress(out, row, pack_mask(mask))
    shared = min(count, claimed)
    assert torch.equal(out[:shared], row[mask][:shared])
    assert out[shared:].isnan().all()
    assert (buffer[:32] == CANARY).all()
    assert (buffer[-32:] == CANARY).all()
    # Behind the values lie canaries, which must not be taken for values.
    buffer, source = banded(torch.empty(claimed))
    source.copy_(torch.arange(1.0, claimed + 1))
    got = torch.empty(64)
    launch_expand(got, source, pack_mask(mask))
    expected = torch.zeros(64)
    expected[torch.nonzero(mask).flatten()[:shared]] = torch.arange(1.0, shared + 1)
    assert torch.equal(got, expected)


@pytest.mark.gpu
def test_counts_are_checked_on_a_gpu_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = torch.full((2,), -1, dtype=torch.int32, device="cuda")
    assert compress(torch.zeros(64, device="cuda"), words, nnz=60).shape == (60,)
    monkeypatch.setenv("LIGHTFED_KERNELS_CHECK", "1")
    with pytest.raises(ValueError, match="nnz: 60; the mask covers 64"):
        compress(torch.zeros(64, device="cuda"), words, nnz=60)


def test_a_gpu_without_triton_unpacks_with_shifts() -> None:
    mask = bits(64)
    assert torch.equal(operators._bits(pack_mask(mask)).flatten(), mask.int())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_on_a_gpu_does_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "torch")
    mask, row = bits(2, 1056), values(2, 1056, dtype=dtype)
    words = pack_mask(mask.cuda())
    count = int(mask[0].sum())
    assert same_bits(words, pack_mask(mask))
    assert torch.equal(unpack_mask(words).cpu(), mask)
    assert torch.equal(popcount(words).cpu(), mask.sum(-1))
    got = compress(row[0].cuda(), words[0], nnz=count)
    assert same_bits(got, row[0][mask[0]])
    assert same_bits(expand(got, words[0]), torch.where(mask[0], row[0], 0))
    assert same_bits(apply_mask_(row.cuda(), words), torch.where(mask, row, 0))


def test_arguments_that_do_not_fit_are_named() -> None:
    row, words = torch.zeros(64), torch.zeros(2, dtype=torch.int32)

    def message(error: type[Exception], text: str, call: Any, *args: Any, **more: Any) -> None:
        with pytest.raises(error, match=text):
            call(*args, **more)

    message(TypeError, "mask: torch.int32; a mask is bool", pack_mask, words)
    message(ValueError, "mask: 33 elements; .* multiple of 32", pack_mask, bits(33))
    message(ValueError, "mask: 3 dimensions", pack_mask, bits(1, 1, 32))
    message(ValueError, "mask: elements of a row lie 2 apart", pack_mask, bits(64)[::2])
    message(TypeError, "words: float32; packed masks are int32", unpack_mask, row)
    message(ValueError, "words: 0 dimensions", popcount, words[0])
    message(ValueError, "words: 3 dimensions", popcount, words[None, None])
    message(ValueError, "row: of shape .* one row at a time", compress, row[None], words, nnz=0)
    message(ValueError, "words: of shape .* one row at a time", compress, row, words[None], nnz=0)
    message(ValueError, "words: 1 words; 2 are needed", compress, row, words[:1], nnz=0)
    message(ValueError, "nnz: 65 of a row of 64", compress, row, words, nnz=65)
    message(ValueError, "nnz: -1 of a row of 64", compress, row, words, nnz=-1)
    message(ValueError, "nnz: 3; the mask covers 0 elements", compress, row, words, nnz=3)
    message(ValueError, "nnz: 0; the mask covers 64 elements", compress, row, ~words, nnz=0)
    message(TypeError, "row: int64", compress, row.long(), words, nnz=0)
    message(TypeError, "values: torch.int64", expand, row.long(), words)
    message(ValueError, "values: of shape", expand, row[None], words)
    message(ValueError, "values: elements of a row lie 2 apart", expand, row[::2], words)
    message(ValueError, "values: 3; the mask covers 0 elements", expand, row[:3], words)
    message(ValueError, "values: 65 for a row of 64", expand, torch.zeros(65), words)
    message(ValueError, "out: rows of 32 elements; 64", expand, row[:0], words, out=row[:32])
    message(ValueError, "out: of shape", expand, row[:0], words, out=row[None])
    message(TypeError, "out: torch.float64", expand, row[:0], words, out=row.double())
    message(ValueError, "words: on cpu, but row is on meta", compress, row.to("meta"), words, nnz=0)
    message(ValueError, "words: 2 words; 3 are needed", apply_mask_, torch.zeros(96), words)
    two = torch.zeros(2, 64)
    message(ValueError, r"words: of shape \[1, 2\] for rows", apply_mask_, two, words[None])
    message(TypeError, "rows: float16", apply_mask_, row.half(), words)


@pytest.mark.skipif(not INTERPRETED, reason=NOT_INTERPRETED)
def test_rows_off_a_multiple_of_16_bytes_are_refused_by_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "triton")
    row, words = torch.zeros(65)[1:], torch.full((2,), -1, dtype=torch.int32)
    for call in (
        lambda: compress(row, words, nnz=64),
        lambda: expand(torch.zeros(64), words, out=row),
        lambda: apply_mask_(row, words),
    ):
        with pytest.raises(ValueError, match="row 0 starts 4 bytes past a multiple of 16"):
            call()
