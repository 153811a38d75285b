"""The run folder as a Lightning logger: its tables, environment.json, and where checkpoints go."""

import errno
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightfed.distributed.slurm import job_of
from lightfed.runs import run_lock
from lightfed.runs.run_folder import CONFIG, RunFolder, check_name
from lightfed.runs.run_table import Row, RunTable, read_rows
from lightfed.utils.atomic_io import write_atomically
from lightfed.utils.cache import cache_folder
from lightfed.utils.errors import FULL, DiskError, UserError, repair, require, tracebacks
from lightfed.utils.keys import COLUMNS
from lightfed.utils.stopwatch import Part
from lightfed.utils.yaml_text import config_text

_TABLES = ("metrics", "clients", "timings")
_KEPT = " and run the same command again; a checkpoint that is there is complete"
log = logging.getLogger(__name__)


class _Tracebacks(logging.Handler):
    """Appends to error.log in the run folder; replaces that of the cache if there is none left."""

    def __init__(self, logger: "RunLogger") -> None:
        super().__init__()
        self._logger = logger
        self.path: Path | None = None  # last written

    @override
    def emit(self, record: logging.LogRecord) -> None:
        here = self._logger.claimed and self._logger.folder.is_dir()
        path = (self._logger.folder if here else cache_folder()) / "error.log"
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a" if here else "w") as file:
                file.write(f"{self.format(record)}\n")
            self.path = path


class RunLogger(Logger):
    """Writes the run folder that `RunFolder` chooses.

    Rows are keyed by round: a round that is repeated after a restart replaces its row.

    Args:
        save_dir: folder of all runs.
        name: of this run; a resumed run continues in its folder. By default the trainer names it.
    """

    def __init__(self, save_dir: str = "runs", name: str | None = None) -> None:
        super().__init__()
        self._named = name is not None
        base = "run" if name is None else name
        check_name("trainer.logger.init_args.name", base)
        self.place = RunFolder(Path(save_dir).expanduser(), base, job=job_of(os.environ))
        self._rounds: dict[int, Row] = {}
        self._ended = 0  # rounds whose rows are on disk
        self._waiting: dict[str, Any] = {}  # logged without a step

    def name_run(self, *words: str) -> None:
        """Name a run that was given no name: `<algorithm>-<dataset>-s<seed>`."""
        if not (self._named or self.claimed):
            self.place.base = re.sub(r"[^\w.-]+", "-", "-".join(words))

    # The folder.

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Report a full or broken disk in one line, as a DiskError; keep tracebacks of errors."""
        kept = _Tracebacks(self)
        tracebacks.addHandler(kept)
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            tracebacks.debug("the run has failed", exc_info=error)
            if kept.path is not None:
                error.add_note(f"its traceback is in {kept.path}")
            if not isinstance(error, OSError):
                raise
            name = error.filename  # errors of an open file do not name it
            ours = name is not None and Path(name).is_relative_to(self.place.save_dir)
            if not ours and (name is not None or error.errno not in (errno.EIO, *FULL)):
                raise
            where = name or (self.folder if self.claimed else self.save_dir)
            found = f"{where} cannot be written ({error.strerror})"
            raise DiskError("trainer.default_root_dir", found, f"{repair(error)}{_KEPT}") from error
        finally:
            tracebacks.removeHandler(kept)

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

    @cached_property
    def _tables(self) -> dict[str, RunTable]:
        return {name: RunTable(self.folder / f"{name}.csv") for name in _TABLES}

    def check(self) -> None:
        """Read the tables of a run that resumes, before anything is written; on rank 0."""
        for table in self._tables.values() if self.place.resumed else ():
            read_rows(table.path)

    @rank_zero_only
    def start(self, environment: Mapping[str, Any], *, finished_rounds: int) -> None:
        """Write environment.json; keep the rows of rounds that this run does not repeat."""
        self.place.describe(environment)
        for name, table in self._tables.items():
            rows = read_rows(table.path, finished_rounds)
            if name == "metrics":
                self._rounds = {int(row["round"]): row for row in rows}
                self._ended = max(self._rounds, default=0)
                table.columns = ["round"]
            if rows:
                table.write(rows)

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Write the whole configuration to config.yaml, and what a user logs to hparams.yaml."""
        given = dict(params if isinstance(params, Mapping) else vars(params))
        text = config_text(given)
        name = CONFIG if {"trainer", "model", "data"} <= given.keys() else "hparams.yaml"
        write_atomically(self.folder / name, lambda file: file.write(text.encode()))

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Merge into the row of round `step` + 1; an evaluation without a run writes none.

        Without a step it is the row of the round that ends next, or of the last one. A UserError if
        a callback has logged another value of one of lightfed's own columns.
        """
        if not self.claimed:
            return
        plain = {k: v.item() if isinstance(v, Tensor) else v for k, v in metrics.items()}
        if step is None:
            self._waiting |= plain
            return
        number = step + 1
        row = self._rounds.setdefault(number, {"round": number})
        for name in COLUMNS.keys() & plain.keys() & row.keys():
            found = f"{plain[name]} and {row[name]} for {name}, a column of lightfed's own tables"
            fix = "log the metric under another name"
            require(plain[name] == row[name], "trainer.logger", found, fix)
        new = {k: v for k, v in plain.items() if k != "epoch" and row.get(k) != v}
        row.update(new)
        self._tables["metrics"].add_columns(row)
        if new and number <= self._ended:  # a callback's metric, after the round was written
            self._tables["metrics"].write(self._rows_until(self._ended))

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Remove the folder of a run that failed (but was not suspended) in its first round."""
        if status == "failed" and not self._ended:
            self.place.give_up()
        if status == "success" and self._ended:
            self._place(self._ended)

    def _place(self, number: int) -> None:
        """Put what was logged without a step into a round's row."""
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self.log_metrics(waiting, number - 1)

    @rank_zero_only
    def log_clients(self, rows: list[Row]) -> None:
        """Append the rows of one evaluation to clients.csv.

        Raises TakenOver, which ends the other ranks, if the run continues in another process.
        """
        self.place.check()
        if rows:
            self._tables["clients"].append(rows, self._tables["clients"].rows)

    @rank_zero_only
    def log_timings(self, number: int, seconds: Mapping[Part, float]) -> None:
        """Append a row to timings.csv; called after the round's checkpoint, in the next round.

        `seconds` are those of the parts of round `number`.
        """
        if number not in self._rounds:
            return
        with suppress(run_lock.TakenOver):  # the next round raises it
            self.place.check()
            row: Row = {"round": number, **{name: round(s, 6) for name, s in seconds.items()}}
            self._tables["timings"].append([row], self._tables["timings"].rows)

    @rank_zero_only
    def log_arrays(self, number: int, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace `<name>.npz` by an algorithm's arrays after round `number`."""
        for name, arrays in files.items():
            values: dict[str, Any] = {key: value.cpu().numpy() for key, value in arrays.items()}
            save = partial(np.savez, round=np.array(number), **values)
            write_atomically(self.folder / f"{name}.npz", save)

    @rank_zero_only
    def end_round(self, number: int) -> None:
        """Write the finished round's row to disk.

        Raises TakenOver, which ends the other ranks, if the run continues in another process.
        """
        self.place.check()
        self._place(number)
        if number in self._rounds:
            before = partial(self._rows_until, number - 1)
            self._tables["metrics"].append([self._rounds[number]], before)
            self._ended = number

    def _rows_until(self, number: int) -> list[Row]:
        return [self._rounds[n] for n in sorted(self._rounds) if n <= number]
