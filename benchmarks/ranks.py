"""The same rounds on one rank and on two: wall time, and CPU time of the busier rank.

    python benchmarks/ranks.py [--workloads W1,W2,W5] [--passes 5] [--rounds 10]

Jobs of one and of two ranks take turns, one torch thread a rank. Wall time says something only if
two cores are idle; the goal is a speed-up of 1.9. Cores share caches, memory and clock. So a third
job takes its turn: two of one rank side by side, of which two ranks can reach the speed at most.
CPU time does not see a busy machine, nor a rank that waits: the time of one rank over that of the
busier of two bounds what two idle cores gain.
"""

import argparse
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from federated import Pace, build
from figures import Figure, machine, spread
from rounds import WARM_UP, workloads
from workers import cpu_seconds
from workloads import WORKLOADS, Workload

from lightfed.testing.ranks import start_job, wait

GOAL = 1 / 1.9


@dataclass(frozen=True)
class Cost:
    """Seconds of one round: wall, CPU of the busier rank, CPU of all ranks."""

    wall: float
    busier: float
    total: float


def run(workload: Workload, ranks: int, *, rounds: int, jobs: int = 1) -> Cost:
    """Run jobs of so many ranks side by side.

    Raises:
        RuntimeError: a rank failed.
    """
    meeting = multiprocessing.get_context("fork").Barrier(ranks * jobs)
    with tempfile.TemporaryDirectory() as top:
        folders = [Path(top, str(job)) for job in range(jobs)]
        started = []
        for folder in folders:
            folder.mkdir()
            work = partial(_rank, workload, ranks, folder, rounds, meeting)
            started.append(start_job(ranks, work))
        if not all([wait(job) for job in started]):  # noqa: C419 - every one of them
            raise RuntimeError(f"{workload.name} failed on {ranks} ranks")
        files = [folder / f"{rank}.json" for folder in folders for rank in range(ranks)]
        walls, busy = zip(*(json.loads(file.read_text()) for file in files), strict=True)
    return Cost(max(walls) / rounds, max(busy) / rounds, sum(busy) / rounds)


def _rank(
    workload: Workload, ranks: int, folder: Path, rounds: int, meeting: Barrier, rank: int
) -> None:
    """Warm up, time the rounds from when all are ready, write wall and CPU seconds."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    times: list[tuple[float, float]] = []

    def between() -> int | None:
        if len(times) == 1:
            meeting.wait()
        times.append((time.perf_counter(), cpu_seconds()))
        return (WARM_UP, rounds, None)[len(times) - 1]

    trainer, federation, data = build(workload, str(folder), Pace(between), ranks=ranks)
    trainer.fit(federation, datamodule=data)
    _, first, last = times
    (folder / f"{rank}.json").write_text(json.dumps([last[0] - first[0], last[1] - first[1]]))


def compare(workload: Workload, *, passes: int, rounds: int) -> None:
    """Let both take turns and print what they took."""
    one: list[Cost] = []
    two: list[Cost] = []
    apart: list[Cost] = []
    for number in range(passes):
        turns = [(1, 1, one), (2, 1, two), (1, 2, apart)]
        for ranks, jobs, costs in turns if number % 2 == 0 else turns[::-1]:
            costs.append(run(workload, ranks, rounds=rounds, jobs=jobs))
    print(f"\n{workload.name}  {workload.title}")
    walls = Figure([c.wall for c in one], [c.wall for c in two], GOAL)
    shares = Figure([c.busier for c in one], [c.busier for c in two])
    totals = Figure([c.total for c in one], [c.total for c in two])
    for name, figure in (("wall", walls), ("CPU, busier", shares), ("CPU, both", totals)):
        low = spread([1e3 * value for value in figure.baseline], digits=1)
        high = spread([1e3 * value for value in figure.measured], digits=1)
        print(f"    {name:12} {low:24} -> {high:24} ms a round, ratio {figure.text()}")
    # Two jobs do the work of two rounds.
    limits = Figure([c.wall for c in one], [c.wall / 2 for c in apart])
    reached = Figure([c.wall for c in two], [c.wall / 2 for c in apart])
    print(f"    speed-up: wall {1 / walls.median:.2f}, CPU {1 / shares.median:.2f}")
    print(
        f"    two jobs of one rank side by side: speed-up {1 / limits.median:.2f}, of which two "
        f"ranks reach {spread(reached.ratios, digits=2)}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = [WORKLOADS[name] for name in ("W1", "W2", "W5")]
    parser.add_argument("--workloads", type=workloads, default=chosen, metavar="W1,W2,..")
    parser.add_argument("--passes", type=int, default=5, help="jobs of either kind")
    parser.add_argument("--rounds", type=int, default=10, help="timed in a job")
    options = parser.parse_args(argv)
    if min(options.passes, options.rounds) < 1:
        parser.error("--passes, --rounds: give at least 1")
    torch.set_num_threads(1)
    print(machine())
    for workload in options.workloads:
        compare(workload, passes=options.passes, rounds=options.rounds)
    print(f"\n{machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
