"""What evaluations and checkpoints add to a round of 10,000 clients.

    python tests/benchmarks/population.py [--passes 5] [--clients 10000] [--evaluated N]

CPU time of the process tree for a round of W5 (100 participants), one torch thread. Each side has a
process of its own; they take turns, and ratios are taken within a pass. The exit status is 1 if the
median of a ratio is above 3.
"""

import argparse
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

# Before torch is imported here or in a process: the sides are compared at one thread.
os.environ["OMP_NUM_THREADS"] = "1"

from figures import Figure
from workers import cpu_seconds
from workloads import BATCH_SIZE, LEARNING_RATE, SEED, WORKLOADS, Workload

TARGET, ROUNDS, WARM_UP = 3.0, 4, 2


@dataclass(frozen=True)
class Side:
    """One way to run the rounds.

    Attributes:
        stateful: clients keep their rows (LGFedAvg), or not (FedAvg).
        evaluates: the default evaluation follows every round.
        saves: a checkpoint follows every round.
        clients: registered.
        evaluated: clients in an evaluation; None for the default.
    """

    stateful: bool
    evaluates: bool = False
    saves: bool = False
    clients: int = 10_000
    evaluated: int | None = None


class Rounds:
    """A process that runs rounds on command."""

    def __init__(self, side: Side) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, side))
        self._process.start()
        theirs.close()
        self._pipe.recv()  # ready

    def seconds(self, rounds: int) -> float:
        """CPU seconds of one of so many rounds."""
        self._pipe.send(rounds)
        return float(self._pipe.recv()) / rounds

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _run(pipe: Connection, side: Side) -> None:
    from federated import Pace

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    start = 0.0

    def between() -> int | None:
        nonlocal start
        pipe.send(cpu_seconds() - start)
        rounds: int | None = pipe.recv()
        start = cpu_seconds()
        return rounds

    with tempfile.TemporaryDirectory() as folder:
        trainer, federation, data = _build(side, folder, Pace(between))
        trainer.fit(federation, datamodule=data)


def _build(side: Side, folder: str, callback: Any) -> tuple[Any, Any, Any]:
    import torch
    from federated import ENDLESS, Pool, Windows

    from lightfed.algorithms.fedavg import FedAvg
    from lightfed.algorithms.lgfedavg import LGFedAvg
    from lightfed.data.datamodule import FederatedDataModule
    from lightfed.data.datasets.dataset import Samples
    from lightfed.engine.federation import Federation
    from lightfed.engine.trainer import FederatedTrainer
    from lightfed.local.client_group import ClientGroup

    class Tested(Pool):
        """As many test samples as training samples."""

        def load(self, split: str) -> Samples:
            return Samples(*workload.samples(split, workload.pool))

    workload: Workload = replace(WORKLOADS["W5"], clients=side.clients)
    federation = Federation(
        LGFedAvg(global_layers=1) if side.stateful else FedAvg(),
        [ClientGroup(workload.clients, workload.network)],
        optimizer=partial(torch.optim.SGD, lr=LEARNING_RATE),
        clients_per_round=workload.per_round,
        eval_clients=side.evaluated,
        export=(),
        seed=SEED,
    )
    data = FederatedDataModule(Tested(workload), Windows(workload), batch_size=BATCH_SIZE)
    trainer = FederatedTrainer(
        name="population",
        max_epochs=ENDLESS,
        accelerator="cpu",
        callbacks=callback,
        limit_val_batches=1.0 if side.evaluates else 0,
        enable_checkpointing=side.saves,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    return trainer, federation, data


def main(argv: list[str] | None = None) -> int:
    """Print what each side takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=5, help="turns of each side")
    parser.add_argument("--clients", type=int, default=10_000, help="registered clients")
    parser.add_argument("--evaluated", type=int, help="clients in an evaluation")
    options = parser.parse_args(argv)
    side = partial(Side, clients=options.clients, evaluated=options.evaluated)
    sides = {
        "round": side(stateful=False),
        "round and evaluation": side(stateful=False, evaluates=True),
        "stateful round": side(stateful=True),
        "stateful round and evaluation": side(stateful=True, evaluates=True),
        "stateful round and checkpoint": side(stateful=True, saves=True),
    }
    workers = {name: Rounds(given) for name, given in sides.items()}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.passes + 1):
        for name in sorted(workers, reverse=number % 2 == 1):
            seconds = workers[name].seconds(ROUNDS if number else WARM_UP)
            if number:
                taken[name].append(seconds)
    for worker in workers.values():
        worker.close()
    missed = False
    for name, given in sides.items():
        alone = "stateful round" if given.stateful else "round"
        print(f"{name:30} {1e3 * statistics.median(taken[name]):8.1f} ms", end="")
        if name == alone:
            print()
            continue
        figure = Figure(taken[alone], taken[name], TARGET)
        missed |= not figure.met
        print(f"   {figure.text()}", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
