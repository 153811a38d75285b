"""Kill a job at ten moments, resume it on another number of ranks, compare bits.

`python -m tests.conformance.killer FOLDER`: one warm process that forks the ranks of every job, so
that a start costs milliseconds. Half of the deaths come at a random moment, half in the middle of
writing a checkpoint, at a random byte of a random file of it.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lightfed.core import checkpoint
from tests.conformance.cases import CASES
from tests.conformance.run import digest, fit
from tests.conformance.test_conformance import free_port

ROUNDS = 8
KILLS = 10
NAMES = ("standalone", "heterofl", "fedavg_local_statistics")


def start_job(name: str, folder: Path, ranks: int, before: Callable[[], None]) -> list[int]:
    """Fork the ranks of a job into a process group of their own.

    Rank 0 leaves its digest in the folder.
    """
    port = str(free_port())
    pids: list[int] = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, pids[0] if pids else 0)
            os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(ranks))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            before()
            result = digest(*fit(CASES[name], folder, rounds=ROUNDS, ckpt_path="last", ranks=ranks))
            if rank == 0:
                (folder / "digest.json").write_text(json.dumps(result))
            os._exit(0)
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    return pids


def wait(pids: list[int]) -> bool:
    """Whether all ranks ended well."""
    return not any(status for _, status in [os.waitpid(pid, 0) for pid in pids])


def kill_in_write(number: int, share: float) -> None:
    """Make the `number`-th file of this rank's checkpoints the death of the job, part-written."""
    written = 0
    whole = checkpoint.write_atomically

    def torn(path: Path, write: Callable[[object], None]) -> None:
        nonlocal written
        written += 1
        if written != number:
            whole(path, write)
            return

        def half(file: object) -> None:
            write(file)
            file.flush()  # type: ignore[attr-defined]
            os.truncate(file.name, int(os.path.getsize(file.name) * share))  # type: ignore[attr-defined]
            os.killpg(0, signal.SIGKILL)

        whole(path, half)

    checkpoint.write_atomically = torn


def one_kill(
    draw: random.Random, name: str, folder: Path, seconds: float, in_write: bool
) -> dict[str, object]:
    ranks, later = draw.sample([1, 2, 3], 2)
    number, share = draw.randrange(1, ROUNDS + 1), draw.random()
    before: Callable[[], None] = lambda: None  # noqa: E731
    if in_write:
        before = lambda: kill_in_write(number, share)  # noqa: E731
    died, delay = False, draw.random() * seconds
    while not died:  # a job that was quicker than its death is no trial
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        pids = start_job(name, folder, ranks, before)
        if not in_write:
            time.sleep(delay)
            os.killpg(pids[0], signal.SIGKILL)
        died = not wait(pids)
        delay /= 2
    ended = wait(start_job(name, folder, later, lambda: None))
    result = json.loads((folder / "digest.json").read_text()) if ended else {}
    # A job that died before its first checkpoint is started anew, in a folder of its own.
    newest = max(folder.glob("run*/metrics.csv"), key=lambda path: path.stat().st_mtime_ns)
    rounds = newest.read_text().splitlines()
    return {"ranks": [ranks, later], "digest": result, "rounds": len(rounds) - 1}


def main() -> None:
    folder, draw = Path(sys.argv[1]), random.Random(7)
    results: dict[str, object] = {}
    for name in NAMES:
        started = time.monotonic()
        (folder / name).mkdir()
        assert wait(start_job(name, folder / name, 1, lambda: None))
        seconds = time.monotonic() - started
        straight = json.loads((folder / name / "digest.json").read_text())
        results[name] = {"straight": straight, "kills": [], "seconds": seconds}
    for number in range(KILLS):
        name = NAMES[number % len(NAMES)]
        place = folder / f"kill{number}"
        kill = one_kill(draw, name, place, results[name]["seconds"], bool(number % 2))  # type: ignore[index]
        results[name]["kills"].append(kill)  # type: ignore[index]
    (folder / "kills.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
