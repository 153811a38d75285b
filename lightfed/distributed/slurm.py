"""Reads a launcher's and SLURM's variables, and checks the Trainer's flags against them.

If they disagree, ranks wait for others that never start. Cheap to import.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lightfed.utils.errors import UserError, require

# Job names of `salloc` and `srun --pty bash`; Lightning ignores SLURM in them, too.
_INTERACTIVE = ("bash", "interactive")
_PORTS = range(1, 1 << 16)
_FIRST_PORT, _JOB_PORTS = 15_000, 10_000  # Lightning's, by the last four digits of a job's number
_STEP = 97  # ports between two steps of a job; all of its first 10,000 steps have another one
# What launchers say in whole numbers.
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
_MOST = 1 << 31  # more than any of them is
# What has to be there if the first of them is: then a launcher has started the process.
_TORCHRUN = ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
_TASK = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")


def check_variables(environ: Mapping[str, str]) -> None:
    """Reject variables of launchers that are no numbers, or only a part of what a launcher sets.

    Lightning reads some of them when it is imported, and fails there without a line: so this comes
    first.

    Raises:
        UserError: Names the variable, and what it holds.
    """
    for name in _NUMBERS:
        value = environ.get(name)
        if value is None:
            continue
        least = 1 if name in _AT_LEAST_1 else 0
        fix = f"its launcher sets it to a whole number from {least} on: correct it, or unset it"
        require(_number(value) in range(least, _MOST), name, repr(value), fix)
    port = environ.get("MASTER_PORT")
    if port is not None:
        fix = f"give a port from 1 to {_PORTS[-1]}, or unset it"
        require(_number(port) in _PORTS, "MASTER_PORT", repr(port), fix)
    _check_all_there(environ, _TORCHRUN, "start the command by torchrun")
    if starts_ranks(environ):
        _check_all_there(environ, _TASK, "write srun before the command")


def _check_all_there(environ: Mapping[str, str], names: tuple[str, ...], start: str) -> None:
    first, *others = names
    if first not in environ:
        return
    for name in others:
        fix = f"{start}, or unset {first}"
        require(name in environ, name, f"missing, while {first} is set", fix)


def _number(text: str) -> int:
    """A whole number in plain digits; -1 for any other text."""
    plain = text.strip()
    return int(plain) if plain.isascii() and plain.isdigit() and len(plain) < 20 else -1


def port_of(environ: Mapping[str, str]) -> int:
    """The port at which the ranks of a job's step meet: another one for each of its steps.

    Two steps of a job may run at the same time on the same node.
    """
    given = environ.get("MASTER_PORT")
    if given is not None:
        return int(given)
    step = environ.get("SLURM_STEP_ID", "0")
    place = int(environ.get("SLURM_JOB_ID", "0")[-4:]) + _STEP * int(step)
    return _FIRST_PORT + place % _JOB_PORTS


@dataclass(frozen=True)
class Job:
    """A job, or one task of an array of jobs: 12, or 12_3 for task 3 of array 12, for scontrol.

    Several clusters may share a file system. `restarts` counts how often it has been requeued.
    `step` is the number of this process's step; it is empty in the batch script itself.
    """

    name: str
    cluster: str
    restarts: int
    step: str = ""

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
    restarts = int(environ.get("SLURM_RESTART_COUNT", 0))
    step = environ.get("SLURM_STEP_ID", "")
    return Job(name, environ.get("SLURM_CLUSTER_NAME", ""), restarts, step)


def is_interactive(environ: Mapping[str, str]) -> bool:
    """Whether SLURM is only where a user works: a job with the name of a shell.

    A step of several tasks has been started by `srun`: it is not, whatever its job is called. Each
    of its tasks would else train the whole federation.
    """
    named = environ.get("SLURM_JOB_NAME") in _INTERACTIVE
    return named and not is_step_of_many(environ)


def is_step_of_many(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks of a step."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    return "SLURM_STEP_ID" in environ and int(tasks) > 1


def starts_ranks(environ: Mapping[str, str]) -> bool:
    """Whether SLURM starts Lightning's ranks, rather than torchrun or Lightning itself."""
    torchrun = "TORCHELASTIC_RUN_ID" in environ
    return "SLURM_NTASKS" in environ and not is_interactive(environ) and not torchrun


def check_tasks(
    environ: Mapping[str, str], *, accelerator: str, gpus: int, ranks_per_device: int = 1
) -> None:
    """Reject tasks without a number per node, or with too few GPUs; before devices exist.

    `gpus` is the number that the process sees. A UserError names the option of sbatch.
    """
    if not starts_ranks(environ):
        return
    fix = "write srun before the command; a shell of one rank: salloc -J interactive"
    in_a_step = "SLURM_NODEID" in environ and "SLURM_PROCID" in environ
    require(in_a_step, "srun", "a shell of salloc, which is no task of its job", fix)
    tasks, per_node = int(environ["SLURM_NTASKS"]), environ.get("SLURM_NTASKS_PER_NODE")
    nodes = int(environ.get("SLURM_NNODES", 1))
    fix = f"submit with --nodes={nodes} --ntasks-per-node={-(-tasks // nodes)} instead"
    found = f"{tasks} tasks without --ntasks-per-node"
    require(per_node is not None or tasks <= 1, "--ntasks", found, fix)
    wanted = -(-int(per_node or 1) // ranks_per_device)
    few = accelerator != "cpu" and "SLURM_STEP_ID" in environ and 0 < gpus < wanted
    found = f"{per_node} tasks a node, and each sees {gpus} of {wanted} GPUs"
    fix = f"submit with --gpus-per-node={wanted}, without --gpus-per-task and --gpu-bind"
    require(not few, "--gpus-per-node", found, fix)


def check_launch(
    environ: Mapping[str, str], *, processes: int, nodes: int, ranks_per_device: int = 1
) -> None:
    """Reject ranks that SLURM does not start; before they wait for each other.

    `processes` are the Trainer's ranks per node. A UserError names the flag, or srun.
    """
    if not starts_ranks(environ):
        launched = any(name in environ for name in ("TORCHELASTIC_RUN_ID", "NODE_RANK"))
        fits = nodes == 1 or job_of(environ) is None or launched
        fix = "submit with --nodes and --ntasks-per-node, and write srun before the command"
        require(fits, "trainer.num_nodes", f"{nodes} nodes, but no ranks on them", fix)
        return
    names = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES")
    tasks, per_node, allotted = (int(environ.get(name, 1)) for name in names)
    found = f"the job has {tasks} tasks, and this process is not one of them"
    fits = tasks <= 1 or "SLURM_STEP_ID" in environ
    require(fits, "srun", found, "write srun before the command")
    fix = f"set it to {allotted}, or submit with --nodes={nodes}"
    require(nodes == allotted, "trainer.num_nodes", f"{nodes}, but the job has {allotted}", fix)
    found = f"{processes} ranks a node, but the job has {per_node} tasks a node, {tasks} in all"
    fix = f"set it to {per_node // ranks_per_device or 1}"
    fix = f"{fix}, or submit with --ntasks-per-node={processes}"
    require(processes == per_node and processes * nodes == tasks, "trainer.devices", found, fix)


def check_rank(local_rank: int, processes: int) -> None:
    """Reject a process that its launcher has started in addition to the configured ranks.

    `processes` are the configured ranks per node. A UserError names the variable.
    """
    if not 0 <= local_rank < processes:
        found = f"{local_rank}, and trainer.devices asks for {processes} ranks on a node"
        raise UserError("LOCAL_RANK", found, "make the launcher and trainer.devices agree")
