"""One writer per run folder: the last process to start owns it, and earlier ones end.

A node that is considered dead may be alive and keep training while the job runs again elsewhere. A
user may also resume a run twice. So every start writes a token to the folder, and checks that it is
still there before writing anything else. A write between this check and the next start, a rename or
a line, is harmless: that start would write the same bits.
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
_OWNS = {"token": str, "host": str, "pid": int}  # what is in it
_tokens: dict[Path, str] = {}  # tokens of this process, by folder


class TakenOver(UserError):
    """The run continues in another process, which now owns its folder."""

    status = 1


def take(folder: Path, job: Job | None) -> None:
    """Take ownership of a run folder; called only by rank 0.

    Raises TakenOver if the folder belongs to a later start of this job: this one should have ended.
    An OSError if the token cannot be written.
    """
    owner = _owner(folder)
    if job is not None and owner.get("job") == job.key and owner.get("restarts", 0) > job.restarts:
        raise _taken_over(folder, owner)
    owner = {"token": uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}
    if job is not None:
        owner |= {"job": job.key, "restarts": job.restarts, "step": job.step}
    write_atomically(folder / OWNER, lambda file: file.write(json.dumps(owner).encode()))
    _tokens[folder.resolve()] = str(owner["token"])


def is_of_step(folder: Path, job: Job) -> bool:
    """Whether a run folder was last written by the step of this number, in any start of a job."""
    return _step_of(_owner(folder)) == job.step


def is_in_use(folder: Path, job: Job) -> bool:
    """Whether another process of this start of a job writes to a run folder now.

    Two steps of a job run at the same time if its script starts them so. They have the same name
    and configuration if the script gives them the same words.
    """
    owner = _owner(folder)
    if owner.get("job") != job.key or owner.get("restarts", 0) != job.restarts:
        return False
    step = _step_of(owner)
    if step == job.step != "":
        return False  # an earlier command of this step, or its first rank
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
        pass  # it belongs to somebody else, or is no number of a process
    return True


def check(path: Path) -> None:
    """Check ownership before writing to `path`; does nothing outside folders taken by `take`.

    Raises TakenOver if another process has taken the folder, and an OSError if the token cannot be
    read.
    """
    here = path.resolve()
    for folder in (here, *here.parents):
        if folder in _tokens:
            owner = _owner(folder)
            if owner and owner["token"] != _tokens[folder]:
                raise _taken_over(folder, owner)


def _owner(folder: Path) -> dict[str, Any]:
    """The token of a folder's owner; empty if it was removed, or is not as `take` writes it."""
    try:
        owner = json.loads((folder / OWNER).read_text())
    except (FileNotFoundError, NotADirectoryError, RecursionError, ValueError):
        return {}
    if not isinstance(owner, dict):
        return {}
    known = [isinstance(owner.get(name), kind) for name, kind in _OWNS.items()]
    of_job = isinstance(owner.get("job", ""), str) and isinstance(owner.get("restarts", 0), int)
    return owner if all(known) and of_job else {}


def _taken_over(folder: Path, owner: dict[str, Any]) -> TakenOver:
    who = f"process {owner['pid']} on {owner['host']}"
    found = f"{folder} now belongs to a later start of this run ({who})"
    return TakenOver("ckpt_path", found, "let that process continue; this one stops writing")
