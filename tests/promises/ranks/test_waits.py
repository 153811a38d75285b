"""A round on several ranks waits once for their sessions, and where rows are added or sent."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch import Callback
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.topology.topology import TimeVarying
from lightfed.distributed.collectives import Ranks
from lightfed.networks.mlp import MLP
from lightfed.testing.case import Case, read_digits
from lightfed.testing.digest import fit
from lightfed.testing.ranks import in_new_process, start_job, wait

RANKS, ROUNDS = 2, 3
mlp = partial(MLP, hidden=(8,))
alone: dict[str, Any] = {"enable_checkpointing": False, "limit_val_batches": 0}
# Side by side, so few clients have one home.
peers = Case(
    partial(DisPFL, TimeVarying(3), rounds=9), mlp,
    federation={"fraction": 1.0, "side_by_side": "off"},
)  # fmt: skip
SESSIONS, ADDED = "the end of the sessions of round 1", "an all-reduce"
# What runs, and the collectives of its second round.
CASES: dict[str, tuple[Case, dict[str, Any], list[str]]] = {
    "fedavg": (Case(FedAvg, mlp), alone, [SESSIONS, ADDED]),
    # Elements under the masks, the rows, and then the sessions.
    "dispfl": (peers, alone, [ADDED, "an exchange of rows", SESSIONS]),
    # Tests; where a checkpoint goes, which is written beside training.
    "whole": (Case(FedAvg, mlp), {}, [SESSIONS, ADDED, "a gather", "a broadcast"]),
}


class Rounds(Callback):
    """The collectives of every round, up to the start of the next."""

    def __init__(self) -> None:
        self.found: list[list[str]] = []

    @override
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.found.append([])


def play(rank: int, name: str, folder: Path) -> None:
    """What a rank does; rank 0 writes the collectives for which its main thread waits."""
    rounds, collective = Rounds(), Ranks.collective

    @contextmanager
    def noted(ranks: Ranks, what: str, *, waits: bool = True) -> Iterator[None]:
        if rounds.found and threading.current_thread() is threading.main_thread():
            rounds.found[-1].append(what)
        with collective(ranks, what, waits=waits):
            yield

    case, flags, _ = CASES[name]
    with patch.object(Ranks, "collective", noted):
        fit(case, folder / name, rounds=ROUNDS, ranks=RANKS, callbacks=[rounds], **flags)
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(rounds.found))


def main(folder: Path) -> None:
    for split in ("train", "test"):
        read_digits(split)
    jobs = [start_job(RANKS, partial(play, name=name, folder=folder)) for name in CASES]
    assert all(wait(job) for job in jobs), "a rank failed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("waits")
    in_new_process(main, made)
    return made


@pytest.mark.parametrize("name", CASES)
def test_ranks_wait_for_each_other_as_often_as_they_must(name: str, folder: Path) -> None:
    found = json.loads((folder / f"{name}.json").read_text())
    assert len(found) == ROUNDS
    # The first round may replace a journal, the last one has the end of the run.
    assert found[1] == CASES[name][2]
