"""What the words of `lightfed fit` ask for, and whether a folder has it already."""

from __future__ import annotations

import glob
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lightfed.utils.code_files import edited
from lightfed.utils.errors import UserError
from lightfed.utils.keys import digest, flat, identity
from lightfed.utils.record import read_record

LOGS = ".logs"  # beside the runs: output of runs that failed

# The key that says when clients are tested. If it is not given, the algorithm decides.
_EVALUATE_AT = "model.evaluate_at"


class Wanted(NamedTuple):
    """A run that is known from its command alone.

    Attributes:
        words: The words of the command, `fit` first.
        root: The folder of all runs.
        name: The name of the run's folder, which a number can follow.
        options: The values of its configuration that results depend on, by dotted keys.
        limits: The limits on its rounds and time.
        ranks: The number of processes that it starts.
        values: Its whole configuration by dotted keys, with the moment of its tests.
        files: The digests of the files that it was read from, by their paths. None if it is not
            known which these are.
        pause: The round after which the command stops for now; None if it runs to its end.
    """

    words: tuple[str, ...]
    root: Path
    name: str
    options: Mapping[str, Any]
    limits: Mapping[str, Any]
    ranks: int
    values: Mapping[str, Any]
    files: Mapping[str, str] | None = None
    pause: int | None = None

    @classmethod
    def of(cls, words: Sequence[str]) -> Wanted:
        """Return the run that a command asks for.

        Args:
            words: The words of the command, `fit` first.

        Raises:
            UserError: The command cannot be run, or its run leaves no folder.
        """
        from lightfed.cli.command_line import prepared

        command = words[0] if words else ""
        if command != "fit":
            raise UserError(
                key=command or "the line", found="no `fit`", fix="begin with `fit --config FILE`"
            )

        cli = prepared(words)
        trainer: Any = cli.trainer
        logger = trainer.run_logger

        values = dict(flat(trainer.config))
        if not values[_EVALUATE_AT]:
            values[_EVALUATE_AT] = cli.model.algorithm.moments[0]

        if logger is None:
            raise UserError(
                key="trainer.logger",
                found="no run folder",
                fix="leave out fast_dev_run, and logger: false with enable_checkpointing: false",
            )

        return cls(
            words=tuple(words),
            root=logger.place.save_dir,
            name=logger.place.base,
            options=identity(trainer.config),
            limits=trainer.limits,
            ranks=trainer.num_nodes * trainer.strategy.num_processes,
            values=values,
            pause=cli.config["fit"].get("pause_after"),
        )

    def up_to(self, rounds: int) -> Wanted:
        """Return the same run, which stops for now after so many rounds."""
        return self._replace(words=(*self.words, f"--pause_after={rounds}"), pause=rounds)

    def at(self, seed: int) -> Wanted:
        """Return the same run with another seed."""
        seed_value = {"model.seed": seed}
        return self._replace(
            words=(*self.words, f"--model.seed={seed}"),
            options={**self.options, **seed_value},
            values={**self.values, **seed_value},
        )

    @property
    def digest(self) -> str:
        """The digest of what results depend on, which the run's folder has, too."""
        return digest(self.options)

    @property
    def identity(self) -> tuple[str, ...]:
        """Words that are equal for two commands if the second would find the run of the first."""
        return (str(self.root), self.name, self.digest, str(sorted(self.limits.items())))

    def finished(self) -> Path | None:
        """Return the folder of a finished run with these limits; None without one.

        A run that is to pause has finished for now as soon as it has these rounds.
        """
        folders = self._folders()
        for folder, record in folders:
            if _limits_of_finished(record) == self.limits:
                return folder
        if self.pause is None:
            return None

        for folder, record in folders:
            is_unfinished = _limits_of_finished(record) is None
            has_as_many_rounds = record.get("rounds") == self.limits["max_epochs"]
            if is_unfinished and has_as_many_rounds and _rounds_in(folder) >= self.pause:
                return folder
        return None

    @property
    def diverged(self) -> Path:
        """The file that says that the run cannot reach its end.

        To train again would fail again, with the same bits.
        """
        options_and_limits = {**self.options, **self.limits}
        return self.root / LOGS / f"{self.name}-{digest(options_and_limits)}.diverged"

    def resumed(self) -> list[str]:
        """Return the words that continue a stopped run, or begin a new one."""
        checkpoint = self._checkpoint()
        if checkpoint is None:
            return list(self.words)
        return [*self.words, "--ckpt_path", str(checkpoint)]

    def _checkpoint(self) -> Path | None:
        """Return the newest checkpoint of a run that was to have as many rounds; None without one.

        A finished run has nothing to continue.
        """
        checkpoints = []
        for folder, record in self._folders():
            is_stopped = _limits_of_finished(record) is None
            has_as_many_rounds = record.get("rounds") == self.limits["max_epochs"]
            checkpoint = folder / "checkpoints" / "last.ckpt"
            if is_stopped and has_as_many_rounds and checkpoint.exists():
                checkpoints.append(checkpoint)

        return max(checkpoints, key=lambda path: path.stat().st_mtime_ns, default=None)

    def _folders(self) -> list[tuple[Path, dict[str, Any]]]:
        """Return the folders of this name, configuration and code, with their records.

        A run whose user's modules have been edited since is another run. It is named once.
        """
        own_digest = self.digest
        folders = []
        for folder in sorted(self.root.glob(f"*{glob.escape(self.name)}*")):
            record = read_record(folder)
            if record.get("name") != self.name or record.get("config") != own_digest:
                continue
            changed = edited(record.get("code") or {})
            if changed:
                _tell_of_edited(folder, ", ".join(changed))
                continue
            folders.append((folder, record))
        return folders


@cache
def _tell_of_edited(folder: Path, changed: str) -> None:
    """Say, once in a process, why a run is not used again."""
    print(f"{folder}: not used, {changed} has changed since it was trained", file=sys.stderr)


def _rounds_in(folder: Path) -> int:
    """Return the last round in a run folder's metrics.csv; 0 if there is none."""
    try:
        lines = (folder / "metrics.csv").read_text("utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError):
        return 0

    # A line without its end is still being written.
    whole = [line for line in lines[1:] if line.endswith("\n")]
    first_field = whole[-1].partition(",")[0] if whole else ""
    return int(first_field) if first_field.isdecimal() else 0


def _limits_of_finished(record: Mapping[str, Any]) -> Any:
    """Return the limits of a finished run; None if the run has not finished."""
    finished = record.get("finished")
    return finished.get("limits") if finished else None
