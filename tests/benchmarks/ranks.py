"""The same rounds on one rank and on two: wall time, and CPU time of the busier rank.

    python tests/benchmarks/ranks.py [--workloads W1,W2,W5] [--passes 5] [--rounds 10]

Jobs of one and of two ranks take turns, one torch thread a rank. Wall time says something only if
two cores are idle; the goal is a speed-up of 1.9. CPU time does not see a busy machine, nor a rank
that waits: the time of one rank over that of the busier of two bounds what two idle cores gain.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
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


def run(workload: Workload, ranks: int, *, rounds: int) -> Cost:
    """Run a job of so many ranks.

    Raises:
        RuntimeError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        well = wait(start_job(ranks, lambda rank: _rank(workload, rank, ranks, folder, rounds)))
        if not well:
            raise RuntimeError(f"{workload.name} failed on {ranks} ranks")
        costs = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    walls, busy = zip(*costs, strict=True)
    return Cost(max(walls) / rounds, max(busy) / rounds, sum(busy) / rounds)


def _rank(workload: Workload, rank: int, ranks: int, folder: str, rounds: int) -> None:
    """Warm up, time the rounds, write wall and CPU seconds."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    times: list[tuple[float, float]] = []

    def between() -> int | None:
        times.append((time.perf_counter(), cpu_seconds()))
        return (WARM_UP, rounds, None)[len(times) - 1]

    trainer, federation, data = build(workload, folder, Pace(between), ranks=ranks)
    trainer.fit(federation, datamodule=data)
    _, first, last = times
    Path(folder, f"{rank}.json").write_text(json.dumps([last[0] - first[0], last[1] - first[1]]))


def compare(workload: Workload, *, passes: int, rounds: int) -> None:
    """Let both take turns and print what they took."""
    one: list[Cost] = []
    two: list[Cost] = []
    for number in range(passes):
        turns = [(1, one), (2, two)]
        for ranks, costs in turns if number % 2 == 0 else turns[::-1]:
            costs.append(run(workload, ranks, rounds=rounds))
    print(f"\n{workload.name}  {workload.title}")
    walls = Figure([c.wall for c in one], [c.wall for c in two], GOAL)
    shares = Figure([c.busier for c in one], [c.busier for c in two])
    totals = Figure([c.total for c in one], [c.total for c in two])
    for name, figure in (("wall", walls), ("CPU, busier", shares), ("CPU, both", totals)):
        low = spread([1e3 * value for value in figure.baseline], digits=1)
        high = spread([1e3 * value for value in figure.measured], digits=1)
        print(f"    {name:12} {low:24} -> {high:24} ms a round, ratio {figure.text()}")
    print(f"    speed-up: wall {1 / walls.median:.2f}, CPU {1 / shares.median:.2f}", flush=True)


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
