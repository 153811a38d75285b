"""The invariants of rows that every kernel relies on."""

from math import prod

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from lightfed_kernels import ALIGNMENT, Layout

Shape = tuple[int, ...]

# Scalars and empty tensors are shapes like any other.
shapes = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=8)


def layout_of(shapes: list[Shape]) -> Layout:
    return Layout.build((f"t{i}", shape) for i, shape in enumerate(shapes))


@given(shapes)
@example([])
@example([(), (0, 3), (32,), (33,), ()])
def test_starts_and_length_are_multiples_of_32_and_nothing_is_wasted(shapes: list[Shape]) -> None:
    layout = layout_of(shapes)
    assert ALIGNMENT == 32
    expected = 0
    for entry, shape in zip(layout, shapes, strict=True):
        assert entry.offset == expected
        assert entry.numel == prod(shape)
        expected += (prod(shape) + 31) // 32 * 32
    assert layout.size == expected
    assert all(entry.offset % 32 == 0 for entry in layout)
    assert layout.numel == sum(prod(shape) for shape in shapes)


@given(shapes)
@example([(), (0, 3), (2, 2)])
def test_views_cut_a_row_into_its_tensors_without_copies(shapes: list[Shape]) -> None:
    layout = layout_of(shapes)
    row = torch.arange(layout.size, dtype=torch.float32)
    views = layout.views(row)
    assert list(views) == [f"t{i}" for i in range(len(shapes))]
    for entry, shape in zip(layout, shapes, strict=True):
        view = views[entry.name]
        assert view.shape == torch.Size(shape)
        begin = float(entry.offset)
        assert view.flatten().tolist() == [begin + i for i in range(prod(shape))]
        view.fill_(-1.0)
    assert torch.equal(row == -1.0, layout.live())


@given(shapes)
def test_live_marks_the_elements_of_tensors_and_no_padding(shapes: list[Shape]) -> None:
    layout = layout_of(shapes)
    expected = torch.zeros(layout.size, dtype=torch.bool)
    for entry in layout:
        for element in range(entry.offset, entry.offset + entry.numel):
            expected[element] = True
    assert torch.equal(layout.live(), expected)


@given(shapes)
def test_span_holds_the_first_entries_and_is_a_multiple_of_32(shapes: list[Shape]) -> None:
    layout = layout_of(shapes)
    for count in range(len(shapes) + 1):
        span = layout.span(count)
        assert span % 32 == 0
        assert span == sum((prod(shape) + 31) // 32 * 32 for shape in shapes[:count])


@pytest.mark.parametrize("clients", [(), (3,), (2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_new_rows_are_zero_padding_included(clients: Shape, dtype: torch.dtype) -> None:
    layout = layout_of([(3, 5), (), (40,)])
    rows = layout.new_row(*clients, dtype=dtype)
    assert rows.shape == (*clients, 32 + 32 + 64)
    assert rows.dtype == dtype
    assert rows.is_contiguous()
    assert not rows.any()


def test_a_name_that_occurs_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'weight' occurs twice"):
        Layout.build([("weight", (2,)), ("bias", (2,)), ("weight", (3,))])


def test_equal_tensors_make_equal_layouts() -> None:
    one, other = layout_of([(2, 3), (4,)]), layout_of([(2, 3), (4,)])
    assert one == other
    assert hash(one) == hash(other)
    assert one != layout_of([(3, 2), (4,)])
    assert one != Layout.build([("a", (2, 3)), ("t1", (4,))])
