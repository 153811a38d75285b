"""What SLURM has allotted against what the Trainer is told.

Where they disagree, ranks would wait for others that nobody starts.
"""

from collections.abc import Mapping

from lightfed.distributed.slurm import job_of, starts_ranks
from lightfed.utils.errors import UserError

_GPUS = ("auto", "gpu", "cuda")


def check_tasks(
    environ: Mapping[str, str], *, accelerator: str, gpus: int, ranks_per_device: int = 1
) -> None:
    """Refuse tasks that are not told by node, or that see too few GPUs; before there are devices.

    Args:
        environ: of the process.
        accelerator: of the Trainer.
        gpus: that this process sees.
        ranks_per_device: of the Trainer.

    Raises:
        UserError: naming the option of sbatch.
    """
    if not starts_ranks(environ):
        return
    tasks, per_node = int(environ["SLURM_NTASKS"]), environ.get("SLURM_NTASKS_PER_NODE")
    if per_node is None:
        if tasks == 1:
            return
        nodes = int(environ.get("SLURM_NNODES", 1))
        fix = f"submit with --nodes={nodes} --ntasks-per-node={-(-tasks // nodes)} in its place"
        raise UserError("--ntasks", f"{tasks} tasks without --ntasks-per-node", fix)
    wanted = -(-int(per_node) // ranks_per_device)
    if accelerator in _GPUS and "SLURM_STEP_ID" in environ and 0 < gpus < wanted:
        found = f"{per_node} tasks a node, and each sees {gpus} GPU" + "s" * (gpus > 1)
        fix = f"submit with --gpus-per-node={wanted}, without --gpus-per-task and --gpu-bind"
        raise UserError("--gpus-per-node", found, fix)


def check_launch(
    environ: Mapping[str, str], *, processes: int, nodes: int, ranks_per_device: int = 1
) -> None:
    """Refuse ranks that SLURM does not start; before they wait for each other.

    Args:
        environ: of the process.
        processes: ranks on a node, by the Trainer.
        nodes: by the Trainer.
        ranks_per_device: of the Trainer.

    Raises:
        UserError: naming the flag, or srun.
    """
    if not starts_ranks(environ):
        launched = any(name in environ for name in ("TORCHELASTIC_RUN_ID", "NODE_RANK"))
        if nodes > 1 and job_of(environ) is not None and not launched:
            fix = "submit with --nodes and --ntasks-per-node, and write srun before the command"
            raise UserError("trainer.num_nodes", f"{nodes} nodes, but no ranks on them", fix)
        return
    tasks = int(environ["SLURM_NTASKS"])
    per_node = int(environ.get("SLURM_NTASKS_PER_NODE", 1))
    if tasks > 1 and "SLURM_STEP_ID" not in environ:
        found = f"the job has {tasks} tasks, and this is none of them"
        raise UserError("srun", found, "write srun before the command")
    allotted = int(environ.get("SLURM_NNODES", 1))
    if nodes != allotted:
        fix = f"set it to {allotted}, or submit with --nodes={nodes}"
        raise UserError("trainer.num_nodes", f"{nodes}, but the job has {allotted}", fix)
    if processes != per_node or processes * nodes != tasks:
        found = f"{processes} ranks a node, but the job has {per_node} tasks a node, {tasks} in all"
        devices = max(1, per_node // ranks_per_device)
        fix = f"set it to {devices}, or submit with --ntasks-per-node={processes}"
        raise UserError("trainer.devices", found, fix)
