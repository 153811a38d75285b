"""Chooses the folder that a run writes to, and the run that a command resumes."""

import errno
import glob
import json
import logging
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
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
from lightfed.utils.errors import UserError
from lightfed.utils.record import read_record

CONFIG = "config.yaml"

# The folders that runs of this process have written to.
folders_of_process: set[Path] = set()

# The build of torch of this process, as environment.json names it.
_TORCH = version("torch")

log = logging.getLogger(__name__)


class RunFolder:
    """The folder `<save_dir>/<base>` of a run, numbered if that exists: nothing is overwritten.

    In a SLURM job it is `<base>-<job>`, and the same job with the same configuration resumes in it.
    If two steps of a job run at the same time, each has its own folder, also after a requeue.
    Outside of a job, a run starts from scratch unless it is given a checkpoint.

    Args:
        save_dir: The folder of all runs.
        base: The name of the run.
        job: The SLURM job of this process, if any.

    Attributes:
        name: The name of the folder; None until the ranks have agreed on one, or a checkpoint
            names it.
        resumed: Whether the run resumes from a checkpoint in the folder.
        config: The digest of the configuration, which distinguishes runs of the same name. None in
            a script, whose runs of one name in one job are distinguished by their order.
        script: The same digest of a script's run, which it shares with its `last` one.
        method: The name of the algorithm's class, which distinguishes folders of one name.
    """

    def __init__(self, save_dir: Path, base: str, *, job: Job | None = None) -> None:
        self.save_dir = save_dir
        self.base = base
        self.name: str | None = None
        self.resumed = False
        self.config: str | None = None
        self.script: str | None = None
        self.method: str | None = None

        self._job = job

        # Whether this job has started the run before.
        self._is_of_job = False

        # Whether this object has made the folder.
        self._created = False

        # The folders above it that this object has made with it, the innermost first.
        self._created_above: list[Path] = []

        # The ranks that have agreed on the folder.
        self._ranks: Ranks | None = None

        # Whether this process has become the only writer.
        self._owned = False

        # Whether some of the rounds had another configuration, and whether the user is told.
        self._reconfigured = False
        self._warns_of_configuration = False

        # Other builds of torch that have trained rounds before this process.
        self._earlier_torch: list[str] = []

    @property
    def path(self) -> Path:
        """The folder, which exists once `claim` has been called."""
        assert self.name is not None, "the folder is claimed when the ranks are up"
        return self.save_dir / self.name

    def claim(self, ranks: Ranks) -> None:
        """Agree with all ranks on a folder, and make it; a second call changes nothing.

        Raises:
            UserError: It cannot be made, or the ranks find different runs to resume.
        """
        differs = ranks.any(ranks.broadcast(self.name) != self.name)
        if differs:
            raise UserError(
                key="trainer.default_root_dir",
                found=f"the ranks do not find the same runs in {self.save_dir}",
                fix="name a folder that all nodes share",
            )

        if self.name is None:
            self.name = ranks.first(self._create)
        folders_of_process.add(self.path)
        if ranks.rank == 0:
            self.path.mkdir(parents=True, exist_ok=True)
        self._ranks = ranks

    def own(self) -> None:
        """Become the only writer of the folder; every rank calls it, and a second call is free.

        Call it only when the run is known to be able to resume here. It ends any other process that
        is writing to the folder, and a mistake of the user must not do that.

        Raises:
            TakenOver: The folder belongs to a later start of this job.
        """
        assert self._ranks is not None, "the folder is claimed"
        if not self._owned:
            self._ranks.first(self._take)
        self._owned = True

    def _take(self) -> None:
        run_lock.take(self.path, self._job)

        # A writer that was killed leaves files under temporary names.
        for leftover in self.path.rglob("*.part"):
            if re.search(r"\.[0-9a-f]+\.part$", leftover.name):
                leftover.unlink(missing_ok=True)

    def check(self) -> None:
        """Check that the folder is still there and belongs to this process.

        Raises:
            TakenOver: Another process has taken it.
            OSError: It was removed.
        """
        run_lock.check(self.path)
        if not self._owned:
            return

        files = (self.path / record.NAME, self.path / run_lock.OWNER)
        if not any(file.exists() for file in files):
            raise FileNotFoundError(errno.ENOENT, "it was removed during the run", str(self.path))

    def _create(self) -> str:
        """Make a new folder and return its name."""
        base = self.base
        if self._job is not None:
            base = f"{base}-{self._job.name}"

        method_there = read_record(self.save_dir / base).get("algorithm")
        if self.method is not None and method_there not in (None, self.method):
            # `fedprox-mine` beside `mine` says more than `mine-2`. The folder that is there keeps
            # its name, because scripts and pages may use it.
            base = f"{self.method.lower()}-{base}"

        # Try the names one after the other: another run may make one of them at this moment.
        folder = self.save_dir / base
        number = 1
        while not self._make(folder):
            number += 1
            folder = self.save_dir / f"{base}-{number}"
        self._created = True

        if self._job is not None:
            # Another step of the job may be choosing its folder at this moment, and has to see
            # that this one is in use.
            run_lock.take(folder, self._job)
            _write(folder, self._identity())
        return folder.name

    def _make(self, folder: Path) -> bool:
        """Try to make a folder; return whether this run can have it."""
        missing = [above for above in folder.parents if not above.exists()]
        try:
            folder.mkdir(parents=True)
            self._created_above = missing
        except FileExistsError:
            # This job may have died in it before its first checkpoint.
            return self._belongs_to_job(folder) and not _last_checkpoint(folder).is_file()
        except OSError as error:
            raise UserError(
                key="trainer.default_root_dir",
                found=f"{folder} cannot be made ({error.strerror})",
                fix="name a writable folder",
            ) from error
        return True

    def give_up(self) -> None:
        """Remove the folder that this run made, unless it holds sessions of its first round.

        The folder of all runs goes too if this run has made it and no other run is in it.
        """
        # Without a folder of its own, the run may not even have a path.
        if not self._created:
            return
        if _last_checkpoint(self.path).with_name(JOURNAL).is_file():
            return

        try:
            run_lock.check(self.path)
        except run_lock.TakenOver:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            for folder in self._created_above:
                folder.rmdir()

    def resume_job(self, *, requeued: bool = False) -> Path | None:
        """Return this job's checkpoint of this run; the run then resumes in its folder.

        Args:
            requeued: Look only if the job was requeued: its first start used the checkpoint of the
                command.

        Returns:
            The main file of the checkpoint. None without one, outside of a job, or if the run
            already has its folder.
        """
        job = self._job
        if self.name is not None or job is None:
            return None
        if requeued and not job.restarts:
            return None

        folders = [folder for folder in self._candidates() if self._belongs_to_job(folder)]
        if not folders:
            return None

        # The folder of this step of the job, or else the one that was made first: `run-2` comes
        # after `run`, and `run-10` after `run-9`.
        folder = min(
            folders,
            key=lambda path: (not run_lock.is_of_step(path, job), len(path.name), path.name),
        )
        self._is_of_job = True
        return self.resume_from(_last_checkpoint(folder))

    def resume_newest(self, *, trains: bool) -> Path | None:
        """Return the checkpoint of the newest run of this name; the run resumes in its folder.

        Args:
            trains: Whether rounds follow. Then the configuration must be the same. For a test,
                another one will do, because the checkpoint holds what must agree.

        Returns:
            The main file of the checkpoint; None without one.
        """
        candidates = self._candidates()
        job = self._job
        if trains and job is not None:
            candidates = [path for path in candidates if not run_lock.is_in_use(path, job)]

        accepted = [path for path in candidates if self._has_this_configuration(read_record(path))]
        if not accepted and not trains:
            accepted = candidates
        if accepted:
            return self.resume_from(_last_checkpoint(max(accepted, key=_time_of_checkpoint)))

        if candidates:
            _warn(
                "%s has this name, but another configuration: a new run is started",
                max(candidates, key=_time_of_checkpoint),
            )
        return None

    def resume_from(self, ckpt_path: Any) -> Path:
        """Resume in the folder of a checkpoint, if that is a run folder in `save_dir`.

        Args:
            ckpt_path: The main file of the checkpoint, which can be anywhere.

        Returns:
            The same path.
        """
        path = Path(ckpt_path)
        folder = path.parent.parent
        is_in_run_folder = path.parent.name == "checkpoints"
        is_in_save_dir = folder.parent.resolve() == self.save_dir.resolve()

        recorded = read_record(folder) if is_in_run_folder else {}
        builds = [*_earlier_builds(recorded), recorded.get("torch", "")]
        self._earlier_torch = []
        for build in builds:
            if build not in ("", _TORCH, *self._earlier_torch):
                self._earlier_torch.append(build)

        if is_in_run_folder and is_in_save_dir:
            self.name = folder.name
            self.resumed = True
            self._warns_of_configuration = bool(recorded) and not self._has_this_configuration(
                recorded
            )
            was_reconfigured = bool(recorded.get("reconfigured"))
            self._reconfigured = self._warns_of_configuration or was_reconfigured
        return path

    def resumed_from(self) -> None:
        """Warn of a loaded checkpoint if another configuration or build of torch has written it."""
        if self._warns_of_configuration:
            _warn("%s was trained with another configuration so far", self.path)
        if self._earlier_torch:
            _warn(
                "earlier rounds ran on torch %s, this is %s: bits may differ",
                " and ".join(self._earlier_torch),
                _TORCH,
            )

    def _has_this_configuration(self, recorded: Mapping[str, Any]) -> bool:
        """Return whether a run has the configuration of this one, by its record."""
        return recorded.get("config") == self.config and recorded.get("script") == self.script

    def _candidates(self) -> list[Path]:
        """Return the folders of this name that hold a checkpoint."""
        folders = []
        for folder in self.save_dir.glob(f"*{glob.escape(self.base)}*"):
            has_name = read_record(folder).get("name") == self.base
            if has_name and _last_checkpoint(folder).is_file():
                folders.append(folder)
        return folders

    def _belongs_to_job(self, folder: Path) -> bool:
        """Return whether this job can go on in a folder.

        It has made or resumed the folder with this configuration, and none of its steps is in it.
        """
        recorded = read_record(folder)
        if self._job is None or recorded.get("job") != self._job.key:
            return False
        if recorded.get("name") != self.base or recorded.get("config") != self.config:
            return False
        # Runs of a script have no configuration: one of them must not resume an earlier one.
        if self.config is None and folder in folders_of_process:
            return False
        return not run_lock.is_in_use(folder, self._job)

    def describe(self, environment: Mapping[str, Any]) -> None:
        """Write environment.json: which run this is, and the environment."""
        run_lock.check(self.path)
        _write(self.path, self._identity() | dict(environment))

    def finish(self, rounds: int, limits: Mapping[str, Any]) -> None:
        """Record that the run has finished; see `finished_rounds`.

        Args:
            rounds: The number of rounds that it has trained.
            limits: The limits on its rounds and time, as primitives.
        """
        finished = {"rounds": rounds, "limits": dict(limits)}
        _write(self.path, read_record(self.path) | {"finished": finished})

    def finished_rounds(self, limits: Mapping[str, Any]) -> int | None:
        """Return the number of rounds after which this job has finished the run.

        Args:
            limits: The limits of this run, as primitives. With other limits the run goes on.

        Returns:
            The number of rounds; None if the job has not finished the run.
        """
        if not self._is_of_job:
            return None
        finished: Any = read_record(self.path).get("finished")
        if finished is None or finished["limits"] != dict(limits):
            return None
        return int(finished["rounds"])

    def _identity(self) -> dict[str, Any]:
        """Return what distinguishes this run from others, for its record."""
        identity: dict[str, Any] = {
            "name": self.base,
            "config": self.config,
            "script": self.script,
            "job": None if self._job is None else self._job.key,
            "reconfigured": "yes" if self._reconfigured else None,
            "earlier_torch": ", ".join(self._earlier_torch) or None,
        }
        return {key: value for key, value in identity.items() if value is not None}


def _earlier_builds(recorded: Mapping[str, Any]) -> list[str]:
    """Return the builds of torch that trained rounds before the one that a record names."""
    return str(recorded.get("earlier_torch", "")).split(", ")


def check_name(key: str, name: str) -> None:
    """Refuse a name that is not a plain folder name.

    Args:
        key: The key of the name, for the error.
        name: The name.

    Raises:
        UserError: The name is empty, leads to another folder, or contains a zero character.
    """
    is_plain = Path(name).name == name and name not in ("", "..") and "\0" not in name
    if not is_plain:
        raise UserError(key, found=repr(name), fix="give a plain folder name")


def _last_checkpoint(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


def _time_of_checkpoint(folder: Path) -> int:
    """Return when the newest checkpoint of a run was written, in nanoseconds."""
    return _last_checkpoint(folder).stat().st_mtime_ns


@rank_zero_only
def _warn(message: str, *args: Any) -> None:
    log.warning(message, *args)


def _write(folder: Path, recorded: Mapping[str, Any]) -> None:
    content = json.dumps(recorded, indent=1, default=str) + "\n"
    write_atomically(folder / record.NAME, lambda file: file.write(content.encode()))
