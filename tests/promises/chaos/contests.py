"""Commands of many runs, which are struck at a random moment and given again.

A command is forked from this process, which has imported everything. The moment of a strike is a
round of one of its runs, and a random part of a second. What its runs have trained is in a file.
"""

import csv
import fcntl
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as L
import yaml  # type: ignore[import-untyped]
from typing_extensions import override

from lightfed.cli.command_line import main
from lightfed.utils.record import read_record
from tests.forked import forked
from tests.promises.refusals.mistakes import edited

ROUNDS = 4
PATIENCE = 280.0  # seconds for a command that takes about five
LATEST = 0.3  # seconds after the round that a strike follows
STOPPED = 1.0  # seconds for which a command is stopped, and goes on
OF_THE_MACHINE = ("seconds", "wire_bytes")
TRAINED = "trained.txt"  # a line for each round that a run has begun


class Begun(L.Callback):
    """Notes each round that a run begins: its name, its seed and the round."""

    hears = "rounds"

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        run = f"{trainer.run_logger.place.base}-{trainer.run_logger.place.config}"
        line = f"{run} {pl_module.seed} {trainer.current_epoch}\n"
        descriptor = os.open(TRAINED, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(descriptor, line.encode())
        os.close(descriptor)


class Kind(NamedTuple):
    """A way to strike.

    Attributes:
        number: The signal.
        whole: Whether the trainings of the command get it too, as from a terminal.
        ends: Whether the command ends; otherwise it goes on after a while.
    """

    number: signal.Signals
    whole: bool
    ends: bool = True


KINDS = {
    "the command is killed": Kind(signal.SIGKILL, whole=False),
    "all is killed": Kind(signal.SIGKILL, whole=True),
    "the command is ended": Kind(signal.SIGTERM, whole=False),
    "a terminal interrupts": Kind(signal.SIGINT, whole=True),
    "all is stopped for a while": Kind(signal.SIGSTOP, whole=True, ends=False),
}

SMALL = {
    "trainer.max_epochs": ROUNDS,
    "trainer.enable_page": False,
    "trainer.callbacks": [{"class_path": f"{__name__}.Begun"}],
}
COMMANDS = {
    "sweep": ["sweep", "list.sweep", "--jobs", "2"],
    "compare": ["compare", "a.yaml", "b.yaml", "--seeds", "0-1", "--jobs", "2", "--json"],
    "study": ["study", "study.yaml", "--markdown"],
}
RUNS = {"sweep": 3, "compare": 4, "study": 8}  # of the study: 4 of a search, and 4
JOBS = {"sweep": 2, "compare": 2, "study": 1}


def write_files() -> None:
    """What the commands read, into this folder."""
    a = edited(SMALL)
    Path("a.yaml").write_text(a)
    Path("b.yaml").write_text(edited(SMALL | {"model.optimizer.init_args.lr": 0.1}))
    lines = [f"fit --config a.yaml --model.seed={seed}" for seed in range(RUNS["sweep"])]
    Path("list.sweep").write_text("\n".join(lines))
    study = {
        "title": "two rates",
        "seconds": 1,
        "seeds": "0-1",
        "metric": "train_loss",
        "columns": ["train_loss"],
        "tune": {"model.local_epochs": [1, 2]},
        "tune_seed": "100",
        "common": yaml.safe_load(a),
        "methods": {"low": {}, "high": {"model.optimizer.init_args.lr": 0.1}},
        "claims": [{"better": "low", "than": "high", "metric": "train_loss"}],
    }
    Path("study.yaml").write_text(yaml.safe_dump(study))


def start(name: str, output: str) -> int:
    """Give a command in a process group of its own; its process."""

    def become() -> None:
        os.setsid()
        for descriptor, path in ((1, output), (2, f"{output}.err")):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), descriptor)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        sys.argv = ["lightfed", *COMMANDS[name]]
        try:
            main()
        except SystemExit as left:
            sys.stdout.flush()
            os._exit(int(left.code or 0))

    return forked(become)


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < limit, "the command hangs"
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Whether a process of ours has ended; its status is kept."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait(pid: int) -> int:
    """The status of a process of ours, which ends by itself."""
    until(lambda: has_ended(pid))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def is_gone(group: int) -> bool:
    """Whether no process is left of a command."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def is_locked(path: Path) -> bool:
    """Whether a process has the lock of a run."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def rounds_begun() -> Counter[str]:
    """How often each round of each run was begun."""
    try:
        return Counter(Path(TRAINED).read_text().splitlines())
    except FileNotFoundError:
        return Counter()


def strike(kind: Kind, pid: int, draw: random.Random, name: str) -> bool:
    """Strike a command at a random moment of its work; whether it was at work then."""
    moment = draw.randrange(RUNS[name] * ROUNDS)
    until(lambda: rounds_begun().total() >= moment or has_ended(pid))
    time.sleep(draw.random() * LATEST)
    if has_ended(pid):
        return False

    hit = os.killpg if kind.whole else os.kill
    hit(pid, kind.number)
    if not kind.ends:
        time.sleep(STOPPED)
        os.killpg(pid, signal.SIGCONT)
    return True


class Result(NamedTuple):
    """What is left of a command: its runs' tables by name and seed, and what it has printed."""

    tables: dict[tuple[str, int], list[dict[str, str]]]
    printed: str


def result(name: str, output: str) -> Result:
    """Read what finished runs have in this folder; fails if one of them is there twice."""
    tables: dict[tuple[str, int], list[dict[str, str]]] = {}
    for folder in sorted(Path("runs").glob("*/")):
        stated: Any = read_record(folder)
        if "finished" not in stated:
            continue  # a run that was struck before its first checkpoint is begun again
        run = (f"{stated['name']} {stated['config']}", stated["seed"])
        assert run not in tables, f"{run} was trained twice"
        tables[run] = rows_of(folder / "metrics.csv")
    return Result(tables, plain(name, Path(output).read_text()))


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a table, without what depends on the machine."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k not in OF_THE_MACHINE} for row in rows]


def plain(name: str, printed: str) -> str:
    """What a command has printed, without the seconds that it took, and the commit and the day."""
    if name == "sweep":
        return ""  # which run it has found finished depends on the strike
    if name == "compare":
        answer = json.loads(printed)
        assert answer["rows"].pop("seconds")
        answer.pop("commit")
        return json.dumps(answer)
    _, *lines = printed.splitlines()
    return re.sub(r"[\d.,]+ (ms|s|min|h)\b", "SECONDS", "\n".join(lines))
