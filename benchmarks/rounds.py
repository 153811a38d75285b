"""What a round of lightfed costs, against bare PyTorch loops that do the same work.

    python benchmarks/rounds.py [--workloads W1,W5] [--passes 10] [--loaded] [--device cuda]

CPU time of the process tree for a round, one torch thread; with `--device cuda` the time until the
card is done. Each side has a process of its own; they take turns, and a ratio is taken within a
pass, so that a busy machine slows both. The sides:

    loop      one client after the other, foreach copies, a new torch.optim.SGD a client
    tuned     the fastest such loop known: no optimizer, channels_last, memory kept
    batched   all clients of an architecture at once: grouped convolutions, baddbmm
    lightfed  the public interface, with its hooks, log and run folder

On a card, or with `--packs`, there are three sides more:

    packs32     lightfed, 32 clients side by side
    packs128    lightfed, 128 clients side by side
    sequential  lightfed, one client after the other

All sides train the same participants on the same batches; the loops get them before the clock
starts. So their losses are equal but for rounding. DisPFL's are compared after the warm-up:
rounding decides which of two nearly equal gradients grows a weight, and after a dozen rounds the
masks are others, with as many weights. The exit status is 1 if a loss differs from lightfed's by
more than 5 % of what was learned or of what is left, if nothing was learned, or if a median is
above its goal. `--loaded` keeps every core busy with another process.
"""

import argparse
import os
import sys

# Before torch is imported here or in a worker: the sides are compared at one thread.
os.environ["OMP_NUM_THREADS"] = "1"

from figures import Figure, busy, machine, spread
from peers import MEASURED
from workers import Side, Worker
from workloads import CARD, WORKLOADS, Workload

SIDES: tuple[Side, ...] = ("loop", "tuned", "batched", "lightfed")
PACKS: tuple[Side, ...] = (*SIDES, "packs32", "packs128", "sequential")
WARM_UP = 2
TOLERANCE = 0.05


def compare(
    workload: Workload,
    *,
    passes: int,
    device: str = "cpu",
    packs: bool = False,
    limit: float | None = None,
) -> bool:
    """Let the sides take turns and print what they took; whether losses and goals are as wanted.

    Args:
        workload: what is trained.
        passes: measurements of every side.
        device: cpu or cuda.
        packs: measure packs of fixed sizes too, as on a card.
        limit: seconds in which all measurements should end, with fewer rounds each; None for none.
    """
    print(f"\n{workload.name}  {workload.title}", flush=True)
    sides = PACKS if packs or device != "cpu" else SIDES
    workers = {side: Worker(side, workload, device) for side in sides}
    seconds: dict[Side, list[float]] = {side: [] for side in sides}
    try:
        for worker in workers.values():
            worker.ready()
        start = workers["lightfed"].loss()
        round_of_all = 0.0
        for side, worker in workers.items():
            taken = worker.seconds(WARM_UP)
            round_of_all += taken
            if limit is not None:
                print(f"    {side:10} warmed up, {1e3 * taken:.1f} ms a round", flush=True)
        rounds = rounds_in(limit, workload.rounds, passes * round_of_all)
        early = {side: worker.loss() for side, worker in workers.items()}
        for number in range(passes):
            # Every side is the first in some passes.
            turn = number % len(sides)
            for side in sides[turn:] + sides[:turn]:
                seconds[side].append(workers[side].seconds(rounds))
        losses = {side: worker.loss() for side, worker in workers.items()}
        memory = workers["lightfed"].memory()
    finally:
        for worker in workers.values():
            worker.close()
    for side, times in seconds.items():
        milliseconds = spread([1e3 * value for value in times], digits=1)
        print(f"    {side:10} {milliseconds:26} ms a round, loss {start:.4f} -> {losses[side]:.4f}")
    met = True
    for side in [side for side in sides if side != "lightfed"]:
        goal = workload.goal if side == "loop" and device == "cpu" else None
        figure = Figure(seconds[side], seconds["lightfed"], goal)
        print(f"    lightfed / {side:10} {figure.text()}")
        met = met and figure.met
    print(f"    lightfed holds {memory / 1e6:.0f} MB without libraries")
    for peer, ratio in MEASURED.get(workload.name, {}).items():
        print(f"    measured elsewhere: {peer} {ratio:g}")
    equal = learned_alike(start, early if workload.method == "DisPFL" else losses)
    print("    losses: " + ("equal" if equal else "DIFFERENT WORK"), flush=True)
    return met and equal


def rounds_in(limit: float | None, most: int, seconds: float) -> int:
    """The rounds of a measurement, the same on all sides, as their losses are compared.

    Args:
        limit: seconds of all measurements; None for no limit.
        most: the rounds without a limit.
        seconds: what all measurements would take with one round each.
    """
    if limit is None:
        return most
    return max(1, min(most, int(limit / seconds)))


def learned_alike(start: float, losses: dict[Side, float]) -> bool:
    """Whether the loss has fallen, and as much on every side."""
    fall = start - losses["lightfed"]
    apart = max(abs(loss - losses["lightfed"]) for loss in losses.values())
    return fall > 0 and apart <= TOLERANCE * min(fall, losses["lightfed"])


def main(argv: list[str] | None = None) -> int:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", type=workloads, default=list(WORKLOADS.values()))
    parser.add_argument("--passes", type=int, default=10, help="measurements of every side")
    parser.add_argument("--loaded", action="store_true", help="keep every core busy meanwhile")
    parser.add_argument("--packs", action="store_true", help="measure packs of 32 and 128 too")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--limit", type=float, help="seconds of a workload's measurements, about")
    options = parser.parse_args(argv)
    if options.passes < 1:
        parser.error(f"--passes: {options.passes}; give at least 1")
    with busy(options.loaded):
        print(machine())
        good = [
            compare(
                workload,
                passes=options.passes,
                device=options.device,
                packs=options.packs,
                limit=options.limit,
            )
            for workload in options.workloads
        ]
        print(f"\n{machine()}")
    return 0 if all(good) else 1


def workloads(text: str) -> list[Workload]:
    """The workloads of a list of names, such as `W1,W5`.

    Raises:
        argparse.ArgumentTypeError: there is no such workload.
    """
    known = WORKLOADS | CARD
    names = text.split(",")
    for name in names:
        if name not in known:
            choices = ", ".join(known)
            raise argparse.ArgumentTypeError(f"no workload {name!r}; choose of {choices}")
    return [known[name] for name in names]


if __name__ == "__main__":
    sys.exit(main())
