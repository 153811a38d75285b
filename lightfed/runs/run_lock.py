"""One writer in a run folder: who began last owns it, and whoever was at it before ends.

A node that is taken for dead may live, and its ranks train on while the job runs again elsewhere;
and a user may go on with a run twice. So every start leaves a token in the folder, and looks
whether it is still there before it puts anything beside it. What is written between the look and
the next start of the run, a rename or a line, is what that start would write: it has the same bits.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightfed.distributed.slurm import Job
from lightfed.utils.atomic_io import write_atomically
from lightfed.utils.errors import UserError

_OWNER = ".owner"
_tokens: dict[Path, str] = {}  # that this process has left, by folder


class TakenOver(UserError):
    """The run goes on in another process, to which its folder belongs now."""

    status = 1


def take(folder: Path, job: Job | None) -> None:
    """Own a run folder from now on; rank 0 alone does.

    Args:
        folder: of the run.
        job: that this process is in, if any.

    Raises:
        TakenOver: the folder belongs to a later start of this job: this one should have ended.
        OSError: the token cannot be written.
    """
    told = _told(folder)
    if job is not None and told.get("job") == job.key and told["restarts"] > job.restarts:
        raise _taken_over(folder, told)
    owner = {"token": uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}
    if job is not None:
        owner |= {"job": job.key, "restarts": job.restarts}
    write_atomically(folder / _OWNER, lambda file: file.write(json.dumps(owner).encode()))
    _tokens[folder.resolve()] = str(owner["token"])


def check(path: Path) -> None:
    """Before something is written to `path`: nothing, unless it lies in a folder that was taken.

    Raises:
        TakenOver: another process has taken it since.
        OSError: the token cannot be read.
    """
    here = path.resolve()
    for folder in (here, *here.parents):
        if folder in _tokens:
            told = _told(folder)
            if told and told["token"] != _tokens[folder]:
                raise _taken_over(folder, told)


def _told(folder: Path) -> dict[str, Any]:
    """What the owner of a folder has left; empty where somebody has removed or spoilt it."""
    try:
        return dict(json.loads((folder / _OWNER).read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def _taken_over(folder: Path, told: dict[str, Any]) -> TakenOver:
    who = f"process {told['pid']} on {told['host']}"
    found = f"{folder} belongs to a later start of this run now ({who})"
    return TakenOver("ckpt_path", found, "leave the run to that one: this one writes no more")
