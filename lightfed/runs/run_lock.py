"""One writer per run folder: the last process to start owns it, and earlier ones end.

A node that is considered dead can be alive, and go on training while the job runs again elsewhere.
A user can also resume a run twice. So every start writes a token to the folder, and checks that it
is still there before writing anything else. A rename or a line that is written between this check
and the next start does no harm: that start would write the same bits.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightfed.distributed.requeue import is_running
from lightfed.distributed.slurm import Job
from lightfed.utils.atomic_io import write_atomically
from lightfed.utils.errors import UserError

OWNER = ".owner"

# The tokens that this process has written, by folder.
tokens_of_process: dict[Path, str] = {}

# What the file of an owner holds in any case.
_TYPE_OF_VALUE = {"token": str, "host": str, "pid": int}


class TakenOver(UserError):
    """The run continues in another process, which now owns its folder."""

    status = 1


def take(folder: Path, job: Job | None) -> None:
    """Become the owner of a run folder; only rank 0 calls it.

    Args:
        folder: The run folder.
        job: The SLURM job of this process, if any.

    Raises:
        TakenOver: The folder belongs to a later start of this job: this one should have ended.
        OSError: The token cannot be written.
    """
    owner = _read_owner(folder)
    if job is not None and owner.get("job") == job.key and owner.get("restarts", 0) > job.restarts:
        raise _taken_over(folder, owner)

    token = uuid4().hex
    owner = {"token": token, "host": socket.gethostname(), "pid": os.getpid()}
    if job is not None:
        owner |= {"job": job.key, "restarts": job.restarts, "step": job.step}
    write_atomically(folder / OWNER, lambda file: file.write(json.dumps(owner).encode()))
    tokens_of_process[folder.resolve()] = token


def is_of_step(folder: Path, job: Job) -> bool:
    """Return whether the step of this number, in any start of a job, last took a run folder."""
    return _step_of(_read_owner(folder)) == job.step


def is_in_use(folder: Path, job: Job) -> bool:
    """Return whether another process of this start of a job is writing to a run folder.

    Two steps of a job run at the same time if its script starts them so. They have the same name
    and configuration if the script gives them the same words.
    """
    owner = _read_owner(folder)
    if owner.get("job") != job.key or owner.get("restarts", 0) != job.restarts:
        return False

    step = _step_of(owner)
    is_of_this_step = step != "" and step == job.step
    if is_of_this_step:
        # An earlier command of this step, or its first rank.
        return False

    if owner["host"] == socket.gethostname():
        return owner["pid"] != os.getpid() and _is_alive(owner["pid"])
    return step != "" and is_running(job, step)


def _step_of(owner: dict[str, Any]) -> str:
    return str(owner.get("step", ""))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        # It belongs to another user, or the number is too large to be that of a process.
        pass
    return True


def check(path: Path) -> None:
    """Check that this process owns the folder of a path that is to be written.

    A path outside of folders that `take` has taken passes.

    Raises:
        TakenOver: Another process has taken the folder.
        OSError: The token cannot be read.
    """
    resolved = path.resolve()
    for folder in (resolved, *resolved.parents):
        if folder not in tokens_of_process:
            continue
        owner = _read_owner(folder)
        if owner and owner["token"] != tokens_of_process[folder]:
            raise _taken_over(folder, owner)


def _read_owner(folder: Path) -> dict[str, Any]:
    """Return what the owner of a folder has written.

    Returns:
        The values that `take` writes. Empty if the file was removed, or is not one of `take`.
    """
    try:
        owner = json.loads((folder / OWNER).read_text())
    except (FileNotFoundError, NotADirectoryError, RecursionError, ValueError):
        return {}
    if not isinstance(owner, dict):
        return {}

    for name, kind in _TYPE_OF_VALUE.items():
        if not isinstance(owner.get(name), kind):
            return {}
    if not isinstance(owner.get("job", ""), str) or not isinstance(owner.get("restarts", 0), int):
        return {}
    return owner


def _taken_over(folder: Path, owner: dict[str, Any]) -> TakenOver:
    process = f"process {owner['pid']} on {owner['host']}"
    return TakenOver(
        key="ckpt_path",
        found=f"{folder} now belongs to a later start of this run ({process})",
        fix="let that process continue; this one stops writing",
    )
