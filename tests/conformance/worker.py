"""Every case on every number of ranks, and once more from a suspended round of another number.

`python -m tests.conformance.worker FOLDER CASE...` leaves the digests in the folder, in a file a
rank of a job.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightfed.runs.checkpoint import load
from tests.conformance.cases import CASES, ROUNDS, read_digits
from tests.conformance.ranks import start_job, wait
from tests.conformance.run import digest, fit

WORLDS = (1, 2, 4)
# Ranks that a run is stopped on, and resumed on; cases take turns. Several in both, to notice what
# one rank alone has written, or read.
MOVES = ((4, 2), (2, 4))

Digest = dict[str, str]


def move(name: str) -> tuple[int, int]:
    return MOVES[list(CASES).index(name) % len(MOVES)]


class Interrupt(Callback):
    """A signal for one rank before its first session of a round; the others finish theirs."""

    @override
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, wave: int) -> None:
        if wave == 0:
            here = [] if batch is None else [batch]
            first = min(trainer.federation.fleet.ranks.gather(here))
            if batch == first:
                os.kill(os.getpid(), signal.SIGUSR1)


def straight(name: str, folder: Path, ranks: int) -> Digest:
    """A run that never stops; on its way it leaves the checkpoint for the one that does."""
    flags: dict[str, Any] = {"enable_checkpointing": False}
    if ranks == move(name)[0]:
        stop = ModelCheckpoint(
            filename="stopped", every_n_epochs=ROUNDS - 1, save_on_train_epoch_end=True,
            save_last="link",
        )  # fmt: skip
        flags = {"callbacks": [stop]}
    found = digest(*fit(CASES[name], folder / f"{name}-{ranks}", ranks=ranks, **flags))
    if ranks == move(name)[0]:
        suspend(name, folder / f"{name}-{ranks}", ranks)
    return found


def suspend(name: str, place: Path, ranks: int) -> None:
    """The last round once more, from a checkpoint before it, interrupted amid its sessions."""
    path = str(place / "run" / "checkpoints" / "stopped.ckpt")
    with pytest.raises(SystemExit) as left:
        fit(CASES[name], place, ranks=ranks, ckpt_path=path, callbacks=[Interrupt()])
    assert left.value.code == 128 + signal.SIGUSR1


def resumed(name: str, folder: Path, ranks: int) -> Digest:
    """The rest of a run whose last round was suspended."""
    place = folder / f"{name}-{move(name)[0]}"
    path = place / "run" / "checkpoints" / "last.ckpt"
    assert load(path)["global_step"] == ROUNDS - 1
    assert path.with_name("sessions.ckpt").is_file()
    flags: dict[str, Any] = {"ckpt_path": str(path), "enable_checkpointing": False}
    return digest(*fit(CASES[name], place, ranks=ranks, **flags))


def job(
    one: Callable[[str, Path, int], Digest], names: list[str], folder: Path, ranks: int
) -> None:
    """One run of every case, in one start of the ranks.

    Raises:
        SystemExit: a rank failed; its error is on stderr.
    """

    def work(rank: int) -> None:
        digests = {name: one(name, folder, ranks) for name in names}
        (folder / f"{one.__name__}-{rank}-of-{ranks}.json").write_text(json.dumps(digests))

    if not wait(start_job(ranks, work)):
        sys.exit(f"{one.__name__} runs on {ranks} ranks failed")


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for split in ("train", "test"):
        read_digits(split)
    for ranks in WORLDS:
        job(straight, names, folder, ranks)
    for _, ranks in MOVES:
        job(resumed, [name for name in names if move(name)[1] == ranks], folder, ranks)


if __name__ == "__main__":
    main()
