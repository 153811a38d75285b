"""What a round of lightfed costs, against a bare PyTorch loop that does the same work.

    python tests/benchmarks/rounds.py [--workloads W1,W2,W5] [--passes 5] [--json FILE]
    python tests/benchmarks/rounds.py --scaling     rounds and memory at 100,000 registered clients
    python tests/benchmarks/rounds.py --startup     time to the end of the first session

CPU time of the process tree for a round, after two warm-up rounds, one torch thread. Each side has
a process of its own; they take turns, and the ratio is taken within a pass, so that a busy machine
slows both. The exit status is 1 if the median of a ratio is above its target.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

# Before torch is imported here or in a worker: the sides are compared at one thread.
os.environ["OMP_NUM_THREADS"] = "1"

from figures import Figure, software
from workers import Worker
from workloads import WORKLOADS, Workload

WARM_UP = 2


def compare(workload: Workload, *, passes: int) -> Figure:
    """Let both sides take turns; print and return what they took."""
    sides = {"bare": Worker("bare", workload), "lightfed": Worker("lightfed", workload)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    try:
        for worker in sides.values():
            worker.seconds(WARM_UP)
        for number in range(passes):
            # Each side goes first in every other pass.
            for name in sorted(sides, reverse=number % 2 == 1):
                seconds[name].append(sides[name].seconds(workload.rounds))
        losses = {name: worker.loss() for name, worker in sides.items()}
    finally:
        for worker in sides.values():
            worker.close()
    figure = Figure.of(
        workload.name,
        baseline=seconds["bare"],
        measured=seconds["lightfed"],
        target=workload.target,
        extra={f"loss_{name}": loss for name, loss in losses.items()},
    )
    rounds = WARM_UP + passes * workload.rounds
    print(f"{workload.name}  {workload.title}")
    for name, times in seconds.items():
        least, median = 1e3 * min(times), 1e3 * statistics.median(times)
        print(f"    {name:9} {least:8.2f} ms a round at least, {median:8.2f} median")
    print(f"    {figure.text()}")
    print(f"    loss after {rounds} rounds: ", end="")
    print(", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()), flush=True)
    return figure


def main(argv: list[str] | None = None) -> int:
    """Measure what the arguments name."""
    options = _arguments(argv)
    figures: list[Figure] = []
    if options.scaling:
        from scaling import scaling

        figures += scaling(WORKLOADS["W5"], passes=options.passes)
    if options.startup:
        from startup import startup

        figures += startup(passes=options.passes)
    if not (options.scaling or options.startup):
        figures += [compare(WORKLOADS[name], passes=options.passes) for name in options.workloads]
    if options.json is not None:
        content = {"software": software(), "figures": [figure.row() for figure in figures]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(figure.met for figure in figures) else 1


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", type=_names, default=list(WORKLOADS), metavar="W1,W2,..")
    parser.add_argument("--passes", type=int, default=5, help="measurements of either side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--scaling", action="store_true", help="10,000 and 100,000 clients")
    parser.add_argument("--startup", action="store_true", help="time to the first session")
    options = parser.parse_args(argv)
    if options.passes < 1:
        parser.error(f"--passes: {options.passes}; give at least 1")
    return options


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        known = ", ".join(WORKLOADS)
        raise argparse.ArgumentTypeError(f"no workload {unknown[0]!r}; choose of {known}")
    return names


if __name__ == "__main__":
    sys.exit(main())
