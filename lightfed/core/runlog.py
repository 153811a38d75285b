"""The run folder as a Lightning logger.

Metrics.csv, clients.csv, environment.json, and where checkpoints go.
"""

import csv
import io
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightfed.comm.collectives import Ranks
from lightfed.core.checkpoint import write_atomically
from lightfed.utils.errors import UserError

_PACKAGES = (
    "lightfed",
    "torch",
    "torchvision",
    "torchaudio",
    "lightning",
    "torchmetrics",
    "triton",
    "numpy",
)
Row = dict[str, float | int | str]


class RunLogger(Logger):
    """Writes `<save_dir>/<name>/`.

    A name that is taken gets a number, so that nothing is ever overwritten.

    Rows are keyed by round: a round that is replayed after a restart replaces its row.

    Args:
        save_dir: folder of all runs.
        name: of this run; a resumed run goes on in its own folder.
    """

    def __init__(self, save_dir: str = "runs", name: str = "run") -> None:
        super().__init__()
        check_name("trainer.logger.init_args.name", name)
        self._save_dir = Path(save_dir)
        self._base = name
        self._name: str | None = None
        self._resumed = False
        self._created = False
        self._started = False
        self._missing: list[Path] = []  # folders above the run's that this run made, from inside
        self._rounds: dict[int, Row] = {}
        self._columns = ["round"]
        self._clients: list[Row] = []
        self._ended = 0  # rounds whose rows are on disk
        self._written: list[str] = []  # columns of the file on disk

    # Which folder.

    def claim(self, ranks: Ranks) -> None:
        """Settle on a folder, the same on every rank; idempotent."""
        if self._name is None:
            self._name = ranks.first(self._create)
        if ranks.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)

    def _create(self) -> str:
        """A folder of our own: mkdir fails where another run has just made it."""
        self._missing = [p for p in (self._save_dir, *self._save_dir.parents) if not p.exists()]
        number = 1
        while True:
            name = self._base if number == 1 else f"{self._base}-{number}"
            try:
                (self._save_dir / name).mkdir(parents=True)
            except FileExistsError:
                number += 1
            except OSError as error:
                found = f"{self._save_dir / name} cannot be made ({error.strerror})"
                fix = "name a folder that can be written to"
                raise UserError("trainer.default_root_dir", found, fix) from error
            else:
                self._created = True
                return name

    def resume_newest(self) -> Path | None:
        """last.ckpt of the newest run of this name, in whose folder the run then goes on.

        None if there is none.
        """
        runs = [
            path
            for path in self._save_dir.glob("*/checkpoints/last.ckpt")
            if self._is_of_this_name(path.parents[1])
        ]
        if not runs:
            return None
        return self.resume_from(max(runs, key=lambda path: path.stat().st_mtime_ns))

    def _is_of_this_name(self, path: Path) -> bool:
        folder = path.name
        told = path / "environment.json"
        if told.is_file() and json.loads(told.read_text()).get("name") != self._base:
            return False
        rest = folder.removeprefix(self._base)
        return folder.startswith(self._base) and (
            not rest or (rest[1:].isdigit() and rest[0] == "-")
        )

    def resume_from(self, ckpt_path: Any) -> Path:
        """Go on in the folder of a checkpoint, if it lies in one of `save_dir`."""
        path = Path(ckpt_path)
        folder = path.parent.parent
        if (
            folder.parent.resolve() == self._save_dir.resolve()
            and path.parent.name == "checkpoints"
        ):
            self._name = folder.name
            self._resumed = True
        return path

    @property
    def claimed(self) -> bool:
        """Whether the run has its folder."""
        return self._name is not None

    @property
    def folder(self) -> Path:
        """The run folder."""
        assert self._name is not None, "the folder is claimed when the ranks are up"
        return self._save_dir / self._name

    @property
    @override
    def name(self) -> str:
        return self._name or self._base

    @property
    @override
    def version(self) -> str:
        return ""

    @property
    @override
    def save_dir(self) -> str:
        return str(self._save_dir)

    @property
    @override
    def log_dir(self) -> str:
        return str(self.folder)

    # What is written.

    @rank_zero_only
    def start(self, environment: Mapping[str, Any], *, finished_rounds: int) -> None:
        """Write environment.json.

        Keep the rows of the rounds that a resumed run does not repeat.
        """
        self._started = True
        content = json.dumps({"name": self._base, **environment}, indent=1, default=str) + "\n"
        write_atomically(self.folder / "environment.json", lambda f: f.write(content.encode()))
        rounds = _read(self.folder / "metrics.csv", finished_rounds) if self._resumed else []
        self._rounds = {int(row["round"]): row for row in rounds}
        self._columns = ["round"]
        for row in rounds:
            self._add_columns(row)
        self._clients = _read(self.folder / "clients.csv", finished_rounds) if self._resumed else []
        if rounds:
            self._ended = max(self._rounds)
            self._write_all()
        if self._clients:
            self._write_clients("w", self._clients)

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the whole configuration is in config.yaml."""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Merge into the row of round `step` + 1."""
        number = (step or 0) + 1
        row = self._rounds.setdefault(number, {"round": number})
        new = {k: v for k, v in metrics.items() if k != "epoch" and row.get(k) != v}
        row.update(new)
        self._add_columns(new)
        if new and number <= self._ended:  # a callback's figure, after the round was written
            self._write_all()

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        """A run that failed before its first round leaves no folder."""
        if status == "failed" and self._created and not self._started:
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):  # another run may have begun in it
                for folder in self._missing:
                    folder.rmdir()

    @rank_zero_only
    def log_clients(self, rows: list[Row]) -> None:
        """Append the rows of one evaluation to clients.csv."""
        fresh = not self._clients
        self._clients = rows[-1:] or self._clients
        self._write_clients("w" if fresh else "a", rows)

    @rank_zero_only
    def log_arrays(self, number: int, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace `<name>.npz` by what an algorithm has found after round `number`."""
        for name, arrays in files.items():
            values: dict[str, Any] = {key: value.cpu().numpy() for key, value in arrays.items()}
            save = partial(np.savez, round=np.array(number), **values)
            write_atomically(self.folder / f"{name}.npz", save)

    @rank_zero_only
    def end_round(self, number: int) -> None:
        """Put the finished round's row on disk."""
        if number in self._rounds:
            self._ended = number
            if self._written != self._columns:
                self._write_all()
            else:
                with (self.folder / "metrics.csv").open("a", newline="") as file:
                    self._writer(file).writerow(self._rounds[number])

    def _add_columns(self, row: Mapping[str, Any]) -> None:
        self._columns += [key for key in row if key not in self._columns]

    def _writer(self, file: Any) -> "csv.DictWriter[str]":
        return csv.DictWriter(file, self._columns, restval="")

    def _write_all(self) -> None:
        text = io.StringIO()
        writer = self._writer(text)
        writer.writeheader()
        writer.writerows(self._rounds[n] for n in sorted(self._rounds) if n <= self._ended)
        self._written = list(self._columns)
        write_atomically(self.folder / "metrics.csv", lambda f: f.write(text.getvalue().encode()))

    def _write_clients(self, mode: str, rows: list[Row]) -> None:
        if not rows:
            return
        with (self.folder / "clients.csv").open(mode, newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), restval="", extrasaction="ignore")
            if mode == "w":
                writer.writeheader()
            writer.writerows(rows)


def check_name(key: str, name: str) -> None:
    """Refuse a name that is no plain folder name.

    Raises:
        UserError: naming the key.
    """
    if name in ("", "..") or Path(name).name != name or "\0" in name:
        raise UserError(key, repr(name), "give a plain folder name")


def _read(path: Path, rounds: int) -> list[Row]:
    """Whole rows of the first `rounds` rounds.

    The torn last line of a killed run is none of them.
    """
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows: Iterable[dict[str, Any]] = list(csv.DictReader(file))
    return [row for row in rows if None not in row.values() and int(row["round"]) <= rounds]


def software() -> dict[str, str]:
    """Versions and the commit: what a result depends on besides its configuration."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions | {"commit": _commit(), "command": " ".join(sys.argv)}


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
