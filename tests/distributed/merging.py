"""Merges on ranks that talk over gloo: `python -m tests.distributed.merging RANKS ...`.

Jobs of so many ranks merge rows of odd sizes. The exit status is 1 if a rank's row has
other bits than that of one rank alone, padding and uncovered elements included, or has sent other
bytes than it should have.
"""

import sys
from functools import partial

import torch
import torch.distributed as dist
from lightfed_kernels import Layout
from torch import Tensor

from lightfed.aggregation.coverage import Coverage
from lightfed.distributed.collectives import Ranks
from lightfed.testing.ranks import start_job, wait

WEIGHTS = [3.0, 0.0, 5.0, 2.0]


def _layout(width: int, hidden: int) -> Layout:
    """Rows of 7 and more words of 32 elements, whose tensors end anywhere in a word."""
    return Layout.build([("w", (hidden, 5)), ("head", (3, width, 3)), ("b", (3,)), ("one", ())])


def _row(layout: Layout, seed: int) -> Tensor:
    values = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))
    return values * layout.live()


def check(ranks: Ranks, hidden: int) -> None:
    """Merge four clients, all of them on the first two ranks, and compare with one rank."""
    wide, narrow = _layout(17, hidden), _layout(6, hidden - 2)
    coverage = Coverage.build(wide, [wide, narrow], label_rows=["head", "b"])
    # Wide clients with label 0 alone, or of weight 0: elements of other labels are uncovered.
    sources, labels = [0, 0, 1, 1], [[0], None, [0, 2], [0]]
    rows = [_row((wide, narrow)[source], k) for k, source in enumerate(sources)]
    mine = [k for k in range(4) if k % min(2, ranks.world) == ranks.rank]
    old = _row(wide, 9) + 7.0 * ~wide.live()
    alone, found = old.clone(), old.clone()
    how = {"weights": WEIGHTS, "labels": labels}
    coverage.merge_(alone, sources, range(4), rows, **how)  # type: ignore[arg-type]
    here = [rows[k] for k in mine]
    coverage.merge_(found, sources, mine, here, ranks=ranks, **how)  # type: ignore[arg-type]
    assert torch.equal(found, alone), f"{hidden}, rank {ranks.rank} of {ranks.world}"
    unchanged = wide.views(found == old)
    assert unchanged["head"][1].all()
    assert not unchanged["head"][0].any()
    sent = sum(ranks.gather([ranks.take_wire_bytes()]))
    assert sent == 16 * (ranks.world - 1) * wide.size, sent


def check_alike(ranks: Ranks, hidden: int) -> None:
    """Likewise with four clients of one kind, as a matrix and one by one."""
    layout = _layout(6, hidden)
    coverage = Coverage.build(layout, [layout])
    rows = torch.stack([_row(layout, k) for k in range(4)])
    mine = [k for k in range(4) if k % min(2, ranks.world) == ranks.rank]
    single, alone, found = (torch.full((layout.size,), 7.0) for _ in range(3))
    how = {"weights": [3.0, 1.0, 5.0, 2.0]}
    coverage.merge_(single, [0] * 4, range(4), [*rows], **how)  # type: ignore[arg-type]
    coverage.merge_(alone, [0] * 4, range(4), rows, **how)  # type: ignore[arg-type]
    block = rows[mine] if mine else []
    coverage.merge_(found, [0] * 4, mine, block, ranks=ranks, **how)  # type: ignore[arg-type]
    ranks.take_wire_bytes()
    assert torch.equal(alone, single)
    assert torch.equal(found, alone), f"{hidden}, rank {ranks.rank} of {ranks.world}"


def _rank(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    ranks = Ranks(torch.device("cpu"))
    for hidden in (5, 13, 103):
        check(ranks, hidden)
        check_alike(ranks, hidden)


if __name__ == "__main__":
    for world in map(int, sys.argv[1:]):
        if not wait(start_job(world, partial(_rank, world=world))):
            sys.exit(1)
