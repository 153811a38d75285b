"""Kill a job at random moments, resume it on another number of ranks, compare bits.

Deaths take turns: at a random moment; in the middle of writing a checkpoint, at a random byte of a
random file of it; in the middle of the evaluation of a random round.
"""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightfed.engine.evaluation import Evaluation
from lightfed.runs import checkpoint
from lightfed.testing.digest import digest, fit
from lightfed.testing.ranks import start_job, wait
from tests.promises.conformance.cases import CASES, COMBINATIONS

ROUNDS = 4
RUNS = {
    "in packs": replace(CASES["standalone"], federation={"side_by_side": 3, "fraction": 1.0}),
    "heterofl": CASES["heterofl"],
    "local statistics": CASES["fedavg_local_statistics"],
}
# What belongs to a client besides its row: optimizers, a callback's attributes, and its steps.
HOOKED = {
    name: COMBINATIONS[name]
    for name in ("fedavg_kept_gan", "fedavg_kept_callback", "fedavg_step_schedule")
}
# What the server remembers between rounds besides its model: deadlines that it learns, updates that
# have not arrived, and what clients have spent. Clients that train in evaluations alone, whose turn
# is the one that dies in an evaluation. And packs of clients that keep earlier models.
BEYOND = {
    "learned deadline": CASES["devices_deadline_learned"],
    "late rows": CASES["late_ditto"],
    "unseen": COMBINATIONS["ditto_unseen"],
    "local seconds": CASES["devices_seconds"],
    "late sums": CASES["late_feddyn"],
    "energy": CASES["devices_energy"],
    "earlier models": CASES["moon_packed"],
}
GROUPS = {"plain": RUNS, "hooked": HOOKED, "beyond": BEYOND}
EVERY = RUNS | HOOKED | BEYOND


def start(name: str, folder: Path, ranks: int, before: Callable[[], None] = lambda: None) -> int:
    """Start, or resume, a job whose rank 0 leaves its digest in the folder; its process group."""

    def work(rank: int) -> None:
        before()
        result = digest(*fit(EVERY[name], folder, rounds=ROUNDS, ckpt_path="last", ranks=ranks))
        if rank == 0:
            (folder / "digest.json").write_text(json.dumps(result))

    return start_job(ranks, work)


def kill_in_write(number: int, share: float) -> None:
    """Make the `number`-th file of this rank's checkpoints the death of the job, part-written."""
    written = 0
    whole = checkpoint.write_atomically

    def torn(path: Path, write: Callable[[Any], object]) -> None:
        nonlocal written
        written += 1
        if written != number:
            whole(path, write)
            return

        def half(file: Any) -> None:
            write(file)
            file.flush()
            os.truncate(file.name, int(os.path.getsize(file.name) * share))
            os.killpg(0, signal.SIGKILL)

        whole(path, half)

    checkpoint.write_atomically = torn


def kill_in_evaluation(number: int) -> None:
    """Make the `number`-th evaluation the death of the job, when this rank has done its first part.

    Nothing of it is in the run's files then.
    """
    started = 0
    start, run = Evaluation.start, Evaluation.run

    def counted(self: Evaluation) -> None:
        nonlocal started
        started += 1
        start(self)

    def deadly(self: Evaluation, job: int) -> None:
        run(self, job)
        if started == number:
            os.killpg(0, signal.SIGKILL)

    Evaluation.start, Evaluation.run = counted, deadly  # type: ignore[method-assign]


def unfinished(folder: Path) -> bool:
    """Whether a killed job has rounds left."""
    saved = [checkpoint.load(path) for path in folder.glob("run*/checkpoints/last.ckpt")]
    return all(content["global_step"] < ROUNDS for content in saved)


def one_kill(
    draw: random.Random, name: str, folder: Path, seconds: float, kind: int
) -> dict[str, object]:
    """Kill a run of so many `seconds` and resume it; the `kind` of death is 0, 1 or 2."""
    ranks, later = draw.sample([1, 2, 3], 2)
    number, share = draw.randrange(1, ROUNDS + 1), draw.random()
    died, delay = False, draw.random() * seconds
    while not died:  # a job that was quicker than its death is no trial
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if kind == 0:
            group = start(name, folder, ranks)
            time.sleep(delay)
            os.killpg(group, signal.SIGKILL)
        elif kind == 1:
            group = start(name, folder, ranks, lambda: kill_in_write(number, share))
        else:
            group = start(name, folder, ranks, lambda: kill_in_evaluation(number))
        died = not wait(group) and unfinished(folder)
        delay /= 2
    ended = wait(start(name, folder, later))
    result = json.loads((folder / "digest.json").read_text()) if ended else {}
    # A job that died before its first checkpoint is started again, in a folder of its own.
    newest = max(folder.glob("run*/metrics.csv"), key=lambda path: path.stat().st_mtime_ns)
    rounds = newest.read_text().splitlines()
    return {"ranks": [ranks, later], "digest": result, "rounds": len(rounds) - 1}


def main(folder: Path, kills: int, group: str) -> None:
    """Kill runs of a group of `GROUPS` in turn; writes kills.json."""
    runs = GROUPS[group]
    draw = random.Random(7)
    results: dict[str, object] = {}
    for name in runs:
        started = time.monotonic()
        (folder / name).mkdir()
        assert wait(start(name, folder / name, 1))
        seconds = time.monotonic() - started
        straight = json.loads((folder / name / "digest.json").read_text())
        results[name] = {"straight": straight, "kills": [], "seconds": seconds}
    for number in range(kills):
        name = [*runs][number % len(runs)]
        place = folder / f"kill{number}"
        kill = one_kill(draw, name, place, results[name]["seconds"], (number + number // 3) % 3)  # type: ignore[index]
        results[name]["kills"].append(kill)  # type: ignore[index]
    (folder / "kills.json").write_text(json.dumps(results))
