"""Thousands of rounds, hit again and again on 2 and 4 ranks, have the bits of an undisturbed run.

    python -m tests.promises.chaos.long_run FOLDER [--rounds 5000] [--every 20]

First one rank runs undisturbed. Then 2 ranks, and then 4, run the same rounds; a fault of each kind
of `tests.promises.chaos.driver` hits them in turn after a random time, and they resume.
Rank 0 notes its memory and descriptors, and the files of the run. The exit status is 1 if bits
differ, or if one of these grows.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from typing_extensions import override

from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.models.networks.mlp import MLP
from lightfed.testing.case import Case, read_digits
from tests.promises.chaos.driver import KINDS, Job, truncate

CASE = Case(
    partial(LGFedAvg, global_layers=1),
    partial(MLP, hidden=(16,), dropout=0.3),
    federation={"local_steps": 1, "evaluate": ("personal",)},
    trainer={"check_val_every_n_epoch": 50},
)
PAGE = os.sysconf("SC_PAGE_SIZE")
SAMPLES = 100  # of a run's memory, descriptors and files
MOST_FILES = 200  # two chains of 64 shards, and the rest of the folder
MOST_GROWTH = 24 * 2**20  # bytes of a rank, from the first to the last fifth of its rounds
MOST_OPEN = 3  # descriptors more; a checkpoint may be in writing


class Usage(Callback):
    """Notes what rank 0 and the run's folder take up."""

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder, every

    @override
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch % self._every:
            return
        # os.walk passes over a folder that the writer of checkpoints removes at this moment
        files = sum(len(names) for _, _, names in os.walk(self._folder / "run"))
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        noted = {
            "pid": os.getpid(), "round": trainer.current_epoch, "memory": memory,
            "descriptors": len(os.listdir("/proc/self/fd")), "files": files,
        }  # fmt: skip
        with (self._folder / "usage.jsonl").open("a") as file:
            file.write(json.dumps(noted) + "\n")


def usage_of(folder: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in (folder / "usage.jsonl").read_text().splitlines()]


def start(folder: Path, ranks: int, rounds: int) -> Job:
    usage = Usage(folder, max(1, rounds // SAMPLES))
    return Job(CASE, folder, ranks, folder / "full", rounds=rounds, callbacks=[usage])


def strike(kind: str, job: Job, folder: Path, draw: random.Random) -> None:
    """Hit a job, and wait until its ranks have ended."""
    full = folder / "full"
    if kind == "a full file system":
        full.touch()
    elif kind.startswith("SIG"):
        job.hit(getattr(signal, kind.split()[0]), all_of_them=kind.endswith("all"))
    else:
        job.hit(signal.SIGKILL, all_of_them=True)
    job.wait()
    full.unlink(missing_ok=True)
    if kind == "a truncated checkpoint":
        truncate(folder, draw)


def disturbed(folder: Path, ranks: int, rounds: int, every: float) -> Counter[str]:
    """Run to the end under faults; how many of each kind there were."""
    draw, hits = random.Random(ranks), Counter[str]()
    while True:
        job = start(folder, ranks, rounds)
        limit, alive = time.monotonic() + every * (0.5 + draw.random()), True
        while alive and time.monotonic() < limit:
            alive = job.sessions(1)
        if not alive:
            assert set(job.wait()) == {0}, job.statuses
            return hits
        kind = min(KINDS, key=lambda name: (hits[name], draw.random()))
        strike(kind, job, folder, draw)
        if (folder / "digest.json").is_file():
            return hits
        hits[kind] += 1


def flat(noted: list[dict[str, int]]) -> str:
    """What grows within the rounds; empty for nothing."""
    if max(n["files"] for n in noted) > MOST_FILES:
        return "files"
    if len(noted) < 10:  # of a process that was started just before the end
        return ""
    fifth = len(noted) // 5
    early, late = noted[2 : 2 + fifth], noted[-fifth:]
    grown = min(n["memory"] for n in late) - max(n["memory"] for n in early)
    more = max(n["descriptors"] for n in late) - max(n["descriptors"] for n in early)
    return "memory" if grown > MOST_GROWTH else "descriptors" * (more > MOST_OPEN)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults")
    options = parser.parse_args()
    for split in ("train", "test"):
        read_digits(split)
    failed = False
    bits = ""
    for ranks in (1, 2, 4):
        folder, began = options.folder / f"ranks{ranks}", time.monotonic()
        folder.mkdir(parents=True)
        every = float("inf") if ranks == 1 else options.every
        hits = disturbed(folder, ranks, options.rounds, every)
        found = (folder / "digest.json").read_text()
        bits = bits or found
        noted = usage_of(folder)
        last = [n for n in noted if n["pid"] == noted[-1]["pid"]]  # of one process
        grows = flat(last)
        failed |= found != bits or bool(grows)
        memory, descriptors, files = (
            f"{min(n[name] for n in last):,}-{max(n[name] for n in last):,}"
            for name in ("memory", "descriptors", "files")
        )
        seconds, same = time.monotonic() - began, found == bits
        print(
            f"{ranks} ranks: {options.rounds} rounds, {sum(hits.values())} hits, "
            f"{seconds:.0f} s; {'the same bits' if same else 'OTHER BITS'}; "
            f"{f'GROWS: {grows}' if grows else 'flat'}: {memory} bytes, {descriptors} descriptors, "
            f"{files} files\n  {dict(hits)}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
