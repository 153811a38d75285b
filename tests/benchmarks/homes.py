"""How long ranks wait for each other when clients keep their rows, and what moving them saves.

    python tests/benchmarks/homes.py [--ranks 8] [--clients 200] [--megabytes 45]
    python tests/benchmarks/homes.py --fit [--ranks 2] [--rounds 10] [--passes 3]

A simulation with lightfed's own placement. Clients are of five groups whose sessions take 10 to 1
seconds per 100 samples, while their FLOPs differ by more (HeteroFL's widths). The clients' samples
differ fivefold. The idle share of a round is the part of the ranks' time in which they wait.

    FLOPs     homes of a first start, if they stayed: nothing is measured yet
    measured  homes of every later start, from the seconds in the checkpoint, if they stayed
    moved     as it is: clients change places before a round where that pays; rows, a round
    best      every participant on the best rank in every round, as those of stateless clients are

With --fit, jobs of several ranks train clients of two groups, whose sessions differ tenfold. A
quarter of the clients takes part in a round. Jobs in which homes stay and in which they move take
turns. Seconds are those of timings.csv, means over ranks and rounds after the first two.
"""

import argparse
import csv
import logging
import os
import random
import statistics
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from federated import Pool, Windows
from figures import machine
from workloads import SEED, WORKLOADS

from lightfed.algorithms.standalone import Standalone
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.distributed.placement import exchanges, place
from lightfed.engine.federation import Federation
from lightfed.engine.trainer import FederatedTrainer
from lightfed.local.client_group import ClientGroup
from lightfed.models.networks.mlp import MLP
from lightfed.testing.ranks import start_job, wait

SECONDS = (10.0, 5.0, 2.5, 1.5, 1.0)  # of a session with 100 samples, by group
FLOPS = (256.0, 64.0, 16.0, 4.0, 1.0)
ROUNDS = 200
WIDTHS = (1024, 128)  # of the layers of the groups that are trained
TRAINED, SHARE, STEPS = 40, 0.25, 30


def idle(seconds: Mapping[int, float], homes: Mapping[int, int], ranks: int) -> float:
    """The share of the ranks' time in a round in which they wait for the last one."""
    loads = [0.0] * ranks
    for client, own in seconds.items():
        loads[homes[client]] += own
    return 1 - sum(loads) / (ranks * max(loads))


def shares(
    clients: int, ranks: int, fraction: float, size: int, draw: random.Random
) -> Sequence[float]:
    """Mean idle shares, as in the table, and the mean number of rows that move in a round."""
    samples = {client: draw.uniform(1, 5) for client in range(clients)}
    group = [client * len(SECONDS) // clients for client in range(clients)]
    seconds = {k: SECONDS[group[k]] * samples[k] for k in samples}
    first = place({k: FLOPS[group[k]] * samples[k] for k in samples}, ranks=ranks)
    later = place(seconds, ranks=ranks)
    moving, sizes = dict(later), [size] * len(SECONDS)
    found = []
    for _ in range(ROUNDS):
        chosen = draw.sample(range(clients), max(1, round(fraction * clients)))
        own = {k: seconds[k] for k in chosen}
        pairs = exchanges(own, moving, group, sizes, ranks=ranks)
        for one, other in pairs:
            moving[one], moving[other] = moving[other], moving[one]
        ways = (first, later, moving, place(own, ranks=ranks))
        found.append([*(idle(own, homes, ranks) for homes in ways), 2 * len(pairs)])
    return [statistics.mean(column) for column in zip(*found, strict=True)]


def simulate(options: argparse.Namespace) -> None:
    """Print a row for each share of the clients in a round."""
    size = int(options.megabytes * 1e6)
    ranks = options.ranks or 8
    print(f"{options.clients} clients on {ranks} ranks: idle share of a round")
    print("clients in a round   FLOPs  measured   moved    best    rows a round")
    for fraction in (1.0, 0.5, 0.1):
        draw = random.Random(7)
        first, later, moved, best, rows = shares(options.clients, ranks, fraction, size, draw)
        print(
            f"{fraction:18.0%}  {first:6.1%}  {later:8.1%}  {moved:6.1%}  {best:6.1%}  {rows:8.1f}"
        )


def _rank(rank: int, options: argparse.Namespace, folder: str, *, moves: bool) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if not moves:
        Fleet.pays_to_move = lambda *_: []  # type: ignore[method-assign]
    workload = replace(WORKLOADS["W1"], clients=TRAINED)
    groups = [
        ClientGroup(workload.clients // 2, partial(MLP, hidden=(width, width))) for width in WIDTHS
    ]
    federation = Federation(
        Standalone(),
        groups,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        fraction=SHARE,
        local_steps=STEPS,
        evaluate=(),
        export=(),
        side_by_side="off",
        seed=SEED,
    )
    trainer = FederatedTrainer(
        name="run",
        max_epochs=options.rounds + 2,
        accelerator="cpu",
        devices=options.ranks or 2,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_page=False,
        default_root_dir=folder,
    )
    trainer.fit(federation, datamodule=FederatedDataModule(Pool(workload), Windows(workload)))


def fit(options: argparse.Namespace) -> None:
    """Print the parts of a round with homes that stay and with homes that move."""
    torch.set_num_threads(1)
    print(machine())
    rounds: dict[str, list[dict[str, str]]] = {"stay": [], "move": []}
    for name in options.passes * [*rounds]:
        with tempfile.TemporaryDirectory() as folder:
            job = partial(_rank, options=options, folder=folder, moves=name == "move")
            if not wait(start_job(options.ranks or 2, job)):
                raise RuntimeError(f"a job in which homes {name} failed")
            with Path(folder, "run", "timings.csv").open(newline="") as file:
                rounds[name] += [*csv.DictReader(file)][2:]
    for name, rows in rounds.items():
        mean = {k: statistics.mean(float(row[k]) for row in rows) for k in rows[0] if k != "round"}
        moved, whole = mean.pop("moved"), sum(mean.values())
        print(
            f"homes {name}: waiting {mean['waiting']:.3f} s of {whole:.3f} s a round, "
            f"{mean['waiting'] / whole:.0%} (sessions {mean['sessions']:.3f}, merge "
            f"{mean['merge']:.3f}); {moved:.1f} rows moved"
        )
    print(machine())


def main(argv: list[str] | None = None) -> None:
    """Simulate, or train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="8, or 2 with --fit")
    parser.add_argument("--clients", type=int, default=200, help="of the simulation")
    parser.add_argument("--megabytes", type=float, default=45, help="of a row in the simulation")
    parser.add_argument("--fit", action="store_true", help="train instead of a simulation")
    parser.add_argument("--rounds", type=int, default=10, help="of a job, after the first two")
    parser.add_argument("--passes", type=int, default=3, help="jobs of either kind")
    options = parser.parse_args(argv)
    (fit if options.fit else simulate)(options)


if __name__ == "__main__":
    main()
