"""What can go wrong before the ranks are connected; from then on `liveness` watches them.

A launcher's variables may be wrong: they are checked before torch and Lightning read them. A rank
that Lightning has launched may die while it imports: the others would wait for it until a timeout.
SLURM and torchrun end their ranks by themselves.
"""

import os
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from signal import Signals
from subprocess import Popen

from lightfed.utils.errors import UserError, require

# Environment variables, and the smallest value of each.
LEAST = {
    "MASTER_PORT": 1,
    "RANK": 0,
    "LOCAL_RANK": 0,
    "NODE_RANK": 0,
    "GROUP_RANK": 0,
    "WORLD_SIZE": 1,
    "LOCAL_WORLD_SIZE": 1,
    "SLURM_JOB_ID": 1,
    "SLURM_NNODES": 1,
    "SLURM_NTASKS": 1,
    "SLURM_NTASKS_PER_NODE": 1,
    "SLURM_PROCID": 0,
    "SLURM_LOCALID": 0,
    "SLURM_NODEID": 0,
    "SLURM_RESTART_COUNT": 0,
}
_LARGEST_PORT = 65535
_LAUNCHER = "LIGHTFED_LAUNCHER"  # the process that launches ranks of its node
_EVERY = 0.2  # seconds between looks
_GRACE = 5.0  # seconds for a process to explain why a launched rank has ended
_AGAIN = "give the ranks more memory if they ran out of it, and start again"

_connected = threading.Event()


def check_variables(environ: Mapping[str, str]) -> None:
    """Reject a variable that is no number, or out of range.

    Raises:
        UserError: names the variable.
    """
    for name, least in LEAST.items():
        value = environ.get(name, str(least))
        found, fix = repr(value), f"set it to a number from {least}, or unset it"
        require(value.isdecimal() and int(value) >= least, name, found, fix)
    port = environ.get("MASTER_PORT", "1")
    require(int(port) <= _LARGEST_PORT, "MASTER_PORT", port, f"give at most {_LARGEST_PORT}")


def check_rank(local_rank: int, processes: int) -> None:
    """Reject a process that its launcher has started in addition to the configured ranks.

    Args:
        local_rank: of this process on its node.
        processes: ranks per node, as configured.

    Raises:
        UserError: names the variable.
    """
    if not 0 <= local_rank < processes:
        found = f"{local_rank}, and trainer.devices asks for {processes} ranks on a node"
        raise UserError("LOCAL_RANK", found, "make the launcher and trainer.devices agree")


def launches(environ: MutableMapping[str, str]) -> None:
    """Name this process to the ranks that it will launch."""
    environ[_LAUNCHER] = str(os.getpid())


def watch_launcher(environ: MutableMapping[str, str]) -> None:
    """End this process if the one that has launched it dies before the ranks are connected."""
    launcher = int(environ.pop(_LAUNCHER, 0))
    rank = environ.get("LOCAL_RANK", "0")
    if not launcher or rank == "0" or (os.getppid() != launcher and _runs(launcher)):
        return  # launched by something else, such as a script of that process

    def look() -> None:
        if os.getppid() != launcher:
            died = f"the rank that launched the others (pid {launcher}) died before they met"
            _end(died if rank == "1" else None, lambda: None)

    _start(look)


def watch_launched(
    processes: Sequence["Popen[bytes]"], first: int, kill: Callable[[], None]
) -> None:
    """End this process if a rank that it has launched dies before the ranks are connected.

    Args:
        processes: of the launched ranks, in order.
        first: the rank of this process.
        kill: ends those that are still running.
    """

    def look() -> None:
        for rank, process in enumerate(processes, first + 1):
            status = process.poll()
            if status is None:
                continue
            how = f"was killed by {Signals(-status).name}" if status < 0 else f"left with {status}"
            if status >= 0 and _connected.wait(_GRACE):  # this process may leave for the same cause
                return
            _end(f"rank {rank} (pid {process.pid}) {how} before the ranks met", kill)

    _connected.clear()
    _start(look)


def connected() -> None:
    """Stop watching."""
    _connected.set()


def _start(look: Callable[[], None]) -> None:
    def watch() -> None:
        while not _connected.wait(_EVERY):
            look()

    threading.Thread(target=watch, name="lightfed-start", daemon=True).start()


def _end(reason: str | None, kill: Callable[[], None]) -> None:
    if reason is not None:
        print(f"lightfed: error: {reason}; {_AGAIN}", file=sys.stderr, flush=True)
    kill()
    os._exit(1)


def _runs(pid: int) -> bool:
    """Whether a process runs; one that has ended but is not reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return not Path("/proc/self/stat").exists()  # unknown on other systems
    return state not in ("Z", "X")
