"""Reads the variables of a launcher and of SLURM, and checks the Trainer's flags against them.

If they disagree, ranks wait for others that never start. This file is cheap to import, because
every command does so.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightfed.utils.errors import UserError

# Job names of `salloc` and `srun --pty bash`; Lightning ignores SLURM in them, too.
_INTERACTIVE = ("bash", "interactive")

_PORTS = range(1, 1 << 16)

# Lightning's ports: the first one, and how many. A job's port follows from the last four digits of
# its number.
_FIRST_PORT = 15_000
_PORTS_OF_JOBS = 10_000

# The distance of the ports of two steps of a job. It has no factor in common with the number of
# ports, so that the first 10,000 steps of a job have different ones.
_PORTS_BETWEEN_STEPS = 97

# Variables in which launchers give whole numbers.
_NUMBERS = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE", "SLURM_NNODES", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID",
    "SLURM_RESTART_COUNT",
)  # fmt: skip
_AT_LEAST_1 = (
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE", "SLURM_NNODES",
)  # fmt: skip
_TOO_LARGE = 1 << 31  # none of them can be so large

# If the first of these is set, a launcher has started the process, and all of them have to be set.
_TORCHRUN = ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
_TASK = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")


def check_variables(environ: Mapping[str, str]) -> None:
    """Check that a launcher's variables are numbers, and that none of them is missing.

    Lightning reads some of them when it is imported, and fails there with a traceback. So this has
    to come first.

    Raises:
        UserError: Names the variable, and what it holds.
    """
    for name in _NUMBERS:
        value = environ.get(name)
        if value is None:
            continue

        least = 1 if name in _AT_LEAST_1 else 0
        if not least <= _number(value) < _TOO_LARGE:
            raise UserError(
                key=name,
                found=repr(value),
                fix=f"its launcher sets it to a whole number from {least} on: "
                "correct it, or unset it",
            )

    port = environ.get("MASTER_PORT")
    if port is not None and _number(port) not in _PORTS:
        fix = f"give a port from 1 to {_PORTS[-1]}, or unset it"
        raise UserError("MASTER_PORT", found=repr(port), fix=fix)

    _check_complete(environ, _TORCHRUN, "start the command by torchrun")
    if starts_ranks(environ):
        _check_complete(environ, _TASK, "write srun before the command")


def _check_complete(environ: Mapping[str, str], names: tuple[str, ...], start: str) -> None:
    """Check that all of a launcher's variables are set if the first one is."""
    first, *others = names
    if first not in environ:
        return
    for name in others:
        if name not in environ:
            found = f"missing, while {first} is set"
            raise UserError(name, found, fix=f"{start}, or unset {first}")


def _number(text: str) -> int:
    """Return a whole number that is written in plain digits; -1 for any other text."""
    digits = text.strip()
    is_number = digits.isascii() and digits.isdigit()

    # Python refuses to convert a text of thousands of digits.
    return int(digits) if is_number and len(digits) < 20 else -1


def port_of(environ: Mapping[str, str]) -> int:
    """Return the port at which the ranks of a job's step meet.

    Each step has its own, because two steps of a job can run at the same time on the same node.
    """
    port = environ.get("MASTER_PORT")
    if port is not None:
        return int(port)

    job = int(environ.get("SLURM_JOB_ID", "0")[-4:])
    step = int(environ.get("SLURM_STEP_ID", "0"))
    return _FIRST_PORT + (job + _PORTS_BETWEEN_STEPS * step) % _PORTS_OF_JOBS


@dataclass(frozen=True)
class Job:
    """A SLURM job, or one task of an array of jobs.

    Attributes:
        name: Its name for scontrol: 12, or 12_3 for task 3 of array 12.
        cluster: The name of its cluster. Several clusters can share a file system.
        restarts: How often it has been requeued.
        step: The number of this process's step; empty in the batch script itself.
    """

    name: str
    cluster: str
    restarts: int
    step: str = ""

    @property
    def key(self) -> str:
        """A key that no other job of any cluster has."""
        return f"{self.cluster}:{self.name}"


def job_of(environ: Mapping[str, str]) -> Job | None:
    """Return the job of a process; None outside of jobs and in interactive ones.

    Args:
        environ: The variables of the process.
    """
    number = environ.get("SLURM_JOB_ID")
    if not number or is_interactive(environ):
        return None

    name = number
    array = environ.get("SLURM_ARRAY_JOB_ID")
    task = environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        name = f"{array}_{task}"

    return Job(
        name=name,
        cluster=environ.get("SLURM_CLUSTER_NAME", ""),
        restarts=int(environ.get("SLURM_RESTART_COUNT", 0)),
        step=environ.get("SLURM_STEP_ID", ""),
    )


def is_interactive(environ: Mapping[str, str]) -> bool:
    """Return whether a user works in this job: it has the name of a shell.

    A step of several tasks has been started by `srun` and is not interactive, whatever its job is
    called. Otherwise each of its tasks would train the whole federation.
    """
    has_name_of_shell = environ.get("SLURM_JOB_NAME") in _INTERACTIVE
    return has_name_of_shell and not is_step_of_many(environ)


def is_step_of_many(environ: Mapping[str, str]) -> bool:
    """Return whether this process is one of several tasks of a step."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    return "SLURM_STEP_ID" in environ and int(tasks) > 1


def starts_ranks(environ: Mapping[str, str]) -> bool:
    """Return whether SLURM starts Lightning's ranks, and not torchrun or Lightning itself."""
    if "SLURM_NTASKS" not in environ or "TORCHELASTIC_RUN_ID" in environ:
        return False
    return not is_interactive(environ)


def check_tasks(
    environ: Mapping[str, str], *, accelerator: str, gpus: int, ranks_per_device: int = 1
) -> None:
    """Check the tasks that SLURM has started, before devices exist.

    Args:
        environ: The variables of the process.
        accelerator: The Trainer's flag.
        gpus: The number of GPUs that the process sees.
        ranks_per_device: The number of ranks that share a GPU.

    Raises:
        UserError: The process is not a task, the number of tasks per node is not given, or there
            are too few GPUs. It names the option of sbatch, or srun.
    """
    if not starts_ranks(environ):
        return

    is_task = "SLURM_NODEID" in environ and "SLURM_PROCID" in environ
    if not is_task:
        raise UserError(
            key="srun",
            found="a shell of salloc, which is not a task of its job",
            fix="write srun before the command; for a shell with one rank: salloc -J interactive",
        )

    tasks = int(environ["SLURM_NTASKS"])
    tasks_per_node = environ.get("SLURM_NTASKS_PER_NODE")
    if tasks_per_node is None and tasks > 1:
        nodes = int(environ.get("SLURM_NNODES", 1))
        needed = math.ceil(tasks / nodes)
        raise UserError(
            key="--ntasks",
            found=f"{tasks} tasks without --ntasks-per-node",
            fix=f"submit with --nodes={nodes} --ntasks-per-node={needed} instead",
        )

    # A process that sees no GPU at all is refused elsewhere, or has to run on the CPU.
    needed_gpus = math.ceil(int(tasks_per_node or 1) / ranks_per_device)
    sees_too_few = 0 < gpus < needed_gpus
    if accelerator != "cpu" and "SLURM_STEP_ID" in environ and sees_too_few:
        raise UserError(
            key="--gpus-per-node",
            found=f"{tasks_per_node} tasks a node, and each sees {gpus} of {needed_gpus} GPUs",
            fix=f"submit with --gpus-per-node={needed_gpus}, "
            "without --gpus-per-task and --gpu-bind",
        )


def check_launch(
    environ: Mapping[str, str], *, processes: int, nodes: int, ranks_per_device: int = 1
) -> None:
    """Check that a launcher starts the Trainer's ranks, before they wait for each other.

    Args:
        environ: The variables of the process.
        processes: The Trainer's ranks per node.
        nodes: The Trainer's nodes.
        ranks_per_device: The number of ranks that share a GPU.

    Raises:
        UserError: Nothing starts the ranks on other nodes, or SLURM starts other numbers of nodes
            or ranks than the Trainer wants. It names the flag, or srun.
    """
    if not starts_ranks(environ):
        has_launcher = "TORCHELASTIC_RUN_ID" in environ or "NODE_RANK" in environ
        is_in_job = job_of(environ) is not None
        if nodes > 1 and is_in_job and not has_launcher:
            raise UserError(
                key="trainer.num_nodes",
                found=f"{nodes} nodes, but no ranks on them",
                fix="submit with --nodes and --ntasks-per-node, and write srun before the command",
            )
        return

    tasks = int(environ.get("SLURM_NTASKS", 1))
    tasks_per_node = int(environ.get("SLURM_NTASKS_PER_NODE", 1))
    nodes_of_job = int(environ.get("SLURM_NNODES", 1))

    if tasks > 1 and "SLURM_STEP_ID" not in environ:
        raise UserError(
            key="srun",
            found=f"the job has {tasks} tasks, and this process is not one of them",
            fix="write srun before the command",
        )

    if nodes != nodes_of_job:
        raise UserError(
            key="trainer.num_nodes",
            found=f"{nodes}, but the job has {nodes_of_job}",
            fix=f"set it to {nodes_of_job}, or submit with --nodes={nodes}",
        )

    if processes != tasks_per_node or processes * nodes != tasks:
        devices = max(1, tasks_per_node // ranks_per_device)
        raise UserError(
            key="trainer.devices",
            found=f"{processes} ranks a node, but the job has {tasks_per_node} tasks a node, "
            f"{tasks} in all",
            fix=f"set it to {devices}, or submit with --ntasks-per-node={processes}",
        )


def check_rank(local_rank: int, processes: int) -> None:
    """Check that a process is one of the configured ranks, and not started in addition to them.

    Args:
        local_rank: The number of the process on its node, by its launcher.
        processes: The configured ranks per node.

    Raises:
        UserError: It is not one of them.
    """
    if not 0 <= local_rank < processes:
        raise UserError(
            key="LOCAL_RANK",
            found=f"{local_rank}, and trainer.devices asks for {processes} ranks on a node",
            fix="make the launcher and trainer.devices agree",
        )
