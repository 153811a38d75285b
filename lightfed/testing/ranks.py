"""Jobs of several ranks, forked from one warm process: starting takes milliseconds, not an import.

To Lightning these ranks look externally launched.
"""

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

from lightning.fabric.plugins.environments.lightning import find_free_network_port

from lightfed.distributed.collectives import leave

_SECONDS = 900  # then a rank ends itself: it is waiting for a missing one


def start_job(ranks: int, work: Callable[[int], None]) -> int:
    """Fork the ranks of a job into a new process group.

    Args:
        ranks: number of ranks.
        work: called in each of them with its rank.

    Returns:
        the process group.
    """
    gc.freeze()  # the ranks then neither scan imported objects nor copy their pages
    port = str(find_free_network_port())
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
    """Do the work and exit without running the parent's exit handlers."""
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
