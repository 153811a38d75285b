"""Jobs of several ranks that are forked from one process, in milliseconds and without an import.

To Lightning, these ranks look as if a launcher had started them.
"""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from typing_extensions import override

from lightfed.distributed import collectives
from lightfed.utils.process import freeze

# The beginnings of the names of launchers' variables.
_LAUNCHERS = ("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "NODE_RANK", "GROUP_RANK", "SLURM_")

# After so many seconds, a rank ends itself: it is waiting for one that is missing.
_SECONDS = 900

# A file of the lightfed that this process has imported.
PACKAGE = collectives.__file__

_FORKS = get_context("forkserver")

# What the server of processes imports once, for all of them.
_IMPORTED = ["lightfed.testing.worker", "lightfed.cli.federation_cli"]


class _Output:
    """A descriptor of this process that another process gets, too, when it is pickled."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @override
    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _descriptor_of, (DupFd(self._descriptor),)


def _descriptor_of(copy: Any) -> int:
    descriptor: int = copy.detach()
    return descriptor


def in_new_process(function: Callable[..., int | None], *arguments: Any) -> None:
    """Call a function in a new process, which can fork ranks.

    Only the first call waits for imports, because the process is forked from a server that has done
    nothing else. What the function prints appears where this process prints.

    Args:
        function: The function; it is pickled.
        *arguments: Its arguments; they are pickled, too.

    Raises:
        AssertionError: The function has failed.
    """
    _FORKS.set_forkserver_preload(_IMPORTED)

    # The server has the variables, the paths and the output of the first call, so those of this one
    # are handed over.
    surroundings = (dict(os.environ), list(sys.path), _Output(1), _Output(2))
    process = _FORKS.Process(target=call_alone, args=(*surroundings, PACKAGE, function, *arguments))
    process.start()
    process.join()
    assert process.exitcode == 0, f"{function.__module__}: see the end of what it has printed"


def call_alone(
    environ: dict[str, str],
    path: list[str],
    output: int,
    errors: int,
    package: str,
    function: Callable[..., int | None],
    *arguments: Any,
) -> None:
    """Call a function without other threads, and without the variables of a launcher of ranks.

    Args:
        environ: The variables to set in place of all others.
        path: The folders in which modules are looked for.
        output: The descriptor for what is printed.
        errors: The descriptor for errors.
        package: A file of the lightfed that the caller has imported.
        function: The function.
        *arguments: Its arguments.
    """
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = path
    os.dup2(output, 1)
    os.dup2(errors, 2)
    assert package == PACKAGE, f"{PACKAGE} was imported, and not {package}"

    signal.alarm(_SECONDS)
    torch.set_num_threads(1)
    # Lightning leaves such variables even after a run of one rank.
    for name in list(os.environ):
        if name.startswith(_LAUNCHERS):
            del os.environ[name]
    sys.exit(function(*arguments))


def kept_port() -> socket.socket:
    """Return a socket that keeps a free port of 127.0.0.1 for ranks to meet at.

    It keeps the port while any process has the socket. It does not listen, so that a process that
    names the port gets it, and one that asks for any free port gets another.
    """
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    return keeper


def start_job(ranks: int, work: Callable[[int], None]) -> int:
    """Fork the ranks of a job.

    Args:
        ranks: The number of ranks.
        work: What each rank calls with its number.

    Returns:
        The new process group.
    """
    # The ranks then neither scan imported objects nor copy their pages.
    freeze()

    group = 0
    # The ranks inherit the socket, and with it the port.
    with kept_port() as keeper:
        port = str(keeper.getsockname()[1])
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, group)
                signal.alarm(_SECONDS)
                os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(ranks))
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
                _work_and_exit(work, rank)
            if group == 0:
                # The first rank leads the group.
                group = pid
            os.setpgid(pid, group)
    return group


def _work_and_exit(work: Callable[[int], None], rank: int) -> None:
    """Do the work and exit, without running the parent's exit handlers."""
    status = 1
    try:
        work(rank)
        collectives.leave()
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def wait(group: int) -> bool:
    """Wait for a job, and return whether all ranks have succeeded.

    If one fails, the others are killed.

    Args:
        group: The process group of the job.
    """
    have_succeeded = True
    while True:
        try:
            _, status = os.waitpid(-group, 0)
        except ChildProcessError:
            # All of them have ended.
            return have_succeeded

        if status != 0 and have_succeeded:
            have_succeeded = False
            with suppress(ProcessLookupError):  # it was the last one
                os.killpg(group, signal.SIGKILL)
