"""What training waits for a checkpoint of clients that keep large rows, and what is written.

    python benchmarks/checkpoints.py [--clients 20] [--steps 4] [--masked] [--every 1]

Rounds of D-PSGD with ResNet-18 (11.2 million float32 a row), or of DisPFL, whose rows are sparse.
Every client changes in every round. A step is on one sample. Where a round is shorter than writing
its checkpoint, the next checkpoint waits for it in both runs. Two runs follow each other: one waits
for its files, the other writes them while the next round trains. Seconds are those of timings.csv,
means over the rounds after the first.
"""

import argparse
import csv
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from federated import Pool, Windows
from figures import machine
from workloads import SEED, WORKLOADS

from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.peers.dpsgd import DPSGD
from lightfed.algorithms.topology.topology import Ring
from lightfed.data.datamodule import FederatedDataModule
from lightfed.engine.strategy import FederatedStrategy
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.networks.cifar_resnet import ResNet18GN
from lightfed.runs import checkpoint
from lightfed.trainer import FederatedTrainer

WIDTH = 64  # of ResNet-18


@contextmanager
def files() -> Iterator[list[int]]:
    """The sizes of the files of checkpoints that the block writes."""
    sizes: list[int] = []
    write = checkpoint.write_atomically

    def noted(path: Path, content: Any) -> None:
        write(path, content)
        sizes.append(path.stat().st_size)

    checkpoint.write_atomically = noted
    try:
        yield sizes
    finally:
        checkpoint.write_atomically = write


class Waits(FederatedStrategy):
    """Training waits for every checkpoint."""

    def save_checkpoint(self, checkpoint_: Any, filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint_, filepath)


def run(options: argparse.Namespace, strategy: FederatedStrategy, folder: str) -> dict[str, float]:
    """Seconds of a round, by part."""
    workload = replace(WORKLOADS["W2"], clients=options.clients)
    network = partial(ResNet18GN, width=options.width)
    algorithm = DisPFL(Ring(), rounds=100) if options.masked else DPSGD(Ring())
    federation = Federation(
        algorithm,
        [ClientGroup(options.clients, network)],
        optimizer=partial(torch.optim.SGD, lr=0.01),
        local_steps=options.steps,
        evaluate=(),
        export=(),
        seed=SEED,
    )
    data = FederatedDataModule(Pool(workload), Windows(workload), batch_size=1)
    trainer = FederatedTrainer(
        name="run",
        max_epochs=options.rounds + 1,
        accelerator="cpu",
        strategy=strategy,
        limit_val_batches=0,
        checkpoint_every=options.every,
        enable_progress_bar=False,
        enable_page=False,
        default_root_dir=folder,
    )
    trainer.fit(federation, datamodule=data)
    with (Path(folder) / "run" / "timings.csv").open(newline="") as file:
        _, *rounds = csv.DictReader(file)
    parts = {name for name in rounds[0] if name != "round"}
    return {name: sum(float(row[name]) for row in rounds) / len(rounds) for name in parts}


def main(argv: list[str] | None = None) -> None:
    """Print what each way takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4, help="rounds after the first")
    parser.add_argument("--steps", type=int, default=4, help="of a session")
    parser.add_argument("--every", type=int, default=1, help="rounds between two checkpoints")
    parser.add_argument("--width", type=int, default=WIDTH, help="channels of the first stage")
    parser.add_argument("--masked", action="store_true", help="DisPFL, half of each row")
    options = parser.parse_args(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(machine())
    ways = {"training waits": Waits(), "beside training": FederatedStrategy()}
    for name, strategy in ways.items():
        with tempfile.TemporaryDirectory() as folder, files() as sizes:
            seconds = run(options, strategy, folder)
        print(
            f"{name:16} checkpoint {seconds['checkpoint']:6.2f} s a round of "
            f"{sum(seconds.values()):6.2f} s (sessions {seconds['sessions']:.2f}, "
            f"merge {seconds['merge']:.2f}); {sum(sizes) / 1e9:.2f} GB in {len(sizes)} files",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
