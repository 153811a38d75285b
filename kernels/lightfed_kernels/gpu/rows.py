"""The kernel of all sums over clients: means of groups.

A program owns a tile of columns and is the only one to write there; it goes over the clients in a
fixed order. No atomics: the same bits every time, whatever the size of a tile.
"""

from collections.abc import Sequence

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from lightfed_kernels._rows import addresses, check_grid, resident
from lightfed_kernels.gpu.masks import TYPES, WIDE, on_device
from lightfed_kernels.groups import Groups

WARPS = 4


_TABLES = ["rows_ptr", "weights_ptr", "jobs_ptr", "tiles_ptr", "totals_ptr"]


@triton.jit(do_not_specialize_on_alignment=_TABLES)
def means_kernel(
    rows_ptr, weights_ptr, jobs_ptr, tiles_ptr, sums_ptr, totals_ptr, TYPE: tl.constexpr,
    ROUND: tl.constexpr, SUMS: tl.constexpr, FROM_ROWS: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """S = sum_m w_m x_m and W = sum_m w_m over the members of a job, in float64, and their use.

    S itself (SUMS), or S / W into every member.

    A program owns BLOCK columns of one job.

    Args:
        rows_ptr: (M,) addresses of the members' rows at their job's first column, job after job.
        weights_ptr: (M,) float64 w_m; all 1 if not WEIGHTED.
        jobs_ptr: (J, 5): first program, columns, begin and end of its members, place in `sums`.
        tiles_ptr: the job of every program.
        sums_ptr: S of all jobs, written if SUMS, read if not FROM_ROWS.
        totals_ptr: (J,) W, read if not FROM_ROWS.
    """
    tile = tl.program_id(0)
    job = tl.load(tiles_ptr + tile)
    about = jobs_ptr + job * 5
    base = (tile.to(tl.int64) - tl.load(about)) * BLOCK
    columns = tl.load(about + 1)
    begin, end = tl.load(about + 2).to(tl.int32), tl.load(about + 3).to(tl.int32)
    packed = tl.multiple_of(tl.load(about + 4), 32) + base
    lane = tl.arange(0, BLOCK)
    left = tl.minimum(columns - base, BLOCK).to(tl.int32)
    here = lane < tl.multiple_of(left, 32)
    if FROM_ROWS:
        total = tl.zeros([BLOCK], tl.float64)
        weight = tl.full([], 0, tl.float64)
        # Four rows are under way at once, in registers.
        for m in tl.range(begin, end, num_stages=1, loop_unroll_factor=4):
            row = tl.multiple_of(tl.load(rows_ptr + m).to(tl.pointer_type(TYPE)), 16) + base
            if WEIGHTED:
                share = tl.load(weights_ptr + m)
                weight += share
                # Rows of weight 0 are not read: a NaN times 0 is a NaN.
                there = lane < tl.multiple_of(tl.where(share > 0, left, 0), 32)
                value = tl.load(row + lane, mask=there, other=0)
                total += value.to(ROUND).to(tl.float64) * share
            else:
                total += tl.load(row + lane, mask=here, other=0).to(ROUND).to(tl.float64)
        if not WEIGHTED:
            weight = (end - begin).to(tl.float64)
    else:
        total = tl.load(sums_ptr + packed + lane, mask=here, other=0)
        weight = tl.load(totals_ptr + job)
    if SUMS:
        tl.store(sums_ptr + packed + lane, total, mask=here)
    else:
        mean = (total / weight).to(ROUND).to(TYPE)
        here = lane < tl.multiple_of(tl.where(weight > 0, left, 0), 32)
        for m in tl.range(begin, end):
            row = tl.multiple_of(tl.load(rows_ptr + m).to(tl.pointer_type(TYPE)), 16) + base
            tl.store(row + lane, mean, mask=here)


def launch_means(
    rows: Sequence[Tensor],
    groups: Groups,
    *,
    weights: Tensor | None = None,
    sums: Tensor | None = None,
    totals: Tensor | None = None,
) -> None:
    """One launch for all jobs: into `sums` if only they are given, else into the rows.

    Without `totals` the sums are made of the rows, else read.

    Args:
        weights: (clients,) float64 on the host, None for 1.
        sums: packed, read or written.
        totals: (J,) float64 on the host.
    """
    like = rows[0]
    table, members, tile = groups.jobs.numpy(), groups.members, groups.tile
    counts = -(-(table[:, 1] - table[:, 0]) // tile)
    programs = int(counts.sum())
    check_grid("rows", programs)
    if programs == 0:
        return
    places = addresses("rows", rows)[members.numpy()]
    places += np.repeat(table[:, 0], table[:, 3] - table[:, 2]) * like.element_size()
    about = table.copy()
    about[:, 1] -= about[:, 0]
    about[:, 0] = np.cumsum(counts) - counts
    device = like.device
    # One table for both.
    moved = resident(np.concatenate([about.reshape(-1), places]), device)
    shares = None if weights is None else weights[members]
    with on_device(like):
        means_kernel[(programs,)](
            moved[about.size :],
            moved if shares is None else shares.to(device, non_blocking=True),
            moved,
            groups.tiles,
            moved if sums is None else sums,
            moved if totals is None else totals.to(device, non_blocking=True),
            TYPE=TYPES[like.dtype],
            ROUND=WIDE[like.dtype],
            SUMS=sums is not None and totals is None,
            FROM_ROWS=totals is None,
            WEIGHTED=shares is not None,
            BLOCK=tile,
            num_warps=WARPS,
            # No fused multiply-add: the bits are those of the torch path.
            enable_fp_fusion=False,
        )
