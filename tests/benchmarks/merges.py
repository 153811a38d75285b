"""Merges over several ranks: a single all-reduce of the sums against shards of the columns.

    python tests/benchmarks/merges.py [--ranks 2] [--millions 1,11,25] [--passes 9]

Both ways take turns over gloo, one torch thread a rank; a rank has two clients, of the whole width
and of half of it. Wall time of the slowest rank, CPU time of all ranks. The rows have to be equal.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from figures import Figure, machine, spread
from lightfed_kernels import Layout
from torch import Tensor

from lightfed.aggregation.coverage import Coverage
from lightfed.distributed import collectives
from lightfed.distributed.collectives import Ranks
from lightfed.testing.ranks import start_job, wait

WAYS = {"all-reduce": sys.maxsize, "shards": 0}  # elements of a row from which on it has shards
WIDTH = 1000
Times = dict[str, list[tuple[float, float]]]


def measure(ranks: Ranks, size: int, passes: int) -> Times:
    """Wall and CPU seconds of this rank in every pass, by way; a first pass is not counted.

    Raises:
        RuntimeError: the ways give different rows.
    """
    wide = Layout.build([("w", (max(1, size // WIDTH), WIDTH))])
    half = Layout.build([("w", (max(1, size // WIDTH), WIDTH // 2))])
    coverage = Coverage.build(wide, [wide, half])
    rng = torch.Generator().manual_seed(ranks.rank)
    local = [2 * ranks.rank, 2 * ranks.rank + 1]
    rows = [torch.randn(layout.size, generator=rng) for layout in (wide, half)]
    times: Times = {way: [] for way in WAYS}
    for number in range(passes + 1):
        found: list[Tensor] = []
        for way in list(WAYS)[:: 1 if number % 2 else -1]:
            vars(collectives)["SHARDED"] = WAYS[way]
            row = torch.full((wide.size,), 0.5)  # memory that is there, as a server's
            ranks.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            weights = [3.0 + k for k in range(2 * ranks.world)]
            sources = [0, 1] * ranks.world
            coverage.merge_(row, sources, local, rows, weights=weights, ranks=ranks)
            times[way].append((time.perf_counter() - wall, time.process_time() - cpu))
            found.append(row)
        if not torch.equal(*found):
            raise RuntimeError(f"{size} elements: the ways differ")
    return {way: each[1:] for way, each in times.items()}


def _rank(rank: int, world: int, sizes: list[int], passes: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    ranks = Ranks(torch.device("cpu"))
    found = {size: measure(ranks, size, passes) for size in sizes}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def report(size: int, ranks: list[Times]) -> None:
    """Print both ways, and the ratio pass by pass."""
    kinds = (("wall, slowest", max, 0), ("CPU, all", sum, 1))
    for name, over, kind in kinds:
        values = {
            way: [
                1e3 * over(each[kind] for each in one)
                for one in zip(*[r[way] for r in ranks], strict=True)
            ]
            for way in WAYS
        }
        old, new = values.values()
        print(
            f"{size:>10} elements  {name:13} {spread(old, digits=2):27} -> "
            f"{spread(new, digits=2):27} ms, ratio {Figure(old, new).text()}",
            flush=True,
        )


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--millions", default="1,11,25", help="elements of the row")
    parser.add_argument("--passes", type=int, default=9)
    options = parser.parse_args(argv)
    sizes = [round(1e6 * float(part)) for part in options.millions.split(",")]
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        if not wait(
            start_job(
                options.ranks,
                lambda rank: _rank(rank, options.ranks, sizes, options.passes, folder),
            )
        ):
            return 1
        found = [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(options.ranks)]
    for size in sizes:
        report(size, [ranks[str(size)] for ranks in found])
    print(machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
