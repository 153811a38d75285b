"""Reads SLURM's environment variables; cheap to import."""

from collections.abc import Mapping
from dataclasses import dataclass

# Job names of `salloc` and `srun --pty bash`; Lightning ignores SLURM in them, too.
_INTERACTIVE = ("bash", "interactive")


@dataclass(frozen=True)
class Job:
    """A job, or one task of an array of jobs.

    Attributes:
        name: its id for scontrol: 12, or 12_3 for task 3 of array 12.
        cluster: its cluster; several clusters may share a file system.
        restarts: how often it has been requeued.
    """

    name: str
    cluster: str
    restarts: int

    @property
    def key(self) -> str:
        """A key that is unique to this job across clusters."""
        return f"{self.cluster}:{self.name}"


def job_of(environ: Mapping[str, str]) -> Job | None:
    """The job of a process with these variables; None outside jobs and in interactive ones."""
    number = environ.get("SLURM_JOB_ID")
    if not number or is_interactive(environ):
        return None
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    name = f"{array}_{task}" if array and task else number
    restarts = int(environ.get("SLURM_RESTART_COUNT") or 0)
    return Job(name, environ.get("SLURM_CLUSTER_NAME", ""), restarts)


def is_interactive(environ: Mapping[str, str]) -> bool:
    """Whether the job is interactive."""
    return environ.get("SLURM_JOB_NAME") in _INTERACTIVE


def starts_ranks(environ: Mapping[str, str]) -> bool:
    """Whether SLURM starts Lightning's ranks, rather than torchrun or Lightning itself."""
    torchrun = "TORCHELASTIC_RUN_ID" in environ
    return "SLURM_NTASKS" in environ and not is_interactive(environ) and not torchrun
