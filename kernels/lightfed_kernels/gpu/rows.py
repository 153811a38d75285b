"""The kernel of all sums over clients: means of groups.

A program owns a tile of columns. It is the only one to write there, and goes over the clients in a
fixed order. There are no atomics, so the bits are the same every time, whatever the size of a tile.
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

# Arguments that may start anywhere: each is a part of a table.
_TABLES = ["rows_ptr", "weights_ptr", "jobs_ptr", "tiles_ptr", "totals_ptr"]


@triton.jit(do_not_specialize_on_alignment=_TABLES)
def means_kernel(
    rows_ptr, weights_ptr, jobs_ptr, tiles_ptr, sums_ptr, totals_ptr, TYPE: tl.constexpr,
    ROUND: tl.constexpr, SUMS: tl.constexpr, FROM_ROWS: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """S = sum_m w_m x_m and W = sum_m w_m over the members of a job, in float64, and their use.

    Written is S itself (SUMS), or S / W into the row of every member. A program owns BLOCK columns
    of one job.

    Args:
        rows_ptr: (M,) int64 addresses of the members' rows at the first column of their job, job
            after job.
        weights_ptr: (M,) float64 w_m; all 1 if not WEIGHTED.
        jobs_ptr: (J, 5) int64: first program, columns, begin and end of its members in `rows_ptr`,
            place in `sums_ptr`.
        tiles_ptr: (programs,) int32 the job of every program.
        sums_ptr: float64 S of all jobs, back to back; written if SUMS, read if not FROM_ROWS.
        totals_ptr: (J,) float64 W, read if not FROM_ROWS.
        TYPE: The type of the rows.
        ROUND: The type in which a mean is rounded first; float32 for bfloat16.
        SUMS: Whether to write the sums.
        FROM_ROWS: Whether to add up the rows; otherwise the sums are given.
        WEIGHTED: Whether there are weights.
        BLOCK: The number of columns.
    """
    tile = tl.program_id(0)
    job = tl.load(tiles_ptr + tile)
    about = jobs_ptr + job * 5
    base = (tile.to(tl.int64) - tl.load(about)) * BLOCK
    columns = tl.load(about + 1)
    begin = tl.load(about + 2).to(tl.int32)
    end = tl.load(about + 3).to(tl.int32)
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
    """Launch the kernel once for all jobs.

    It writes into `sums` if these are given without `totals`, and into the rows otherwise. With
    `totals` the sums are read, without them they are made of the rows.

    Args:
        rows: The clients' rows.
        groups: The jobs.
        weights: (clients,) float64 on the host; None if all weigh 1.
        sums: (groups.columns,) float64, the sums of all jobs back to back.
        totals: (J,) float64 on the host: the weights of each job's members.
    """
    like = rows[0]
    jobs = groups.jobs.numpy()
    start, stop, begin, end, _ = jobs.T
    programs_of_job = -(-(stop - start) // groups.tile)
    programs = int(programs_of_job.sum())
    check_grid("rows", programs)
    if programs == 0:
        return

    # Where every member's row has the first column of its job.
    row_addresses = addresses("rows", rows)[groups.members.numpy()]
    row_addresses += np.repeat(start, end - begin) * like.element_size()

    about = jobs.copy()
    about[:, 0] = np.cumsum(programs_of_job) - programs_of_job
    about[:, 1] = stop - start

    # One table for both, so that they are one copy to the device.
    table = resident(np.concatenate([about.reshape(-1), row_addresses]), like.device)
    member_weights = None if weights is None else weights[groups.members]
    with on_device(like):
        means_kernel[(programs,)](
            table[about.size :],
            table if member_weights is None else member_weights.to(like.device, non_blocking=True),
            table,
            groups.tiles,
            table if sums is None else sums,
            table if totals is None else totals.to(like.device, non_blocking=True),
            TYPE=TYPES[like.dtype],
            ROUND=WIDE[like.dtype],
            SUMS=sums is not None and totals is None,
            FROM_ROWS=totals is None,
            WEIGHTED=member_weights is not None,
            BLOCK=groups.tile,
            num_warps=WARPS,
            # No fused multiply-add: the bits are those of the torch path.
            enable_fp_fusion=False,
        )
