"""What can go wrong before the ranks are connected; from then on `watch` watches them.

A launcher's variables may be wrong: they are checked before torch and Lightning read them. A rank
that Lightning has launched may die while it imports: the others would wait for it until a timeout.
SLURM and torchrun end their ranks by themselves.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from signal import Signals
from subprocess import Popen, TimeoutExpired

from lightfed.utils.errors import UserError, require
from lightfed.utils.process import LEAST

_LARGEST_PORT = 65535
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_LAUNCHER = "LIGHTFED_LAUNCHER"  # the process that launches ranks of its node
_EVERY = 0.2  # seconds between looks
_GRACE = 5.0  # seconds for a process to explain why a launched rank has ended
_LAST_WORDS = 2.0  # seconds for ranks to exit by themselves before they are killed
_AGAIN = "give the ranks more memory if they ran out of it, and start again"

_connected = threading.Event()


def check_variables(environ: Mapping[str, str]) -> None:
    """Reject a variable that is no number, or out of range. A UserError names the variable."""
    for name, least in LEAST.items():
        value = environ.get(name, str(least))
        found, fix = repr(value), f"set it to a number from {least}, or unset it"
        require(value.isdecimal() and int(value) >= least, name, found, fix)
    for name in _OF_TORCHRUN if "TORCHELASTIC_RUN_ID" in environ else ():
        found = "not set, but TORCHELASTIC_RUN_ID is"
        require(name in environ, name, found, "start with torchrun, or unset TORCHELASTIC_RUN_ID")
    port = environ.get("MASTER_PORT", "1")
    require(int(port) <= _LARGEST_PORT, "MASTER_PORT", port, f"give at most {_LARGEST_PORT}")


def check_rank(local_rank: int, processes: int) -> None:
    """Reject a process that its launcher has started in addition to the configured ranks.

    `processes` are the configured ranks per node. A UserError names the variable.
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
    if not launcher or rank == "0":
        return

    def look() -> None:
        if os.getppid() != launcher:
            died = f"the rank that launched the others (pid {launcher}) died before they met"
            _end(died if rank == "1" else None, lambda: None)

    _start(look)


def watch_launched(
    processes: Sequence["Popen[bytes]"], first: int, kill: Callable[[], None]
) -> None:
    """End this process if a rank that it has launched dies before the ranks are connected.

    `first` is the rank of this process. `kill` ends the ranks that are still running.
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


def has_store() -> bool:
    """Whether the launcher keeps the store at which the ranks meet, as torchrun does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def end_launched(processes: Sequence["Popen[bytes]"]) -> None:
    """Kill launched ranks that do not exit by themselves, such as stopped ones."""
    limit = time.monotonic() + _LAST_WORDS
    for process in processes:
        try:
            process.wait(max(0.0, limit - time.monotonic()))
        except TimeoutExpired:
            process.kill()


def connected() -> None:
    """Stop watching."""
    _connected.set()


def _start(look: Callable[[], None]) -> None:
    def watch() -> None:
        while not _connected.wait(_EVERY):
            look()

    threading.Thread(target=watch, name="lightfed-start", daemon=True).start()


def _end(reason: str | None, kill: Callable[[], None], fix: str = _AGAIN) -> None:
    if reason is not None:
        print(f"lightfed: error: {reason}; {fix}", file=sys.stderr, flush=True)
    kill()
    os._exit(1)
