"""A short training that must converge: HeteroFL's Conv on synthetic images of CIFAR-10's shape.

    python benchmarks/curve.py [--rounds 20] [--device cuda] [--out FOLDER] [--tiny]

A hundred clients of five widths, ten a round, five local epochs in batches of 10, with the
optimizer of HeteroFL's CIFAR-10 experiment. An image is the smooth pattern of its class, below
noise. `--out` keeps curve.csv: of every round accuracy and loss of the global model on 2,000 other
images, the loss of training, and seconds. The exit status is 1 if the last accuracy is not above
0.75 (chance is 0.1).
"""

import argparse
import csv
import logging
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from federated import Pool, Windows
from figures import machine, out_folder
from workloads import LEVELS, SEED, WORKLOADS, Workload

from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.data.datamodule import FederatedDataModule
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.networks.cnn import Conv
from lightfed.trainer import FederatedTrainer

NEEDED = 0.75  # after 14 rounds a CPU has 0.83
CURVE = replace(
    WORKLOADS["W3"], name="curve", title="HeteroFL, Conv 32-64-128-256 on 3x32x32, five widths",
    input_shape=(3, 32, 32), labels=10, batch=10, noise=14.0,
    narrow=partial(Conv, hidden=(32, 32)),
)  # fmt: skip
TESTED = 2_000
COLUMNS = ("round", "global/accuracy", "global/loss", "train_loss", "seconds")


def train(workload: Workload, *, rounds: int, device: str) -> list[dict[str, str]]:
    """The columns of every round."""
    count = workload.clients // len(LEVELS)
    groups = [ClientGroup(count, workload.network, level=level) for level in LEVELS]
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4)
    federation = Federation(
        HeteroFL(), groups, optimizer=optimizer, clients_per_round=workload.per_round,
        local_epochs=5, evaluate=("global",), export=(), seed=SEED,
    )  # fmt: skip
    data = FederatedDataModule(
        Pool(workload, TESTED), Windows(workload), batch_size=workload.batch, channels_last=True
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_epochs=rounds, accelerator="cpu" if device == "cpu" else "gpu",
            gradient_clip_val=1.0, enable_checkpointing=False, enable_progress_bar=False,
            enable_page=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(federation, datamodule=data)
        assert trainer.run_logger is not None
        with (trainer.run_logger.folder / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    return [{name: row[name] for name in COLUMNS} for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and print and keep the curve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=out_folder, help="folder for curve.csv")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it runs")
    options = parser.parse_args(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(machine())
    workload = CURVE.tiny() if options.tiny else CURVE
    rows = train(workload, rounds=options.rounds, device=options.device)
    for row in rows:
        print(*(f"{name} {float(row[name]):g}" for name in COLUMNS), sep=", ")
    if options.out is not None:
        with (options.out / "curve.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
            table.writerows(rows)
    return 0 if options.tiny or float(rows[-1][COLUMNS[1]]) > NEEDED else 1


if __name__ == "__main__":
    sys.exit(main())
