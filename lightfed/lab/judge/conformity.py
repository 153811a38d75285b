"""A selection of the conformance kit, which a new method has to pass before it is judged.

It has the kit's small federation on one and two ranks, and stops and resumes it in both directions:
three seconds of CPU time.
"""

from __future__ import annotations

import json
import os
import re
import sys
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from lightfed.lab.judge.contender import Contender, class_of
from lightfed.testing.case import Case
from lightfed.testing.conformance import check
from lightfed.testing.ranks import PACKAGE, call_alone
from lightfed.testing.worker import Plan, run
from lightfed.utils.errors import UserError

RANKS = (1, 2)
_MOVES = ((2, 1), (1, 2))
_CASES = ("once", "again")

_FORK = get_context("fork")


class NotConforming(UserError):
    """A method breaks what lightfed promises of every method, or cannot train at all."""

    status = 3


def check_conformity(contender: Contender, log: Path) -> None:
    """Run the selection of the kit, in child processes.

    Args:
        contender: The method.
        log: The file for what it prints. It is removed if the method passes.

    Raises:
        NotConforming: It says how the method fails.
        SystemExit: A signal ended the children.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as name:
        folder = Path(name)
        child = _FORK.Process(target=_begin, args=(contender.path, folder, log))
        child.start()
        child.join()

        fault = None
        if child.exitcode:
            if child.exitcode < 0:
                raise SystemExit(128 - child.exitcode)
            fault = _last_error(log.read_text("utf-8", "replace"))
        else:
            fault = _difference(folder)

    if fault is None:
        log.unlink()
        return
    fix = f"see docs/howto/algorithm.md; what it printed is in {log}"
    raise NotConforming(f"conformance of {contender.name}", fault, fix)


def _plan(kind: type) -> Plan:
    """Return the runs of the selection."""
    case = Case(kind)
    return Plan(dict.fromkeys(_CASES, case), RANKS, _MOVES)


def _begin(path: str, folder: Path, log: Path) -> None:
    """Run the selection for the class of a path in this process, a child, and end it."""
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    descriptor = sys.stdout.fileno()
    surroundings = (dict(os.environ), list(sys.path), descriptor, descriptor)
    call_alone(*surroundings, PACKAGE, _run, path, folder)


def _run(path: str, folder: Path) -> None:
    """Run the selection for the class of a path; it forks the ranks."""
    run(_plan(class_of(path, "judge")), folder)


def _difference(folder: Path) -> str | None:
    """Return which bits differ between runs whose digests are in a folder; None if all agree."""
    digests = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    plan = _plan(object)
    for name in plan.cases:
        try:
            check(plan, name, digests)
        except AssertionError as error:
            _, _, what = str(error).partition(", ")
            return what
    return None


def _last_error(printed: str) -> str:
    """Return the last error among what ranks have printed."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    for line in reversed(lines):
        error = re.match(r"(?:[a-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Exit)?: .+)", line)
        if error is not None:
            return error[1].removeprefix("UserError: ")
    return lines[-1] if lines else "its processes ended without a word"
