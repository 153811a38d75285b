"""Chooses the folder that a run writes to, and the run that a command resumes."""

import errno
import glob
import json
import logging
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from lightfed.distributed.collectives import Ranks
from lightfed.distributed.slurm import Job
from lightfed.runs import run_lock
from lightfed.runs.checkpoint import JOURNAL
from lightfed.utils import record
from lightfed.utils.atomic_io import write_atomically
from lightfed.utils.errors import UserError, require
from lightfed.utils.record import read_record

CONFIG = "config.yaml"
_OURS = (version("torch"), "")  # the build of torch of this process, as environment.json has it
_in_this_process: set[Path] = set()  # folders that runs of this process have written to
log = logging.getLogger(__name__)


class RunFolder:
    """`<save_dir>/<base>`, numbered if that exists: nothing is ever overwritten.

    In a SLURM job it is `<base>-<job>`, and the same job with the same configuration resumes in it.
    Where two of its steps run at the same time, each has its own folder, also after a requeue.
    Elsewhere a run starts from scratch unless it is given a checkpoint.

    Args:
        save_dir: folder of all runs.
        base: the name of the run.
        job: the job of this process, if any.

    Attributes:
        name: of the folder; None until the ranks have agreed on one, or a checkpoint names it.
        resumed: whether the run resumes from a checkpoint in it.
        config: digest of the configuration, which distinguishes runs of the same name. None in a
            script, whose runs of one name in one job are distinguished by their order.
        script: the same digest of a script's run, which it shares with its `last` one.
        method: the algorithm's class; it tells folders of one name apart.
    """

    def __init__(self, save_dir: Path, base: str, *, job: Job | None = None) -> None:
        self.save_dir, self.base = save_dir, base
        self.name: str | None = None
        self.resumed = False
        self.config: str | None = None
        self.script: str | None = None
        self.method: str | None = None
        self._reconfigured = False  # some rounds had another configuration
        self._warns = False  # that this is so of the rounds up to now
        self._earlier_torch: list[str] = []  # other builds, which trained rounds up to now
        self._job = job
        self._own = False  # whether this job has started the run before
        self._created = False
        self._ranks: Ranks | None = None  # that have agreed on the folder
        self._owned = False

    @property
    def path(self) -> Path:
        assert self.name is not None, "the folder is claimed when the ranks are up"
        return self.save_dir / self.name

    # The run's own folder.

    def claim(self, ranks: Ranks) -> None:
        """Agree on a folder, the same on every rank; idempotent.

        A UserError if it cannot be created, or ranks find different runs to resume.
        """
        alike = not ranks.any(ranks.broadcast(self.name) != self.name)
        found = f"the ranks do not find the same runs in {self.save_dir}"
        require(alike, "trainer.default_root_dir", found, "name a folder that all nodes share")
        if self.name is None:
            self.name = ranks.first(self._create)
        _in_this_process.add(self.path)
        if ranks.rank == 0:
            self.path.mkdir(parents=True, exist_ok=True)
        self._ranks = ranks

    def own(self) -> None:
        """Become the only writer of the folder; called by every rank; idempotent.

        Call it only when the run is known to be able to resume here: otherwise a mistake would end
        another process that is using the folder. Raises TakenOver if it belongs to a later start of
        this job.
        """
        assert self._ranks is not None, "the folder is claimed"
        if not self._owned:
            self._ranks.first(self._take)
        self._owned = True

    def _take(self) -> None:
        run_lock.take(self.path, self._job)
        for part in self.path.rglob("*.part"):  # of a killed writer
            if re.search(r"\.[0-9a-f]+\.part$", part.name):
                part.unlink(missing_ok=True)

    def check(self) -> None:
        """Reject a folder that is no longer there, or that another process has taken.

        Raises TakenOver, or an OSError.
        """
        run_lock.check(self.path)
        known = [self.path / name for name in (record.NAME, run_lock.OWNER)]
        if self._owned and not any(path.exists() for path in known):
            raise FileNotFoundError(errno.ENOENT, "it was removed during the run", str(self.path))

    def _create(self) -> str:
        """Create a new folder; mkdir fails if another run has just made it."""
        base = self.base if self._job is None else f"{self.base}-{self._job.name}"
        taken_by = read_record(self.save_dir / base).get("algorithm")
        if self.method is not None and taken_by not in (None, self.method):
            # `fedprox-mine` tells more beside `mine` than `mine-2`. The folder that is there keeps
            # its name, which scripts and pages may know.
            base = f"{self.method.lower()}-{base}"
        number = 1
        while not self._make(folder := self.save_dir / (base + f"-{number}" * (number > 1))):
            number += 1
        self._created = True
        if self._job is not None:
            # Another step of the job may be choosing its folder at this moment.
            run_lock.take(folder, self._job)
            _write(folder, self._identity())
        return folder.name

    def _make(self, folder: Path) -> bool:
        """Try to create a folder; returns whether this run owns it."""
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            # This job may have died in it before its first checkpoint.
            return self._is_own(folder) and not _last(folder).is_file()
        except OSError as error:
            found = f"{folder} cannot be made ({error.strerror})"
            fix = "name a writable folder"
            raise UserError("trainer.default_root_dir", found, fix) from error
        return True

    def give_up(self) -> None:
        """Remove the folder that this run made, unless it holds sessions of its first round."""
        if not self._created or _last(self.path).with_name(JOURNAL).is_file():
            return
        try:
            run_lock.check(self.path)
        except run_lock.TakenOver:
            return
        shutil.rmtree(self.path, ignore_errors=True)

    # A run to resume.

    def resume_job(self, *, requeued: bool = False) -> Path | None:
        """This job's checkpoint of this run; the run then resumes in its folder.

        None if there is none, outside a job, or if the run already has its folder. If `requeued`,
        it looks only if the job was requeued: its first start used the checkpoint of the command
        line.
        """
        if self.name is not None or self._job is None or (requeued and not self._job.restarts):
            return None
        job = self._job
        own = [folder for folder in self._candidates() if self._is_own(folder)]
        first = min(
            own,
            key=lambda f: (not run_lock.is_of_step(f, job), len(f.name), f.name),
            default=None,
        )
        if first is None:
            return None
        self._own = True
        return self.resume_from(_last(first))

    def resume_newest(self, *, trains: bool) -> Path | None:
        """The checkpoint of the newest run of this name and configuration; resumes in its folder.

        None if there is none. A run that does not train also accepts another configuration, because
        the checkpoint holds what must agree.
        """
        candidates = self._candidates()
        job = self._job
        if trains and job is not None:
            candidates = [f for f in candidates if not run_lock.is_in_use(f, job)]
        alike = [f for f in candidates if self._is_alike(read_record(f))]
        chosen = alike or ([] if trains else candidates)
        if chosen:
            return self.resume_from(_last(max(chosen, key=_age)))
        if candidates:
            _warn(
                "%s has this name, but another configuration: a new run begins",
                max(candidates, key=_age),
            )
        return None

    def resume_from(self, ckpt_path: Any) -> Path:
        """Resume in the folder of a checkpoint, if that is a run folder in `save_dir`."""
        path = Path(ckpt_path)
        folder = path.parent.parent
        here = folder.parent.resolve() == self.save_dir.resolve()
        recorded = read_record(folder) if path.parent.name == "checkpoints" else {}
        builds = [*_builds(recorded), recorded.get("torch", "")]
        self._earlier_torch = [build for build in dict.fromkeys(builds) if build not in _OURS]
        if here and path.parent.name == "checkpoints":
            self.name = folder.name
            self.resumed = True
            self._warns = bool(recorded) and not self._is_alike(recorded)
            self._reconfigured = self._warns or bool(recorded.get("reconfigured"))
        return path

    def resumed_from(self) -> None:
        """Warn of a checkpoint, now that it is loaded, that another configuration has written."""
        if self._warns:
            _warn("%s was trained with another configuration up to now", self.path)
        if self._earlier_torch:
            others = " and ".join(self._earlier_torch)
            _warn("rounds up to now ran on torch %s, this is %s: bits may differ", others, _OURS[0])

    def _is_alike(self, recorded: Mapping[str, Any]) -> bool:
        """Whether a run has this configuration, by its record."""
        return (recorded.get("config"), recorded.get("script")) == (self.config, self.script)

    def _candidates(self) -> list[Path]:
        """Folders of this name that hold a checkpoint."""
        folders = self.save_dir.glob(f"*{glob.escape(self.base)}*")
        alike = (f for f in folders if read_record(f).get("name") == self.base)
        return [folder for folder in alike if _last(folder).is_file()]

    def _is_own(self, folder: Path) -> bool:
        """Whether this job created or resumed it, with this configuration, and no step is in it."""
        recorded = read_record(folder)
        if self._job is None or recorded.get("job") != self._job.key:
            return False
        ours = recorded.get("name") == self.base and recorded.get("config") == self.config
        free = self.config is not None or folder not in _in_this_process
        return ours and free and not run_lock.is_in_use(folder, self._job)

    # The folder's record of its run.

    def describe(self, environment: Mapping[str, Any]) -> None:
        """Write environment.json: which run this is, and the environment."""
        run_lock.check(self.path)
        _write(self.path, self._identity() | dict(environment))

    def finish(self, rounds: int, limits: Mapping[str, Any]) -> None:
        """Record that the run has finished; see `finished_rounds`."""
        finished = {"rounds": rounds, "limits": dict(limits)}
        _write(self.path, read_record(self.path) | {"finished": finished})

    def finished_rounds(self, limits: Mapping[str, Any]) -> int | None:
        """The number of rounds after which this job has finished the run; None if it has not.

        If the limits of this run, as primitives, have changed, it is not finished.
        """
        recorded: Any = read_record(self.path).get("finished") if self._own else None
        same = recorded is not None and recorded["limits"] == dict(limits)
        return int(recorded["rounds"]) if same else None

    def _identity(self) -> dict[str, Any]:
        """What distinguishes this run from others."""
        job = None if self._job is None else self._job.key
        recorded: dict[str, Any] = {
            "name": self.base,
            "config": self.config,
            "script": self.script,
            "job": job,
        }
        recorded["reconfigured"] = "yes" if self._reconfigured else None
        recorded["earlier_torch"] = ", ".join(self._earlier_torch) or None
        return {key: value for key, value in recorded.items() if value is not None}


def _builds(recorded: Mapping[str, Any]) -> list[str]:
    """The builds of torch that a record says to have trained rounds before its own."""
    return str(recorded.get("earlier_torch", "")).split(", ")


def check_name(key: str, name: str) -> None:
    """Reject a name that is not a plain folder name; a UserError names the key."""
    plain = name not in ("", "..") and Path(name).name == name and "\0" not in name
    require(plain, key, repr(name), "give a plain folder name")


def _last(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


def _age(folder: Path) -> int:
    """When the newest checkpoint of a run was written, in nanoseconds."""
    return _last(folder).stat().st_mtime_ns


@rank_zero_only
def _warn(message: str, *args: Any) -> None:
    log.warning(message, *args)


def _write(folder: Path, recorded: Mapping[str, Any]) -> None:
    content = json.dumps(recorded, indent=1, default=str) + "\n"
    write_atomically(folder / record.NAME, lambda file: file.write(content.encode()))
