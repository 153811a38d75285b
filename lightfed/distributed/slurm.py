"""What SLURM's environment variables say of the process; nothing heavy is imported."""

from collections.abc import Mapping
from dataclasses import dataclass

# `salloc` and `srun --pty bash` call their jobs so; Lightning ignores SLURM in them, too.
_INTERACTIVE = ("bash", "interactive")


@dataclass(frozen=True)
class Job:
    """A job, or one task of an array of jobs.

    Attributes:
        name: its id as scontrol takes it: 12, or 12_3 for task 3 of array 12.
        cluster: that numbers its jobs so; several may share a file system.
        restarts: how often it has been requeued.
    """

    name: str
    cluster: str
    restarts: int

    @property
    def key(self) -> str:
        """Of this job alone, wherever its files lie."""
        return f"{self.cluster}:{self.name}"


def job_of(environ: Mapping[str, str]) -> Job | None:
    """The job that a process with these variables is in; None outside and in interactive jobs."""
    number = environ.get("SLURM_JOB_ID")
    if not number or is_interactive(environ):
        return None
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    name = f"{array}_{task}" if array and task else number
    restarts = int(environ.get("SLURM_RESTART_COUNT") or 0)
    return Job(name, environ.get("SLURM_CLUSTER_NAME", ""), restarts)


def is_interactive(environ: Mapping[str, str]) -> bool:
    """Whether somebody sits before the job."""
    return environ.get("SLURM_JOB_NAME") in _INTERACTIVE


def starts_ranks(environ: Mapping[str, str]) -> bool:
    """Whether Lightning takes its ranks from SLURM, and not from torchrun or by itself."""
    torchrun = "TORCHELASTIC_RUN_ID" in environ
    return "SLURM_NTASKS" in environ and not is_interactive(environ) and not torchrun
