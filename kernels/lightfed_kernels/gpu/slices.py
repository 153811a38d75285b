"""Kernels of the slice operations: one launch over the tiles of all tensors of the target.

A program owns one tile of one tensor of the target: a rectangle of rows (A x B) and columns (C). It
is the only one to write there, and goes over the clients in a fixed order. There are no atomics, so
the bits are the same every time.

In tensors with groups, with labels or of odd sizes (`rest`), elements do not move 16 bytes at a
time. Their tiles are split among several programs with one element a thread, so that a thread needs
few registers. These programs start first, because they take longest.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightfed_kernels._rows import addresses, check_grid, resident
from lightfed_kernels.gpu.masks import TYPES, on_device
from lightfed_kernels.layout import ALIGNMENT
from lightfed_kernels.slices import TILE

# What a launch of the merge does: everything (0), only the sums, or the rest of it.
SUM: tl.constexpr = tl.constexpr(1)
FINISH: tl.constexpr = tl.constexpr(2)
_MODES = {"merge": 0, "sum": 1, "finish": 2}

# Elements that fill 16 bytes.
_VECTOR = {torch.float32: 4, torch.bfloat16: 8, torch.float64: 2}


@triton.jit
def _lanes(tile_ptr, begin, LANES: tl.constexpr, FLAT: tl.constexpr, VECTOR: tl.constexpr):
    """Where LANES lanes of a tile lie in its tensor, from lane `begin` of the tile on.

    Returns:
        The tile's first row (int32) and first column (int64), and for every lane, as (LANES,) of
        int32, its row and its column counted from there.
    """
    shift = (tl.load(tile_ptr + 3) & 65535).to(tl.int32)  # log2 of the tile's columns
    row = tl.load(tile_ptr + 1).to(tl.int32)
    column = tl.load(tile_ptr + 2)
    lane = begin + tl.arange(0, LANES)
    r = lane >> shift
    q = lane & ((1 << shift) - 1)
    if FLAT:
        # Promises to the compiler, with which it moves 16 bytes at a time.
        column = tl.multiple_of(column, VECTOR)
        r = tl.max_constancy(r, VECTOR)
        q = tl.multiple_of(tl.max_contiguous(q, VECTOR), VECTOR)
    return row, column, r, q


@triton.jit
def _within(row, column, r, q, about_ptr, n_b, FLAT: tl.constexpr, VECTOR: tl.constexpr):
    """Where a tile lies in a row of the target or of a client, and which of its lanes exist there.

    Args:
        row: The tile's first row, as of _lanes; likewise the next three.
        column: Its first column.
        r: The lanes' rows.
        q: The lanes' columns.
        about_ptr: Points to offset, a, b, c: the row has the leading (a, b, c) of the tensor's axes
            at that offset.
        n_b: The size of the middle axis in the target.
        FLAT: Whether the tensor has no groups and no labels, so that n_b is 1, and all sizes are
            multiples of VECTOR, the number of elements that fill 16 bytes.

    Returns:
        An int64 scalar, the int32 places of the lanes behind it, and which lanes exist.
    """
    offset = tl.multiple_of(tl.load(about_ptr), 32)
    a = tl.load(about_ptr + 1).to(tl.int32)
    b = tl.load(about_ptr + 2)
    c = tl.load(about_ptr + 3)
    if FLAT:
        c = tl.multiple_of(c, VECTOR)

    # Within a tile of several rows all positions fit into 32 bits. In a tile of one row the rest of
    # the row may be longer, but all that matters is whether it ends in the tile.
    columns = tl.minimum(c - column, 1 << 30).to(tl.int32)
    if FLAT:
        base = offset + row * c + column
        there = tl.max_constancy((r < a - row) & (q < columns), VECTOR)
        place = tl.multiple_of(tl.max_contiguous(r * c.to(tl.int32) + q, VECTOR), VECTOR)
    else:
        # A row of A x B is i * n_b + j in the target, and i * b + j here.
        first = row // n_b
        base = offset + first * b * c + column
        inner = row - first * n_b + r
        i = inner // n_b
        j = inner - i * n_b
        there = (i < a - first) & (j < b.to(tl.int32)) & (q < columns)
        place = (i * b.to(tl.int32) + j) * c.to(tl.int32) + q
    return base, place, there


@triton.jit
def _merge_tile(
    out_ptr, partial_ptr, rows_ptr, tile_ptr, lane, tensors_ptr, n_tensors, levels_ptr, first_ptr,
    totals_ptr, words_ptr, n_words, label_totals_ptr, n_labels, weights_ptr, start, size,
    TYPE: tl.constexpr, MODE: tl.constexpr, LANES: tl.constexpr, FLAT: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Merge LANES lanes of one tile, from lane `lane` of the tile on.

    The other arguments are those of merge_kernel, and FLAT is that of _within.
    """
    tensor = tl.load(tile_ptr)
    reach = (tl.load(tile_ptr + 3) >> 16).to(tl.int32)  # how many levels have a part of the tile
    row, column, r, q = _lanes(tile_ptr, lane, LANES, FLAT, VECTOR)
    about_ptr = tensors_ptr + tensor * 5
    n_b = tl.load(about_ptr + 2).to(tl.int32)
    labelled = tl.load(about_ptr + 4) != 0
    base, place, inside = _within(row, column, r, q, about_ptr, n_b, FLAT, VECTOR)
    if MODE == FINISH:
        # Only columns that `partial` has.
        ahead = base - start.to(tl.int64) * 32
        inside = inside & (ahead + place >= 0) & (ahead + place < size)
        if FLAT:
            inside = tl.max_constancy(inside, VECTOR)
    label = 0 if FLAT else (row + r) // n_b

    sums = tl.zeros([LANES], tl.float64)
    weight = tl.zeros([LANES], tl.float64)
    if MODE != SUM:
        # A load that never happens gives both accumulators one layout. Without it the compiler
        # counts in another layout, and converts through shared memory.
        never = tl.load(out_ptr + base + place, mask=inside & (reach < 0), other=0.0)
        weight = never.to(tl.float64)

    # Levels outside and clients inside: where a tile lies in a client's row is a matter of its
    # level, so that a client costs a load, a conversion and a sum. Clients are sorted by level, so
    # the order of the sum is theirs. Four loads are under way at once, without shared memory.
    for level in range(reach):
        source_ptr = levels_ptr + (level * n_tensors + tensor) * 4
        begin, where, there = _within(row, column, r, q, source_ptr, n_b, FLAT, VECTOR)
        if MODE != FINISH:
            first = tl.load(first_ptr + level)
            last = tl.load(first_ptr + level + 1)
            for client in tl.range(first, last, num_stages=1, loop_unroll_factor=4):
                x_ptr = tl.multiple_of(tl.load(rows_ptr + client).to(tl.pointer_type(TYPE)), 16)
                x = tl.load(x_ptr + begin + where, mask=there, other=0.0)
                if TYPE == tl.bfloat16:
                    x = x.to(tl.float32)
                x = x.to(tl.float64) * tl.load(weights_ptr + client)
                if not FLAT:
                    word_ptr = words_ptr + client * n_words + (label >> 5)
                    word = tl.load(word_ptr, mask=there & labelled, other=-1)
                    x = tl.where(((word >> (label & 31)) & 1) != 0, x, 0.0)
                # Elements that are not held were loaded as 0, and the weight is finite.
                sums += x
        if MODE != SUM:
            total = tl.load(totals_ptr + level)
            if FLAT:
                weight += tl.where(there, total, 0.0)
            else:
                label_ptr = label_totals_ptr + level * n_labels + label
                of_label = tl.load(label_ptr, mask=there & labelled, other=0.0)
                weight += tl.where(there, tl.where(labelled, of_label, total), 0.0)

    if MODE == SUM:
        tl.store(partial_ptr + base + place, sums, mask=inside)
    else:
        if MODE == FINISH:
            sums = tl.load(partial_ptr + ahead + place, mask=inside, other=0)
        covered = inside & (weight > 0.0)
        if FLAT:
            covered = tl.max_constancy(covered, VECTOR)
        mean = sums / tl.where(covered, weight, 1.0)
        if TYPE == tl.bfloat16:
            mean = mean.to(tl.float32)
        tl.store(out_ptr + base + place, mean.to(TYPE), mask=covered)


@triton.jit(do_not_specialize=["n_rest", "n_tensors", "n_words", "n_labels", "start", "size"])
def merge_kernel(
    out_ptr, partial_ptr, rows_ptr, flat_ptr, rest_ptr, n_rest, tensors_ptr, n_tensors, levels_ptr,
    first_ptr, totals_ptr, words_ptr, n_words, label_totals_ptr, n_labels, weights_ptr, start,
    size, TYPE: tl.constexpr, MODE: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """out[e] = sum_m a_m c_m[e] x_m[e] / sum_m a_m c_m[e], the sum alone, or the rest of it.

    The first n_rest programs own TILE / VECTOR elements of a tile of `rest`, one a thread. Each of
    the others owns a whole tile of `flat`, VECTOR elements a thread.

    Args:
        out_ptr: (P,) the row of the target.
        partial_ptr: (P,) float64 sums of all columns for SUM, (size,) of some for FINISH.
        rows_ptr: (clients,) int64 addresses of the clients' rows, wide levels first.
        flat_ptr: (N, 4) tiles; as of SliceTable, like the next three.
        rest_ptr: (M, 4) tiles.
        n_rest: The number of programs for `rest`, M * VECTOR.
        tensors_ptr: (T, 5).
        n_tensors: T.
        levels_ptr: (L, T, 4).
        first_ptr: (L + 1,) where the clients of a level begin.
        totals_ptr: (L,) the weights of all clients of a level.
        words_ptr: (clients, n_words) the labels that a client holds.
        n_words: The words of a client's labels.
        label_totals_ptr: (L, n_labels) the weights of all clients of a level that hold a label.
        n_labels: The number of labels.
        weights_ptr: (clients,) a_m.
        start: FINISH reads sums from column 32 * start on.
        size: The number of columns that FINISH reads.
        MODE: SUM (writes partial), FINISH (reads partial), or 0 for both without partial.
    """
    program = tl.program_id(0)
    LANES: tl.constexpr = TILE // VECTOR
    if program < n_rest:
        tile_ptr = rest_ptr + (program // VECTOR).to(tl.int64) * 4
        lane = program % VECTOR * LANES
        _merge_tile(
            out_ptr, partial_ptr, rows_ptr, tile_ptr, lane, tensors_ptr, n_tensors, levels_ptr,
            first_ptr, totals_ptr, words_ptr, n_words, label_totals_ptr, n_labels,
            weights_ptr, start, size, TYPE, MODE, LANES, False, VECTOR,
        )  # fmt: skip
    else:
        tile_ptr = flat_ptr + (program - n_rest).to(tl.int64) * 4
        _merge_tile(
            out_ptr, partial_ptr, rows_ptr, tile_ptr, 0, tensors_ptr, n_tensors, levels_ptr,
            first_ptr, totals_ptr, words_ptr, n_words, label_totals_ptr, n_labels,
            weights_ptr, start, size, TYPE, MODE, TILE, True, VECTOR,
        )  # fmt: skip


@triton.jit
def _take_tile(
    row_ptr, outs_ptr, tile_ptr, lane, tensors_ptr, n_tensors, levels_ptr, first_ptr,
    TYPE: tl.constexpr, LANES: tl.constexpr, FLAT: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write LANES lanes of one tile, from lane `lane` of the tile on, to all clients that cover it.

    The other arguments are those of take_kernel, and FLAT is that of _within.
    """
    tensor = tl.load(tile_ptr)
    reach = (tl.load(tile_ptr + 3) >> 16).to(tl.int32)
    row, column, r, q = _lanes(tile_ptr, lane, LANES, FLAT, VECTOR)
    about_ptr = tensors_ptr + tensor * 5
    n_b = tl.load(about_ptr + 2).to(tl.int32)
    base, place, inside = _within(row, column, r, q, about_ptr, n_b, FLAT, VECTOR)
    x = tl.load(row_ptr + base + place, mask=inside, other=0.0)
    for level in range(reach):
        source_ptr = levels_ptr + (level * n_tensors + tensor) * 4
        begin, where, there = _within(row, column, r, q, source_ptr, n_b, FLAT, VECTOR)
        for client in range(tl.load(first_ptr + level), tl.load(first_ptr + level + 1)):
            out_ptr = tl.multiple_of(tl.load(outs_ptr + client).to(tl.pointer_type(TYPE)), 16)
            tl.store(out_ptr + begin + where, x, mask=there)


@triton.jit(do_not_specialize=["n_rest", "n_tensors"])
def take_kernel(
    row_ptr, outs_ptr, flat_ptr, rest_ptr, n_rest, tensors_ptr, n_tensors, levels_ptr, first_ptr,
    TYPE: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """x_m[s] = row[e]: a tile is read once and written to every client that covers it.

    Programs own tiles as in merge_kernel. The arguments are also as there, except for two.

    Args:
        row_ptr: (P,) the row of the target.
        outs_ptr: (clients,) int64 addresses of the clients' rows, wide levels first.
    """
    program = tl.program_id(0)
    LANES: tl.constexpr = TILE // VECTOR
    if program < n_rest:
        tile_ptr = rest_ptr + (program // VECTOR).to(tl.int64) * 4
        _take_tile(
            row_ptr, outs_ptr, tile_ptr, program % VECTOR * LANES, tensors_ptr, n_tensors,
            levels_ptr, first_ptr, TYPE, LANES, False, VECTOR,
        )  # fmt: skip
    else:
        tile_ptr = flat_ptr + (program - n_rest).to(tl.int64) * 4
        _take_tile(
            row_ptr, outs_ptr, tile_ptr, 0, tensors_ptr, n_tensors, levels_ptr, first_ptr,
            TYPE, TILE, True, VECTOR,
        )  # fmt: skip


def merge(
    mode: Literal["merge", "sum", "finish"],
    out: Tensor,
    partial: Tensor,
    rows: Sequence[Tensor],
    tiles: tuple[Tensor, Tensor],
    tables: Sequence[Tensor],
    weights: Tensor,
    *,
    start: int = 0,
) -> None:
    """Launch one of the three forms of a merge.

    Args:
        mode: "merge" makes `out` of the rows, "sum" makes `partial` of them, and "finish" makes
            `out` of `partial`.
        out: (P,) the row of the target; for "sum" any tensor of its dtype.
        partial: The sums; any tensor for "merge".
        rows: The clients' rows; none for "finish".
        tiles: The tiles `flat` and `rest`.
        tables: The tables of SliceTable and Members, as merge operators take them.
        weights: (clients,) the clients' weights; any tensor for "finish".
        start: The column at which `partial` begins for "finish".
    """
    tensors, levels, first, totals, words, label_totals = tables
    table = resident(addresses("rows", rows), tensors.device)
    addresses("out", [out, partial])  # checks that they start at multiples of 16 bytes
    programs, work, constants = _work(f"slice_{mode}{'' if mode == 'sum' else '_'}", out, tiles)
    if programs == 0:
        return
    with on_device(out):
        merge_kernel[(programs,)](
            out, partial, table, *work, tensors, tensors.shape[0], levels, first, totals,
            words, words.shape[1], label_totals, label_totals.shape[1], weights,
            start // ALIGNMENT, len(partial), MODE=_MODES[mode], **constants,
        )  # fmt: skip


def take(
    row: Tensor,
    outs: Sequence[Tensor],
    tiles: tuple[Tensor, Tensor],
    tensors: Tensor,
    levels: Tensor,
    first: Tensor,
) -> None:
    """Launch the copy of a row of the target into clients' rows.

    Args:
        row: (P,) the row of the target.
        outs: The clients' rows, wide levels first.
        tiles: The tiles `flat` and `rest`.
        tensors: (T, 5), as of SliceTable.
        levels: (L, T, 4), as of SliceTable.
        first: (L + 1,) where the clients of a level begin.
    """
    table = resident(addresses("outs", outs), tensors.device)
    addresses("row", [row])  # checks that it starts at a multiple of 16 bytes
    programs, work, constants = _work("slice_take_", row, tiles)
    if programs == 0:
        return
    with on_device(row):
        take_kernel[(programs,)](
            row, table, *work, tensors, tensors.shape[0], levels, first, **constants
        )


def _work(
    name: str, row: Tensor, tiles: tuple[Tensor, Tensor]
) -> tuple[int, tuple[Tensor, Tensor, int], dict[str, Any]]:
    """Return how a launch covers all tiles.

    Args:
        name: The name of the operation, for errors.
        row: A row, whose dtype decides how many elements move together.
        tiles: The tiles `flat` and `rest`.

    Returns:
        The number of programs, the arguments (flat, rest, n_rest), and the constants of a kernel.
    """
    flat, rest = tiles
    vector = _VECTOR[row.dtype]
    n_rest = len(rest) * vector
    programs = n_rest + len(flat)
    check_grid(name, programs)
    constants = {
        "TYPE": TYPES[row.dtype],
        "TILE": TILE,
        "VECTOR": vector,
        "num_warps": TILE // (32 * vector),  # 16 bytes a thread of a flat tile
    }
    return programs, (flat, rest, n_rest), constants
