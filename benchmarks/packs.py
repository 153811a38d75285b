"""What clients trained side by side cost, against the same clients one after the other.

    python benchmarks/packs.py [--reps 5] [--clients 20]
    python benchmarks/packs.py --memory [--clients 20]

CPU time of a round without a Trainer, one torch thread, both ways in turns. The ratio is of one
turn. The rules of `lightfed.packs.packing` come from this table. With `--memory`, the growth
of the process's peak memory in a round, one process each, and the estimate behind pack_memory.
"""

import argparse
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch.optim import SGD

from lightfed.algorithms.fedavg import FedAvg
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.local.memory import client_bytes
from lightfed.networks import MLP, Conv, SimpleCNN

sys.path.insert(0, str(Path(__file__).parents[1]))  # the root of the checkout, which has tests/
from tests.small import data_of, fleet_of, run_round

BATCH, SAMPLES = 32, 96


def narrow(rate: float, **more: Any) -> Callable[..., Any]:
    """HeteroFL's network at a width."""
    return partial(Conv, hidden=tuple(int(c * rate) for c in (64, 128, 256, 512)), **more)


MODELS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "MLP 64-64": (partial(MLP, hidden=(64,)), (64,)),
    "MLP 784-64": (partial(MLP, hidden=(64,)), (784,)),
    "MLP 784-128": (partial(MLP, hidden=(128,)), (784,)),
    "MLP 784-200-200": (partial(MLP, hidden=(200, 200)), (784,)),
    "Conv 1/16, 8x8": (narrow(1 / 16), (1, 8, 8)),
    "Conv 1/8, 8x8": (narrow(1 / 8), (1, 8, 8)),
    "Conv 1/8 GN, 8x8": (narrow(1 / 8, norm="gn"), (1, 8, 8)),
    "Conv 1/4, 8x8": (narrow(1 / 4), (1, 8, 8)),
    "SimpleCNN 8-16, 8x8": (partial(SimpleCNN, channels=(8, 16), hidden=32), (1, 8, 8)),
    "Conv 1/16, 28x28": (narrow(1 / 16), (1, 28, 28)),
    "Conv 1/16, 3x32x32": (narrow(1 / 16), (3, 32, 32)),
}


def build(model: Callable[..., Any], shape: tuple[int, ...], side: Any, clients: int) -> Fleet:
    """A federation of one group."""
    x = torch.randn(clients * SAMPLES, *shape, generator=torch.Generator().manual_seed(0))
    y = torch.arange(clients * SAMPLES) % 10
    parts = [range(k * SAMPLES, (k + 1) * SAMPLES) for k in range(clients)]
    data = data_of(x, y, parts, classes=10, batch_size=BATCH)
    optimizer = partial(SGD, lr=0.01)
    return fleet_of(
        [ClientGroup(clients, model)], FedAvg(), data, optimizer=optimizer, side_by_side=side
    )


def compare(name: str, sizes: Sequence[int], *, reps: int, clients: int) -> None:
    """Print one line of the table."""
    model, shape = MODELS[name]
    sides: list[Any] = ["off", *sizes]
    fleets = {side: build(model, shape, side, clients) for side in sides}
    taken: dict[Any, list[float]] = {side: [] for side in sides}
    for t in range(reps + 1):
        for side, fleet in fleets.items():
            start = time.process_time()
            run_round(fleet, t)
            if t:
                taken[side].append(time.process_time() - start)
    flops = fleets["off"].groups[0].flops * BATCH / 1e6
    step = 1e3 * statistics.median(taken["off"]) / clients / (SAMPLES // BATCH)
    ratios = [
        f"{statistics.median(b / a for a, b in zip(taken['off'], taken[side], strict=True)):5.2f}"
        for side in sizes
    ]
    print(f"{name:20} {flops:8.2f} MFLOPs a batch {step:7.2f} ms a step ", *ratios, flush=True)


def peak(name: str, side: Any, clients: int) -> tuple[float, float]:
    """MiB by which a round of one session a client grows the process, and the estimate of them."""
    model, shape = MODELS[name]
    fleet = build(model, shape, side, clients)
    state = fleet.groups[0]
    one = client_bytes(state.module, state, fleet.data)
    small = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_round(fleet, 0)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - small
    return grown / 1024, one * (1 if side == "off" else side) / 2**20


def compare_memory(name: str, clients: int) -> None:
    """Print one line of the table of memory."""
    context = multiprocessing.get_context("spawn")
    found = []
    for side in ("off", clients // 2, clients):
        with context.Pool(1) as pool:
            found.append(pool.apply(peak, (name, side, clients)))
            pool.close()
            pool.join()
    cells = [f"{grown:7.0f} ({estimate:5.0f})" for grown, estimate in found]
    print(f"{name:20}", *cells, flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    options = parser.parse_args()
    if options.memory:
        print("MiB (estimate): off, packs of", options.clients // 2, options.clients)
        for name in MODELS:
            compare_memory(name, options.clients)
        return
    sizes = [size for size in (3, 8, 32) if size <= options.clients]
    print("packs of", *sizes)
    for name in MODELS:
        compare(name, sizes, reps=options.reps, clients=options.clients)


if __name__ == "__main__":
    main()
