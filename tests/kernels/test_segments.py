"""The tables of the tensors of a row, and the number of ones of every tensor."""

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightfed_kernels import Entry, Layout
from lightfed_kernels.masks import pack_mask, unpack_mask
from lightfed_kernels.reference import select as reference
from lightfed_kernels.segments import TILE, Segments, _count_per_tensor, count_per_tensor

Shape = tuple[int, ...]

shapes = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=6)


def layout_of(*shapes: Shape) -> Layout:
    return Layout.build((f"t{i}", shape) for i, shape in enumerate(shapes))


def random_mask(layout: Layout, density: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(layout.size, generator=generator) < density) & layout.live()


@given(shapes)
@example([])
@example([(0,), (1,), (31,), (32,), (33,), (0, 5)])
@example([(TILE - 1,), (TILE,), (TILE + 1,), (3 * TILE + 40,)])
def test_tiles_cover_every_word_of_a_row_once_and_no_two_tensors(shapes: list[Shape]) -> None:
    layout = layout_of(*shapes)
    segments = Segments.build(layout)
    owner = np.full(layout.size // 32, -1)
    elements = [0] * len(segments)
    for tile, (tensor, word, length, first) in enumerate(segments.tiles.tolist()):
        assert 0 < length <= TILE
        words = slice(word, word + -(-length // 32))
        assert (owner[words] == -1).all()
        owner[words] = tensor
        # Tiles of a tensor follow each other, so its elements are in the order of the tiles.
        assert segments.tiles[first, 0] == tensor
        assert first == tile or segments.tiles[tile - 1, 0] == tensor
        assert word * 32 == layout.entries[tensor].offset + elements[tensor]
        elements[tensor] += length
    assert (owner >= 0).all()
    assert elements == [prod(shape) for shape in shapes] == segments.bounds[:, 1].tolist()
    assert segments.bounds[:, 0].tolist() == [entry.offset for entry in layout]
    assert len(segments) == len(shapes)
    assert segments.size == layout.size


@given(shapes)
@example([])
@example([(1,), (31,), (32,), (63,)])
def test_live_words_are_the_mask_of_what_is_not_padding(shapes: list[Shape]) -> None:
    layout = layout_of(*shapes)
    assert torch.equal(unpack_mask(Segments.build(layout).live), layout.live())


def test_tables_are_copied_to_a_device_once(device: torch.device) -> None:
    segments = Segments.build(layout_of((40,), (7,)), device=device)
    words = torch.empty(0, device=device)
    assert segments.tiles_on(words.device) is segments.tiles_on(words.device)
    assert segments.tiles_on(words.device).device == words.device
    assert torch.equal(segments.live_on(words.device).cpu(), segments.live)


@settings(max_examples=6)
@given(shapes, st.sampled_from([0.0, 0.3, 1.0]))
@example([], 0.5)
@example([(0,)], 0.5)
@example([(0,), (1,), (0,), (33,), (2 * TILE + 45,), (0,)], 0.5)
def test_counts_the_ones_of_every_tensor(
    device: torch.device, shapes: list[Shape], density: float
) -> None:
    layout = layout_of(*shapes)
    mask = random_mask(layout, density)
    counts = count_per_tensor(pack_mask(mask).to(device), Segments.build(layout))
    assert counts.dtype == torch.int64
    assert counts.device.type == device.type
    assert counts.tolist() == reference.count_per_tensor(mask, layout)
    rows = torch.stack([pack_mask(mask), torch.zeros_like(pack_mask(mask)), pack_mask(mask)])
    expected = torch.stack([counts, torch.zeros_like(counts), counts])
    assert torch.equal(count_per_tensor(rows.to(device), Segments.build(layout)), expected)


def test_counts_write_one_number_a_tensor_whatever_was_there(device: torch.device) -> None:
    layout = layout_of((40,), (0,), (7,))
    segments = Segments.build(layout, device=device)
    mask = random_mask(layout, 0.5)
    buffer = torch.full((7,), -77, device=device)
    words = pack_mask(mask).to(device)
    _count_per_tensor(buffer[2:5], words, segments.bounds, segments.tiles_on(words.device))
    assert buffer[2:5].tolist() == reference.count_per_tensor(mask, layout)
    assert buffer[[0, 1, 5, 6]].tolist() == [-77] * 4


def test_bits_in_padding_are_refused_on_the_cpu() -> None:
    segments = Segments.build(layout_of((40,), (32,), (7,)))
    words = segments.live.clone()
    words[1] |= (1 << 31) | (1 << 8)
    words[3] |= 1 << 7
    message = r"words: 3 bits are set in padding, the first at element 40; masks are 0 where"
    with pytest.raises(ValueError, match=message):
        count_per_tensor(words, segments)
    with pytest.raises(ValueError, match=message):
        count_per_tensor(torch.stack([segments.live, words]), segments)


@pytest.mark.gpu
def test_bits_in_padding_are_refused_on_a_gpu_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = Segments.build(layout_of((40,)), device="cuda")
    words = torch.full((2,), -1, dtype=torch.int32, device="cuda")
    assert count_per_tensor(words, segments).tolist() == [64]
    monkeypatch.setenv("LIGHTFED_KERNELS_CHECK", "1")
    with pytest.raises(ValueError, match="words: 24 bits are set in padding"):
        count_per_tensor(words, segments)


def test_a_mask_of_another_form_is_refused() -> None:
    segments = Segments.build(layout_of((40,)))
    with pytest.raises(ValueError, match="words: 3 dimensions"):
        count_per_tensor(segments.live[None, None], segments)
    with pytest.raises(ValueError, match="words: 1 words; 2 are needed"):
        count_per_tensor(segments.live[:1], segments)
    with pytest.raises(TypeError, match="words: int64"):
        count_per_tensor(segments.live.long(), segments)


def test_a_layout_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="layout: "):
        Segments.build(Layout((Entry("a", (40,), 0), Entry("b", (1,), 96)), 128))
    with pytest.raises(ValueError, match="layout: "):
        Segments.build(Layout((Entry("a", (40,), 0),), 128))


def test_the_operator_is_sound_and_compiles() -> None:
    layout = layout_of((40,), (7,))
    segments = Segments.build(layout)
    words = pack_mask(random_mask(layout, 0.5))
    counts = torch.empty(2, dtype=torch.int64)
    torch.library.opcheck(
        torch.ops.lightfed.count_per_tensor.default,
        (counts, words, segments.bounds, segments.tiles),
    )
    compiled = torch.compile(count_per_tensor, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(words, segments), count_per_tensor(words, segments))
