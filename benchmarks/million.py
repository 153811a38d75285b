"""What a rank takes where very many clients are registered and few take part in a round.

    python benchmarks/million.py [--clients 1000 1000000] [--rounds 5] [--stores none device]

Rounds of W5 (MLP 32-64-10, 100 samples a client) with 1,000 participants and their evaluation,
one rank, one torch thread. FedAvg's clients keep nothing; LGFedAvg's keep their rows in each of the
stores. Every line is a process of its own. Seconds of the start are those from the first line of
the process to the first round, without imports; those of a round are medians, of the time of day
and of CPU time. `anon` is memory that files do not back, `peak` all that was resident at once, with
the pages of mapped files.
"""

import argparse
import logging
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported here or in a process

from workers import cpu_seconds

PER_ROUND = 1000
STATELESS = "none"  # in place of a store


def side(clients: int, store: str, rounds: int, saves: bool) -> None:
    """Print a line about a run."""
    import torch
    from federated import Pace, Pool, Windows
    from workloads import BATCH_SIZE, LEARNING_RATE, SEED, WORKLOADS

    from lightfed.algorithms.fedavg import FedAvg
    from lightfed.algorithms.lgfedavg import LGFedAvg
    from lightfed.data.datamodule import FederatedDataModule
    from lightfed.federation import Federation
    from lightfed.local.client_group import ClientGroup
    from lightfed.trainer import FederatedTrainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    times, used = [time.perf_counter()], [cpu_seconds()]
    peaks: list[float] = []

    def between() -> int | None:
        times.append(time.perf_counter())
        used.append(cpu_seconds())
        peaks.append(_resident("VmHWM"))
        return None if len(times) > rounds + 2 else 1

    with tempfile.TemporaryDirectory() as folder:
        workload = replace(WORKLOADS["W5"], clients=clients)
        given: dict[str, Any] = {} if store == STATELESS else {"store": store}
        federation = Federation(
            FedAvg() if store == STATELESS else LGFedAvg(global_layers=1),
            [ClientGroup(workload.clients, workload.network)],
            optimizer=partial(torch.optim.SGD, lr=LEARNING_RATE),
            clients_per_round=PER_ROUND,
            eval_clients=PER_ROUND,
            export=(),
            seed=SEED,
            **given,
        )
        data = FederatedDataModule(Pool(workload), Windows(workload), batch_size=BATCH_SIZE)
        trainer = FederatedTrainer(
            name="run",
            max_epochs=rounds + 2,
            accelerator="cpu",
            callbacks=Pace(between),
            enable_checkpointing=saves,
            enable_progress_bar=False,
            default_root_dir=folder,
        )
        trainer.fit(federation, datamodule=data)
        took, busy = ([b - a for a, b in pairwise(clock[1:])] for clock in (times, used))
        print(
            f"{clients:9,} {store:7} "
            f"start {times[1] - times[0]:6.2f} s ({used[1] - used[0]:.1f} CPU)  "
            f"round {statistics.median(took[1:]):6.3f} s ({statistics.median(busy[1:]):.3f} CPU)  "
            f"at the start: peak {peaks[0]:5.2f} GiB  "
            f"at the end: anon {_resident('RssAnon'):5.2f} peak {_resident('VmHWM'):5.2f} GiB  "
            f"{_files(Path(folder) / 'run')}",
            flush=True,
        )


def _resident(name: str) -> float:
    """GiB of this process, as Linux counts them."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 0.0 if found is None else int(found[1]) / 2**20


def _files(folder: Path) -> str:
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    largest = sorted(sizes, key=lambda path: -sizes[path])[:3]
    parts = ", ".join(f"{path.name} {sizes[path] / 1e6:.1f}" for path in largest)
    return f"run folder {sum(sizes.values()) / 1e6:.1f} MB ({parts})"


def main(argv: list[str] | None = None) -> int:
    """Print a line for every number of clients and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--stores", nargs="+", default=[STATELESS, "device"])
    parser.add_argument("--rounds", type=int, default=5, help="timed, after the first")
    parser.add_argument("--saves", action="store_true", help="a checkpoint follows every round")
    options = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    failed = 0
    for store in options.stores:
        for clients in options.clients:
            given = (clients, store, options.rounds, options.saves)
            process = context.Process(target=side, args=given)
            process.start()
            process.join()
            failed |= process.exitcode or 0
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main())
