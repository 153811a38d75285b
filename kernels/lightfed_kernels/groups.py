"""Groups of clients that share ranges of columns (FlexiFed).

If rows have their layers in the same order, a common prefix is the same range of columns in every
client. So a group of FlexiFed, a node of Max-Common's trie, is a job: a list of members and a range
of columns. All jobs take one launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightfed_kernels.layout import ALIGNMENT

# Columns of a job that one program owns.
TILE = 1024

# Members, first column, and the column behind the last.
Job = tuple[Sequence[int], int, int]


@dataclass(frozen=True, eq=False)
class Groups:
    """Jobs (members, start, stop): clients that share columns. They are made by `build`.

    Attributes:
        jobs: (J, 5) int64: start, stop, begin and end in `members`, first column in packed sums.
        members: (M,) int64, the rows of all jobs' members, job after job.
        tiles: (tiles,) int32, the job of every program; on the device of the rows.
        tile: The number of columns of a program.
        sizes: The length of every row.
        columns: The number of columns of all jobs, which is the length of packed sums.
    """

    jobs: Tensor
    members: Tensor
    tiles: Tensor
    tile: int
    sizes: tuple[int, ...]
    columns: int

    @classmethod
    def build(
        cls, jobs: Sequence[Job], sizes: Sequence[int], *, device: torch.device | str = "cpu"
    ) -> "Groups":
        """Check jobs, and lay their sums out back to back, in the given order.

        Args:
            jobs: (members, start, stop): the rows `members` share the columns from start to stop,
                multiples of 32. Ranks that add sums up have the same ranges in the same order, each
                with the members that it holds, which may be none.
            sizes: The length P of every row; they may differ.
            device: The device of the rows.

        Raises:
            ValueError: A job does not fit; names the job, what was found and what is allowed.
        """
        table: list[tuple[int, int, int, int, int]] = []
        all_members: list[int] = []
        programs: list[int] = []
        columns = 0
        for job, (members, start, stop) in enumerate(jobs):
            _check_job(job, members, start, stop, sizes)
            begin = len(all_members)
            all_members.extend(int(member) for member in members)
            table.append((int(start), int(stop), begin, len(all_members), columns))
            programs.append(-(-(int(stop) - int(start)) // TILE))
            columns += stop - start
        _check_disjoint(jobs)

        tiles = np.repeat(np.arange(len(table), dtype=np.int32), programs)
        return cls(
            jobs=torch.tensor(table, dtype=torch.int64).reshape(-1, 5),
            members=torch.tensor(all_members, dtype=torch.int64),
            tiles=torch.from_numpy(tiles).to(device),
            tile=TILE,
            sizes=tuple(int(size) for size in sizes),
            columns=columns,
        )


def _check_job(
    job: int, members: Sequence[int], start: int, stop: int, sizes: Sequence[int]
) -> None:
    """Refuse a job whose columns or members do not fit."""
    found = f"job {job}: columns {start} to {stop}"
    if not 0 <= start < stop:
        raise ValueError(f"{found}; 0 <= start < stop is needed")
    if start % ALIGNMENT or stop % ALIGNMENT:
        raise ValueError(f"{found}; jobs are cut at multiples of {ALIGNMENT}")
    seen: set[int] = set()
    for member in members:
        if not 0 <= member < len(sizes):
            raise ValueError(f"job {job}: member {member} out of range 0 .. {len(sizes) - 1}")
        if member in seen:
            raise ValueError(f"job {job}: member {member} occurs twice")
        if stop > sizes[member]:
            raise ValueError(f"{found}; row {member} has {sizes[member]} elements")
        seen.add(member)


def _check_disjoint(jobs: Sequence[Job]) -> None:
    """Refuse two jobs with the same column of a row, because their order would matter."""
    ranges_of_member: dict[int, list[tuple[int, int, int]]] = {}
    for job, (members, start, stop) in enumerate(jobs):
        for member in members:
            ranges_of_member.setdefault(int(member), []).append((start, stop, job))

    for member, ranges in ranges_of_member.items():
        ranges.sort()
        for (_, stop, job), (start, _, next_job) in pairwise(ranges):
            if start < stop:
                found = f"jobs {min(job, next_job)} and {max(job, next_job)}"
                raise ValueError(f"{found}: both have column {start} of row {member}")
