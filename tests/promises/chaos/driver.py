"""One run after the other is hit fifty times, by everything that a cluster has, and resumed.

`python -m tests.promises.chaos.driver FOLDER CASE` writes what happened to FOLDER/chaos.json. The
ranks of every start are forked from this warm process. A hit comes after a random number of
sessions and a random part of a second, so that it meets sessions, sums over clients, evaluations
and checkpoints.
"""

import errno
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from typing_extensions import override

from lightfed.testing.case import Case
from lightfed.testing.digest import digest, fit
from lightfed.testing.ranks import start_job
from lightfed.utils import atomic_io as archive
from lightfed.utils import signals
from tests.promises.conformance.cases import CASES

ROUNDS = 30
HITS = 50
KINDS = (
    "SIGKILL of a rank", "SIGKILL of all", "SIGTERM of all", "SIGUSR1 of all", "SIGUSR1 of a rank",
    "a full file system",
)  # fmt: skip
_PATIENCE = 120.0  # seconds for ranks to end after a hit: far more than any of them takes
_LATEST = 0.1  # seconds after the session that a hit follows


class Beat(Callback):
    """A byte into a pipe after every session of rank 0."""

    hears = "rounds"

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        with suppress(BrokenPipeError):
            os.write(self._pipe, b".")


class Job:
    """The ranks of one start; rank 0 leaves its digest in the folder when the run is finished."""

    def __init__(
        self,
        case: Case,
        folder: Path,
        ranks: int,
        full: Path,
    ) -> None:
        self._beats, pipe = os.pipe()

        def work(rank: int) -> None:
            signals.listen()  # as the command does
            sys.stderr = (folder.parent / "stderr.txt").open("a")
            refuse_when(full)
            try:
                flags: dict[str, Any] = {"callbacks": [Beat(pipe)] if rank == 0 else []}
                run = fit(case, folder, rounds=ROUNDS, ckpt_path="last", ranks=ranks, **flags)
            except SystemExit as left:
                sys.stderr.flush()
                os._exit(int(left.code or 0))
            found = digest(*run)
            if rank == 0:
                (folder / "digest.json").write_text(json.dumps(found))

        self.group = start_job(ranks, work)
        os.close(pipe)
        self.statuses: list[int] = []
        self._met = False  # ranks that have not met do not know of each other's death

    def sessions(self, count: int) -> bool:
        """Wait for so many sessions of rank 0; False if it ended before."""
        while count > 0:
            found = os.read(self._beats, count)
            if not found:
                return False
            self._met = True
            count -= len(found)
        return True

    def hit(self, number: int, *, all_of_them: bool) -> None:
        with suppress(ProcessLookupError):
            if all_of_them:
                os.killpg(self.group, number)
            else:
                os.kill(self.group, number)  # the first one; which that is depends on nothing

    def wait(self) -> list[int]:
        """Statuses of all ranks.

        They end by themselves, but for those that have not met yet, which their launcher ends.
        """
        limit = time.monotonic() + _PATIENCE
        while True:
            try:
                pid, status = os.waitpid(-self.group, os.WNOHANG)
            except ChildProcessError:
                os.close(self._beats)
                return self.statuses
            if pid:
                self.statuses.append(os.waitstatus_to_exitcode(status))
                if status and not self._met:
                    self.hit(signal.SIGKILL, all_of_them=True)
            elif time.monotonic() > limit:
                os.killpg(self.group, signal.SIGKILL)
                raise TimeoutError(f"ranks hang; ended so far: {self.statuses}")
            else:
                time.sleep(0.01)


def refuse_when(full: Path) -> None:
    """Every write of this process fails as on a full disk while a file is there."""
    whole = archive.write_atomically

    def write(path: Path, content: Callable[[Any], object]) -> None:
        def half(file: Any) -> None:
            content(file)
            if full.exists():
                file.flush()
                os.truncate(file.name, os.path.getsize(file.name) // 2)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        whole(path, half)

    for module in [m for name, m in sys.modules.items() if name.startswith("lightfed.")]:
        if getattr(module, "write_atomically", None) is whole:
            module.write_atomically = write  # type: ignore[attr-defined]


def hit(kind: str, case: str, folder: Path, draw: random.Random, sessions: int) -> dict[str, Any]:
    """Start, or resume, the run, and hit it; what came of it."""
    ranks, full = draw.choice([1, 2, 4]), folder / "full"
    job = Job(CASES[case], folder, ranks, full)
    alive = job.sessions(draw.randrange(2 * sessions // ranks + 1))
    time.sleep(draw.random() * _LATEST)
    if kind == "a full file system":
        full.touch()
    else:
        number = getattr(signal, kind.split()[0])
        job.hit(number, all_of_them=kind.endswith("all"))
    statuses = job.wait()
    full.unlink(missing_ok=True)
    finished = (folder / "digest.json").is_file()
    # A run that was quicker than its hit, or whose last round it met, is no trial.
    stated = {"kind": kind, "ranks": ranks, "statuses": statuses, "counts": alive and not finished}
    return stated | {"finished": finished}


def main() -> None:
    root, case = Path(sys.argv[1]), sys.argv[2]
    draw = random.Random(case)
    straight = root / "straight"
    straight.mkdir()
    assert set(Job(CASES[case], straight, 1, root / "never").wait()) == {0}
    clients = (straight / "run" / "clients.csv").read_text().count("\n")
    sessions = max(1, clients // ROUNDS // 2)
    hits: list[dict[str, Any]] = []
    counted: Counter[str] = Counter()
    folders = [straight]
    while sum(counted.values()) < HITS:
        if (folders[-1] / "digest.json").is_file():
            folders.append(root / f"run{len(folders)}")
            folders[-1].mkdir()
        kind = min(KINDS, key=lambda k: (counted[k], draw.random()))
        hits.append(hit(kind, case, folders[-1], draw, sessions))
        counted[kind] += hits[-1]["counts"]
    if not (folders[-1] / "digest.json").is_file():
        assert set(Job(CASES[case], folders[-1], 2, root / "never").wait()) == {0}
    stated = {"hits": hits, "counted": counted, "folders": [str(folder) for folder in folders]}
    (root / "chaos.json").write_text(json.dumps(stated))


if __name__ == "__main__":
    main()
