"""Checks the SLURM allocation against the Trainer's flags.

If they disagree, ranks wait for others that never start. Of the arguments, `environ` is the
process's environment, `gpus` the number of GPUs it sees and `processes` the Trainer's number of
ranks per node. The others are flags of the Trainer.
"""

from collections.abc import Mapping

from lightfed.distributed.slurm import job_of, starts_ranks
from lightfed.utils.errors import UserError


def check_tasks(
    environ: Mapping[str, str], *, accelerator: str, gpus: int, ranks_per_device: int = 1
) -> None:
    """Reject tasks without a number per node, or with too few GPUs; before devices exist.

    Raises:
        UserError: naming the option of sbatch.
    """
    if not starts_ranks(environ):
        return
    tasks, per_node = int(environ["SLURM_NTASKS"]), environ.get("SLURM_NTASKS_PER_NODE")
    if per_node is None and tasks > 1:
        nodes = int(environ.get("SLURM_NNODES", 1))
        fix = f"submit with --nodes={nodes} --ntasks-per-node={-(-tasks // nodes)} in its place"
        raise UserError("--ntasks", f"{tasks} tasks without --ntasks-per-node", fix)
    wanted = -(-int(per_node or 1) // ranks_per_device)
    if accelerator != "cpu" and "SLURM_STEP_ID" in environ and 0 < gpus < wanted:
        found = f"{per_node} tasks a node, and each sees {gpus} of {wanted} GPUs"
        fix = f"submit with --gpus-per-node={wanted}, without --gpus-per-task and --gpu-bind"
        raise UserError("--gpus-per-node", found, fix)


def check_launch(
    environ: Mapping[str, str], *, processes: int, nodes: int, ranks_per_device: int = 1
) -> None:
    """Reject ranks that SLURM does not start; before they wait for each other.

    Raises:
        UserError: naming the flag, or srun.
    """
    if not starts_ranks(environ):
        launched = any(name in environ for name in ("TORCHELASTIC_RUN_ID", "NODE_RANK"))
        if nodes > 1 and job_of(environ) is not None and not launched:
            fix = "submit with --nodes and --ntasks-per-node, and write srun before the command"
            raise UserError("trainer.num_nodes", f"{nodes} nodes, but no ranks on them", fix)
        return
    names = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES")
    tasks, per_node, allotted = (int(environ.get(name, 1)) for name in names)
    if tasks > 1 and "SLURM_STEP_ID" not in environ:
        found = f"the job has {tasks} tasks, and this is none of them"
        raise UserError("srun", found, "write srun before the command")
    if nodes != allotted:
        fix = f"set it to {allotted}, or submit with --nodes={nodes}"
        raise UserError("trainer.num_nodes", f"{nodes}, but the job has {allotted}", fix)
    if processes != per_node or processes * nodes != tasks:
        found = f"{processes} ranks a node, but the job has {per_node} tasks a node, {tasks} in all"
        devices = max(1, per_node // ranks_per_device)
        fix = f"set it to {devices}, or submit with --ntasks-per-node={processes}"
        raise UserError("trainer.devices", found, fix)
