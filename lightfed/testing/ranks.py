"""Jobs of several ranks, forked from one warm process: a start costs milliseconds, not an import.

Lightning finds such ranks as if something else had started them.
"""

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

from lightfed.distributed.collectives import leave

_SECONDS = 900  # then a rank ends itself: it waits for one that will not come


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start_job(ranks: int, work: Callable[[int], None]) -> int:
    """Fork the ranks of a job into a process group of their own.

    Args:
        ranks: how many.
        work: what each of them does, called with its rank.

    Returns:
        the process group.
    """
    gc.freeze()  # the ranks need not look through what was imported, nor copy its pages
    port = str(free_port())
    group = 0
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
    """Do the work, and leave the process without what its parent does at exit."""
    status = 1
    try:
        work(rank)
        leave()
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def wait(group: int) -> bool:
    """Whether all ranks of a job ended well; where one did not, the others are ended too."""
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
