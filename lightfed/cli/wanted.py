"""What the words of `lightfed fit` ask for, and whether a folder has it already."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightfed.utils.errors import require
from lightfed.utils.keys import digest, flat, identity
from lightfed.utils.record import read_record

LOGS = ".logs"  # beside the runs: output of runs that failed
_MOMENT = "model.evaluate_at"


class Wanted(NamedTuple):
    """A run that is known from its command alone.

    Attributes:
        words: of the command, `fit` first.
        root: folder of all runs; name: of this one, which a number may follow.
        options: the values of its configuration on which results depend, by dotted keys.
        limits: on its rounds and time.
        ranks: processes that it starts.
        values: its whole configuration by dotted keys, with the moment of its tests.
    """

    words: tuple[str, ...]
    root: Path
    name: str
    options: Mapping[str, Any]
    limits: Mapping[str, Any]
    ranks: int
    values: Mapping[str, Any]

    @classmethod
    def of(cls, words: Sequence[str]) -> Wanted:
        """Read a command; a UserError if it cannot be run, or leaves no folder."""
        from lightfed.cli.command_line import prepared

        first = " ".join(words[:1])
        require(first == "fit", first or "the line", "no `fit`", "begin with `fit --config FILE`")
        made = prepared(words)
        trainer: Any = made.trainer
        logger, values = trainer.run_logger, dict(flat(trainer.config))
        values[_MOMENT] = values[_MOMENT] or made.model.algorithm.moments[0]
        fix = "leave out fast_dev_run, and logger: false with enable_checkpointing: false"
        require(logger is not None, "trainer.logger", "no run folder", fix)
        return cls(
            tuple(words),
            root=logger.place.save_dir,
            name=logger.place.base,
            options=identity(trainer.config),
            limits=trainer.limits,
            ranks=trainer.num_nodes * trainer.strategy.num_processes,
            values=values,
        )

    def at(self, seed: int) -> Wanted:
        """The same run with another seed."""
        own = {"model.seed": seed}
        return self._replace(
            words=(*self.words, f"--model.seed={seed}"),
            options={**self.options, **own},
            values={**self.values, **own},
        )

    @property
    def digest(self) -> str:
        """Of what results depend on, as its folder has it."""
        return digest(self.options)

    @property
    def identity(self) -> tuple[str, ...]:
        """Equal for commands of which the second would find the run of the first."""
        return str(self.root), self.name, self.digest, str(sorted(self.limits.items()))

    def finished(self) -> Path | None:
        """The folder of a finished run with these limits; None without one."""
        ended = (f for f, stated in self._folders() if _limits(stated) == self.limits)
        return next(ended, None)

    @property
    def diverged(self) -> Path:
        """The file that says that the run cannot reach its end: the same bits would fail again."""
        return self.root / LOGS / f"{self.name}-{digest({**self.options, **self.limits})}.diverged"

    def resumed(self) -> list[str]:
        """The words that go on with a stopped run, or begin a new one."""
        checkpoint = self._checkpoint()
        return [*self.words, *([] if checkpoint is None else ["--ckpt_path", str(checkpoint)])]

    def _checkpoint(self) -> Path | None:
        """The newest one of a run that has not reached these limits; None without one."""
        known = [(f, s.get("rounds")) for f, s in self._folders() if _limits(s) is None]
        stopped = [folder for folder, rounds in known if rounds == self.limits["max_epochs"]]
        found = (folder / "checkpoints" / "last.ckpt" for folder in stopped)
        written = [path for path in found if path.exists()]
        return max(written, key=lambda path: path.stat().st_mtime_ns, default=None)

    def _folders(self) -> list[tuple[Path, dict[str, Any]]]:
        """Folders of this name and configuration, with their environment.json."""
        folders = sorted(self.root.glob(f"*{glob.escape(self.name)}*"))
        own, found = (self.name, self.digest), [(f, read_record(f)) for f in folders]
        return [(f, s) for f, s in found if (s.get("name"), s.get("config")) == own]


def _limits(stated: Mapping[str, Any]) -> Any:
    """Those of a finished run; None if it has not finished."""
    return (stated.get("finished") or {}).get("limits")
