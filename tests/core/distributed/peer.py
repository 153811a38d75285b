"""A rank that is watched over and does one thing; files stand for the process group, without torch.

`python -m tests.core.distributed.peer FOLDER RANK WORLD DEED`.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from lightfed.distributed import watch
from lightfed.utils.errors import Interrupted, UserError

GRACE = 0.6  # seconds, for what takes none here
LONG = 60.0


class Ranks:
    """Broadcast and gather, as watch.start needs them."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self._folder, self.rank, self.world = folder, rank, world

    def _put(self, name: str, value: Any) -> None:
        new = self._folder / f"{name}-{self.rank}.new"
        new.write_bytes(pickle.dumps(value))
        new.rename(self._folder / f"{name}-{self.rank}")

    def _get(self, name: str, rank: int) -> Any:
        path = self._folder / f"{name}-{rank}"
        while not path.exists():
            time.sleep(0.01)
        return pickle.loads(path.read_bytes())

    def broadcast(self, value: Any) -> Any:
        if self.rank == 0:
            self._put("broadcast", value)
        return self._get("broadcast", 0)

    def gather(self, values: list[Any]) -> list[Any]:
        self._put("gather", values)
        return [value for rank in range(self.world) for value in self._get("gather", rank)]


def session() -> None:
    """What takes longer than anybody will wait."""
    time.sleep(LONG)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def fork_and_die() -> None:
    """A data loader's worker outlives its rank, and has its files open."""
    if os.fork() == 0:
        session()
    die()


def fork_and_go_on() -> None:
    """A forked child that ends says nothing in the name of its rank."""
    if os.fork() == 0:
        watch.leave()
        os._exit(0)
    os.wait()
    time.sleep(3 * GRACE)
    watch.leave()


def run_and_die() -> None:
    subprocess.Popen(["sleep", str(LONG)])
    die()


def fail(error: BaseException) -> NoReturn:
    watch.fail(error)
    time.sleep(GRACE / 2)
    raise error


def fail_slowly() -> None:
    """Its teardown takes longer than the others wait."""
    watch.fail(ValueError("mine"))
    time.sleep(3 * GRACE)
    sys.exit(7)


def leave_and_linger() -> None:
    """As rank 0 does in a batch job that waits to be requeued."""
    watch.fail(Interrupted(signal.SIGUSR1, "all", resumable=True))
    time.sleep(3 * GRACE)
    sys.exit(3)


def late() -> None:
    time.sleep(GRACE / 2)
    watch.lost("the end of the sessions", RuntimeError("Timed out"))


def broken() -> None:
    watch.lost("a gather", RuntimeError("Connection closed\nby peer"))


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


DEEDS = {
    "session": session,
    "die": die,
    "fork and die": fork_and_die,
    "fork and go on": fork_and_go_on,
    "run and die": run_and_die,
    "raise": lambda: fail(ValueError("no\ngood")),
    "refuse": lambda: fail(UserError("data.root", "no folder", "make one")),
    "fail slowly": fail_slowly,
    "leave": watch.leave,
    "leave and linger": leave_and_linger,
    "exit without a word": lambda: os._exit(0),
    "late": late,
    "broken": broken,
    "stop": stop,
}


def main() -> None:
    assert "torch" not in sys.modules, "tests start seventy ranks"
    folder, rank, world, deed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    watch.GRACE = GRACE
    ranks = Ranks(folder, rank, world)
    print("starts")
    here = "127.0.0.1"
    watch.start(ranks, here, here, lambda: os.write(1, b"kills\n"))  # type: ignore[arg-type]
    DEEDS[deed]()
    print("over")


if __name__ == "__main__":
    main()
