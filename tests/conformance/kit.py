"""What the files of the kit share. A file takes some cases, so that two workers can run the kit."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conformance.cases import CASES
from tests.conformance.worker import WORLDS, Digest, move

Digests = dict[str, dict[str, Digest]]
"""By kind of run and rank, such as straight-3-of-4; by case."""


def names(*, stateful: bool) -> list[str]:
    """The cases whose clients keep something from round to round, or the others."""
    return [name for name, case in CASES.items() if case.algorithm().stateful == stateful]


def digests_of(cases: list[str], folder: Path) -> Digests:
    """Run the cases on every number of ranks, and from each other's checkpoints."""
    run_module("worker", str(folder), *cases)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def check_ranks(name: str, digests: Digests) -> None:
    """The promise (d): any number of ranks gives the same bits, and on each of them."""
    for ranks in WORLDS[1:]:
        _check("straight", name, ranks, digests)


def check_resumed(name: str, digests: Digests) -> None:
    """The promise (e): a stopped and resumed run has the bits of one that never stopped."""
    _, ranks = move(name)
    _check("resumed", name, ranks, digests)


def _check(kind: str, name: str, ranks: int, digests: Digests) -> None:
    expected = digests["straight-0-of-1"][name]
    for run in [f"{kind}-{rank}-of-{ranks}" for rank in range(ranks)]:
        assert digests[run][name] == expected, run


def run_module(module: str, *arguments: str) -> None:
    """Run a module of the kit in a process that has no threads, so that it may fork ranks."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.conformance.{module}", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
