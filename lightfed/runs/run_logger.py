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
from lightfed.utils.errors import FULL, DiskError, UserError, repair, tracebacks
from lightfed.utils.keys import COLUMNS
from lightfed.utils.stopwatch import Part
from lightfed.utils.yaml_text import config_text

_TABLES = ("metrics", "clients", "timings")

log = logging.getLogger(__name__)


class _Tracebacks(logging.Handler):
    """Writes tracebacks to error.log in the run folder, or in the cache if there is no run folder.

    Attributes:
        path: The file that was written last; None if there is none.
    """

    def __init__(self, logger: "RunLogger") -> None:
        super().__init__()
        self._logger = logger
        self.path: Path | None = None

    @override
    def emit(self, record: logging.LogRecord) -> None:
        has_run_folder = self._logger.claimed and self._logger.folder.is_dir()
        if has_run_folder:
            path = self._logger.folder / "error.log"
            mode = "a"
        else:
            # All runs share this file, so it holds the last error only.
            path = cache_folder() / "error.log"
            mode = "w"

        # The error itself is reported in any case; the disk may be full.
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open(mode) as file:
                file.write(f"{self.format(record)}\n")
            self.path = path


class RunLogger(Logger):
    """Writes the run folder that `RunFolder` chooses.

    Rows are known by their round: if a round is repeated after a restart, its row is replaced.

    Args:
        save_dir: The folder of all runs.
        name: The name of this run; a resumed run continues in its folder. By default the trainer
            names it.

    Attributes:
        place: The run folder.
    """

    def __init__(self, save_dir: str = "runs", name: str | None = None) -> None:
        super().__init__()
        self._is_named = name is not None
        base = "run" if name is None else name
        check_name("trainer.logger.init_args.name", base)
        self.place = RunFolder(Path(save_dir).expanduser(), base, job=job_of(os.environ))

        # The rows of metrics.csv by round, counted from 1.
        self._row_of_round: dict[int, Row] = {}

        # The last round whose row is on disk.
        self._last_written = 0

        # What was logged without a step, for the row of the round that ends next.
        self._without_step: dict[str, Any] = {}

    def name_run(self, *words: str) -> None:
        """Name a run that was given no name.

        Args:
            words: The words of the name, such as the algorithm, the data set and the seed.
        """
        if not self._is_named and not self.claimed:
            self.place.base = re.sub(r"[^\w.-]+", "-", "-".join(words))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Report errors of the disk in one line, and keep the tracebacks of errors, in a block.

        Raises:
            DiskError: The disk is full or broken.
        """
        handler = _Tracebacks(self)
        tracebacks.addHandler(handler)
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            tracebacks.debug("the run has failed", exc_info=error)
            if handler.path is not None:
                error.add_note(f"its traceback is in {handler.path}")

            if not isinstance(error, OSError) or not self._is_about_run_folder(error):
                raise
            path = error.filename or (self.folder if self.claimed else self.save_dir)
            raise DiskError(
                key="trainer.default_root_dir",
                found=f"{path} cannot be written ({error.strerror})",
                fix=f"{repair(error)} and run the same command again; "
                "a checkpoint that is there is complete",
            ) from error
        finally:
            tracebacks.removeHandler(handler)

    def _is_about_run_folder(self, error: OSError) -> bool:
        if error.filename is not None:
            return Path(error.filename).is_relative_to(self.place.save_dir)
        # An error in writing to an open file names no file. A run writes to its own folder.
        return error.errno in (errno.EIO, *FULL)

    @property
    def claimed(self) -> bool:
        """Whether the run has chosen its folder."""
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

    @cached_property
    def _tables(self) -> dict[str, RunTable]:
        return {name: RunTable(self.folder / f"{name}.csv") for name in _TABLES}

    def check(self) -> None:
        """Read the tables of a run that resumes, before anything is written; on rank 0.

        Raises:
            UserError: A table is damaged.
        """
        if not self.place.resumed:
            return
        for table in self._tables.values():
            read_rows(table.path)

    @rank_zero_only
    def start(self, environment: Mapping[str, Any], *, finished_rounds: int) -> None:
        """Write environment.json, and remove rows of rounds that this run repeats.

        Args:
            environment: The record of the run, without what its folder adds.
            finished_rounds: The number of rounds before those that this run trains.
        """
        self.place.describe(environment)
        for name, table in self._tables.items():
            rows = read_rows(table.path, finished_rounds)
            if name == "metrics":
                self._row_of_round = {int(row["round"]): row for row in rows}
                self._last_written = max(self._row_of_round, default=0)
                table.columns = ["round"]
            if rows:
                table.write(rows)

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Write the whole configuration to config.yaml, and what a user logs to hparams.yaml."""
        values = dict(params if isinstance(params, Mapping) else vars(params))
        is_configuration = {"trainer", "model", "data"} <= values.keys()

        text = config_text(values)
        name = CONFIG if is_configuration else "hparams.yaml"
        write_atomically(self.folder / name, lambda file: file.write(text.encode()))

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add metrics to the row of a round; an evaluation without a run writes none.

        Args:
            metrics: The values by name.
            step: The number of rounds before this one. None for the round that ends next, or for
                the last one.

        Raises:
            UserError: A callback has logged another value for one of lightfed's own columns.
        """
        if not self.claimed:
            return

        values: dict[str, Any] = {}
        for name, value in metrics.items():
            values[name] = value.item() if isinstance(value, Tensor) else value

        if step is None:
            self._without_step |= values
            return

        number = step + 1
        row = self._row_of_round.setdefault(number, {"round": number})
        for name in COLUMNS.keys() & values.keys() & row.keys():
            if values[name] != row[name]:
                raise UserError(
                    key="trainer.logger",
                    found=f"{values[name]} and {row[name]} for {name}, "
                    "a column of lightfed's own tables",
                    fix="log the metric under another name",
                )

        # Lightning logs `epoch` with everything; it is the round.
        new_values = {}
        for name, value in values.items():
            if name != "epoch" and row.get(name) != value:
                new_values[name] = value

        row.update(new_values)
        self._tables["metrics"].add_columns(row)
        if new_values and number <= self._last_written:
            # A callback logs after the row was written.
            self._tables["metrics"].write(self._rows_until(self._last_written))

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Remove the folder of a run that failed in its first round, if it was not suspended."""
        if status == "failed" and self._last_written == 0:
            self.place.give_up()
        if status == "success" and self._last_written > 0:
            self._add_values_without_step(self._last_written)

    def _add_values_without_step(self, number: int) -> None:
        """Put what was logged without a step into the row of a round."""
        values = self._without_step
        self._without_step = {}
        if values:
            self.log_metrics(values, number - 1)

    @rank_zero_only
    def log_clients(self, rows: list[Row]) -> None:
        """Append the rows of one evaluation to clients.csv.

        Raises:
            TakenOver: The run continues in another process. It ends the other ranks, too.
        """
        self.place.check()
        if rows:
            self._tables["clients"].append(rows, self._tables["clients"].rows)

    @rank_zero_only
    def log_timings(self, number: int, seconds: Mapping[Part, float]) -> None:
        """Append a row to timings.csv; called after the round's checkpoint, in the next round.

        Args:
            number: The number of the round.
            seconds: The seconds that each part of the round has taken.
        """
        if number not in self._row_of_round:
            return

        row: Row = {"round": number}
        for part, duration in seconds.items():
            row[part] = round(duration, 6)

        with suppress(run_lock.TakenOver):  # the next round raises it
            self.place.check()
            self._tables["timings"].append([row], self._tables["timings"].rows)

    @rank_zero_only
    def log_arrays(self, number: int, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace the files of an algorithm's arrays.

        Args:
            number: The number of the round after which the arrays are written.
            files: The arrays of each file by name; `<name>.npz` is written.
        """
        for name, tensors in files.items():
            arrays: dict[str, Any] = {key: value.cpu().numpy() for key, value in tensors.items()}
            save = partial(np.savez, round=np.array(number), **arrays)
            write_atomically(self.folder / f"{name}.npz", save)

    @rank_zero_only
    def end_round(self, number: int) -> None:
        """Write the row of a finished round to metrics.csv.

        Raises:
            TakenOver: The run continues in another process. It ends the other ranks, too.
        """
        self.place.check()
        self._add_values_without_step(number)
        if number in self._row_of_round:
            rows_before = partial(self._rows_until, number - 1)
            self._tables["metrics"].append([self._row_of_round[number]], rows_before)
            self._last_written = number

    def _rows_until(self, last: int) -> list[Row]:
        """Return the rows of the rounds up to one, in order."""
        return [self._row_of_round[n] for n in sorted(self._row_of_round) if n <= last]
