"""The run folder as a Lightning logger.

Metrics.csv, clients.csv, environment.json, and where checkpoints go.
"""

import csv
import errno
import io
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightfed.distributed.collectives import Ranks
from lightfed.distributed.slurm import job_of
from lightfed.runs.run_folder import RunFolder, check_name
from lightfed.utils.atomic_io import write_atomically
from lightfed.utils.errors import DiskError

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
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
Row = dict[str, float | int | str]


class RunLogger(Logger):
    """Writes the run folder that `RunFolder` chooses.

    Rows are keyed by round: a round that is repeated after a restart replaces its row.

    Args:
        save_dir: folder of all runs.
        name: of this run; a resumed run continues in its folder.
    """

    def __init__(self, save_dir: str = "runs", name: str = "run") -> None:
        super().__init__()
        check_name("trainer.logger.init_args.name", name)
        self.place = RunFolder(Path(save_dir), name, job=job_of(os.environ))
        self._rounds: dict[int, Row] = {}
        self._columns = ["round"]
        self._client_columns: list[str] = []  # of the file on disk
        self._ended = 0  # rounds whose rows are on disk
        self._written: list[str] = []  # columns of the file on disk

    # The folder.

    def claim(self, ranks: Ranks) -> None:
        """Agree on a folder, the same on every rank; idempotent.

        Raises:
            UserError: it cannot be created, or ranks find different runs to resume.
        """
        self.place.claim(ranks)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Report a full or broken disk in one line.

        Raises:
            DiskError: the block could not write to the run folder.
        """
        try:
            yield
        except OSError as error:
            name = error.filename  # errors of an open file do not name it
            elsewhere = name is not None and not Path(name).is_relative_to(self.place.save_dir)
            if error.errno not in _DISK or elsewhere:
                raise
            where = name or (self.folder if self.claimed else self.save_dir)
            found = f"{where} cannot be written ({error.strerror})"
            fix = "free space and run the same command again; the last checkpoint is complete"
            raise DiskError("trainer.default_root_dir", found, fix) from error

    @property
    def claimed(self) -> bool:
        """Whether the run has its folder."""
        return self.place.name is not None

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.place.path

    @property
    @override
    def name(self) -> str:
        return self.place.name or self.place.base

    @property
    @override
    def version(self) -> str:
        return ""

    @property
    @override
    def save_dir(self) -> str:
        return str(self.place.save_dir)

    @property
    @override
    def log_dir(self) -> str:
        return str(self.folder)

    # Writing.

    @rank_zero_only
    def start(self, environment: Mapping[str, Any], *, finished_rounds: int) -> None:
        """Write environment.json; keep the rows of rounds that a resumed run does not repeat."""
        self.place.describe(environment)
        rounds = _read(self.folder / "metrics.csv", finished_rounds) if self.place.resumed else []
        self._rounds = {int(row["round"]): row for row in rounds}
        self._columns = ["round"]
        for row in rounds:
            self._add_columns(row)
        clients = self.folder / "clients.csv"
        rows = _read(clients, finished_rounds) if self.place.resumed else []
        if rounds:
            self._ended = max(self._rounds)
            self._write_all()
        if rows:
            self._client_columns = list(rows[0])
            self._write_clients(rows)

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the whole configuration is in config.yaml."""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Merge into the row of round `step` + 1."""
        number = (step or 0) + 1
        row = self._rounds.setdefault(number, {"round": number})
        new = {k: v for k, v in metrics.items() if k != "epoch" and row.get(k) != v}
        row.update(new)
        self._add_columns(new)
        if new and number <= self._ended:  # a callback's metric, after the round was written
            self._write_all()

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Remove the folder of a run that failed (but was not suspended) in its first round."""
        if status == "failed" and not self._ended:
            self.place.give_up()

    @rank_zero_only
    def finish(self, rounds: int, limits: Mapping[str, Any]) -> None:
        """Record that the run has finished; see `RunFolder.finished_rounds`."""
        self.place.finish(rounds, limits)

    def log_clients(self, rows: list[Row]) -> None:
        """Append the rows of one evaluation to clients.csv; called by every rank.

        Raises:
            TakenOver: on every rank, if the run continues in another process.
        """
        self.place.check_owner()
        self._append_clients(rows)

    @rank_zero_only
    def _append_clients(self, rows: list[Row]) -> None:
        if not rows:
            return
        path = self.folder / "clients.csv"
        new = {key: None for row in rows for key in row if key not in self._client_columns}
        if new:  # in the first evaluation, or for a metric that is new
            before = _read(path, sys.maxsize) if self._client_columns else []
            self._client_columns += new
            self._write_clients(before + rows)
        else:
            with path.open("a", newline="") as file:
                csv.DictWriter(file, self._client_columns, restval="").writerows(rows)

    @rank_zero_only
    def log_arrays(self, number: int, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace `<name>.npz` by an algorithm's arrays after round `number`."""
        for name, arrays in files.items():
            values: dict[str, Any] = {key: value.cpu().numpy() for key, value in arrays.items()}
            save = partial(np.savez, round=np.array(number), **values)
            write_atomically(self.folder / f"{name}.npz", save)

    def end_round(self, number: int) -> None:
        """Write the finished round's row to disk; called by every rank.

        Raises:
            TakenOver: on every rank, if the run continues in another process.
        """
        self.place.check_owner()
        self._append_round(number)

    @rank_zero_only
    def _append_round(self, number: int) -> None:
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

    def _write_clients(self, rows: list[Row]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._client_columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.folder / "clients.csv", lambda f: f.write(text.getvalue().encode()))


def _read(path: Path, rounds: int) -> list[Row]:
    """Complete rows of the first `rounds` rounds.

    The truncated last line of a killed run is dropped.
    """
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows: Iterable[dict[str, Any]] = list(csv.DictReader(file))
    return [row for row in rows if None not in row.values() and int(row["round"]) <= rounds]


def software() -> dict[str, str]:
    """Versions and the commit, on which a result depends besides its configuration."""
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
