"""Rounds on two ranks, and the collectives for which their main threads wait.

`main` writes a file for each case: those of every round, in order.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning.pytorch import Callback
from typing_extensions import override

from lightfed.algorithms.dispfl import DisPFL
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.heterofl import HeteroFL
from lightfed.distributed.collectives import Ranks
from lightfed.models.networks.cnn import Conv
from lightfed.models.networks.mlp import MLP
from lightfed.testing.case import Case
from lightfed.testing.digest import fit
from lightfed.testing.ranks import start_job, wait
from lightfed.topology.topology import TimeVarying

RANKS, ROUNDS = 2, 3
mlp = partial(MLP, hidden=(8,))
alone: dict[str, Any] = {"enable_checkpointing": False, "limit_val_batches": 0}
CASES = {
    "fedavg": (Case(FedAvg, mlp), alone),
    "heterofl": (Case(HeteroFL, partial(Conv, hidden=(4, 8)), "abcde"), alone),
    "dispfl": (
        # Side by side, so few clients have one home.
        Case(
            partial(DisPFL, TimeVarying(3), rounds=9), mlp,
            federation={"fraction": 1.0, "side_by_side": "off"},
        ),
        alone,
    ),
    "whole": (Case(FedAvg, mlp), {}),
}  # fmt: skip


class Rounds(Callback):
    """The collectives of every round, up to the start of the next."""

    def __init__(self) -> None:
        self.found: list[list[str]] = []

    @override
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.found.append([])


def play(rank: int, name: str, folder: Path) -> None:
    """What a rank does; rank 0 writes."""
    rounds, collective = Rounds(), Ranks.collective

    @contextmanager
    def noted(ranks: Ranks, what: str, *, waits: bool = True) -> Iterator[None]:
        if rounds.found and threading.current_thread() is threading.main_thread():
            rounds.found[-1].append(what)
        with collective(ranks, what, waits=waits):
            yield

    case, flags = CASES[name]
    with patch.object(Ranks, "collective", noted):
        fit(case, folder / name, rounds=ROUNDS, ranks=RANKS, callbacks=[rounds], **flags)
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(rounds.found))


def main(folder: Path) -> None:
    jobs = [start_job(RANKS, partial(play, name=name, folder=folder)) for name in CASES]
    assert all(wait(job) for job in jobs), "a rank failed"
