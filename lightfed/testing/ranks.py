"""Jobs of several ranks, forked from one process: starting takes milliseconds, not an import.

To Lightning these ranks look externally launched.
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

# Beginnings of the names of launchers' variables.
_LAUNCHERS = ("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "NODE_RANK", "GROUP_RANK", "SLURM_")
_SECONDS = 900  # then a rank ends itself: it is waiting for a missing one
PACKAGE = collectives.__file__  # of the lightfed that this process has imported
_FORKS = get_context("forkserver")
# What its server imports once, for all processes to come.
_IMPORTED = ["lightfed.testing.worker", "lightfed.cli.federation_cli"]


class _Output:
    """A descriptor of this process that another one gets, too."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @override
    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _descriptor_of, (DupFd(self._descriptor),)


def _descriptor_of(copy: Any) -> int:
    descriptor: int = copy.detach()
    return descriptor


def in_new_process(function: Callable[..., int | None], *arguments: Any) -> None:
    """Call a function in a new process, which can fork ranks; an AssertionError if it failed.

    It is pickled with its arguments. What it prints appears where this process prints. Only the
    first call waits for imports: the process is forked from a server that has done nothing else.
    """
    _FORKS.set_forkserver_preload(_IMPORTED)
    # The server has the variables, the paths and the output of the first call.
    place = (dict(os.environ), [*sys.path], _Output(1), _Output(2))
    process = _FORKS.Process(target=call_alone, args=(*place, PACKAGE, function, *arguments))
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
        environ: Variables, for all others.
        path: Where modules are looked for.
        output: Descriptor for what is printed.
        errors: The same for errors.
        package: A file of the lightfed that the caller has imported.
        function: What is called.
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
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
        del os.environ[name]  # Lightning leaves them even after a run of one rank
    sys.exit(function(*arguments))


def kept_port() -> socket.socket:
    """A socket that keeps a free port of 127.0.0.1 for ranks to meet at, while any process has it.

    It does not listen: who names the port gets it, and who asks for any free port gets another.
    """
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    return keeper


def start_job(ranks: int, work: Callable[[int], None]) -> int:
    """Fork the ranks of a job, each of which calls `work`; the new process group."""
    freeze()  # the ranks then neither scan imported objects nor copy their pages
    group = 0
    with kept_port() as keeper:  # the ranks inherit it
        port = str(keeper.getsockname()[1])
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, group)
                signal.alarm(_SECONDS)
                os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(ranks))
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
                _end(work, rank)
            group = group or pid
            os.setpgid(pid, group)
    return group


def _end(work: Callable[[int], None], rank: int) -> None:
    """Do the work and exit without running the parent's exit handlers."""
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
    """Whether all ranks of a job succeeded; if one fails, the others are killed."""
    well = True
    while True:
        try:
            _, status = os.waitpid(-group, 0)
        except ChildProcessError:
            return well
        if status and well:
            well = False
            with suppress(ProcessLookupError):  # it was the last one
                os.killpg(group, signal.SIGKILL)
