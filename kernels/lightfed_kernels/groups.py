"""Groups of clients that share ranges of columns (FlexiFed).

If rows have their layers in the same order, a common prefix is the same range of columns in every
client. So a group of FlexiFed (a node of Max-Common's trie) is a job: a list of members and a
range of columns. All jobs take one launch.
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

Job = tuple[Sequence[int], int, int]


@dataclass(frozen=True, eq=False)
class Groups:
    """Jobs (members, start, stop): clients that share columns. Made by `build`, which checks.

    Attributes:
        jobs: (J, 5) int64: start, stop, begin and end in `members`, first column in packed sums.
        members: (M,) int64, rows.
        tiles: (tiles,) int32, the job of every program; on the device of the rows.
        tile: columns of a program.
        sizes: length of every row.
        columns: of all jobs, the length of packed sums.
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
        """Check jobs and lay their sums out back to back, in the given order.

        Args:
            jobs: (members, start, stop): the rows `members` share the columns from start to stop,
                multiples of 32. Ranks that add sums up have the same ranges in the same order,
                each with the members that it holds, which may be none.
            sizes: length P of every row; they may differ.
            device: of the rows.

        Raises:
            ValueError: names the job, what was found and what is allowed.
        """
        table: list[tuple[int, int, int, int, int]] = []
        members: list[int] = []
        columns = 0
        for job, (chosen, start, stop) in enumerate(jobs):
            _check_job(job, chosen, start, stop, sizes)
            begin = len(members)
            members.extend(int(member) for member in chosen)
            table.append((int(start), int(stop), begin, len(members), columns))
            columns += stop - start
        _check_disjoint(jobs)
        counts = [-(-(stop - start) // TILE) for start, stop, *_ in table]
        tiles = np.repeat(np.arange(len(table), dtype=np.int32), counts)
        return cls(
            torch.tensor(table, dtype=torch.int64).reshape(-1, 5),
            torch.tensor(members, dtype=torch.int64),
            torch.from_numpy(tiles).to(device),
            TILE,
            tuple(int(size) for size in sizes),
            columns,
        )


def _check_job(
    job: int, members: Sequence[int], start: int, stop: int, sizes: Sequence[int]
) -> None:
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
    """Check that no column of a row is in two jobs, because their order would matter."""
    ranges: dict[int, list[tuple[int, int, int]]] = {}
    for job, (members, start, stop) in enumerate(jobs):
        for member in members:
            ranges.setdefault(int(member), []).append((start, stop, job))
    for member, given in ranges.items():
        given.sort()
        for (_, stop, one), (start, _, other) in pairwise(given):
            if start < stop:
                found = f"jobs {min(one, other)} and {max(one, other)}"
                raise ValueError(f"{found}: both have column {start} of row {member}")
