"""Runs of several ranks in which something goes wrong, side by side.

One process forks the ranks of every run. It writes what each rank left with and said.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.distributed import watch
from lightfed.distributed.collectives import leave
from lightfed.engine.strategy import FederatedStrategy
from lightfed.networks.mlp import MLP
from lightfed.testing.case import Case, read_digits
from lightfed.testing.digest import fit
from lightfed.testing.ranks import kept_port

TIMEOUT = 6.0  # seconds, for the one that hangs
GRACE = 2.0
RANKS = 2
CASE = Case(FedAvg, partial(MLP, hidden=(8,)), federation={"evaluate": ("global",)})
FAULTS = (
    "dies", "hangs", "raises", "all raise", "twice", "fit end", "teardown", "exits", "exits first",
    "interrupts", "exits at once", "exits at once first",
)  # fmt: skip


class Fault(Callback):
    """Strikes at the first session of the second round; the other rank trains on."""

    hears = "rounds"

    def __init__(self, name: str) -> None:
        self.name = name

    @override
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if trainer.current_epoch != 1 or index or self.name in ("twice", "fit end", "teardown"):
            return
        if self.name == "all raise":
            raise ZeroDivisionError(f"of rank {trainer.global_rank}")
        if trainer.global_rank == 0:
            if self.name == "dies":
                time.sleep(60)  # a session that waits for nobody
            elif self.name == "exits first":
                sys.exit(0)
            elif self.name == "exits at once first":
                os._exit(0)
        elif self.name.endswith("first"):
            return
        elif self.name == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.name == "raises":
            raise ZeroDivisionError("of rank 1")
        elif self.name == "exits":
            sys.exit(0)
        elif self.name == "exits at once":
            os._exit(0)
        elif self.name == "interrupts":
            raise KeyboardInterrupt
        else:
            os.kill(os.getpid(), signal.SIGSTOP)

    @override
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.name == "fit end" and trainer.global_rank == 1:
            raise ZeroDivisionError("of rank 1")

    @override
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.name == "teardown" and trainer.global_rank == 1:
            raise ZeroDivisionError("of rank 1")


def play(name: str, folder: Path) -> int:
    """What a rank does, up to its exit status."""
    status = 0
    try:
        for run in ("a", "b") if name == "twice" else ("a",):
            fit(
                CASE, folder / run, ranks=RANKS, callbacks=[Fault(name)],
                strategy=FederatedStrategy(timeout=TIMEOUT / 60 if name == "hangs" else 1),
            )  # fmt: skip
    except Exception:
        traceback.print_exc()
        status = 3
    sys.stderr.flush()
    leave()
    if name == "twice" and os.environ["LOCAL_RANK"] == "0":
        time.sleep(GRACE)  # while the other one goes
    return status


def start(folder: Path, play: Callable[[], int]) -> list[int]:
    """Fork the ranks of a run, each of which leaves with what `play` gives; their processes."""
    keeper, pids = kept_port(), []
    port = str(keeper.getsockname()[1])
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(RANKS))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, SLURMD_NODENAME=f"n{rank}")
            os.dup2(os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
            os._exit(play())
        pids.append(pid)
    keeper.close()  # the ranks have it, too
    return pids


def said_in(folder: Path) -> list[str]:
    """What each rank of a run has written to stderr."""
    return [(folder / f"stderr-{rank}").read_text() for rank in range(RANKS)]


def main(folder: Path) -> None:
    watch.GRACE = GRACE
    for split in ("train", "test"):
        read_digits(split)
    pids = {}
    for name in FAULTS:
        (folder / name).mkdir()
        pids[name] = start(folder / name, partial(play, name, folder / name))
    results = {}
    for name, both in pids.items():
        ends = both[:1] if name == "hangs" else both
        statuses = [os.waitpid(pid, 0)[1] for pid in ends]
        if name == "hangs":
            os.kill(both[1], signal.SIGKILL)
        exits = [os.waitstatus_to_exitcode(status) for status in statuses]
        records = list((folder / name).glob("*/run/environment.json"))
        finished = any("finished" in json.loads(path.read_text()) for path in records)
        results[name] = {"statuses": exits, "said": said_in(folder / name), "finished": finished}
    (folder / "faults.json").write_text(json.dumps(results))
