"""What can go wrong before the ranks are connected; from then on `liveness` watches them.

A launcher's variables may be wrong: they are checked before torch and Lightning read them. A rank
that Lightning has launched may die while it imports: the others would wait for it until a timeout.
SLURM and torchrun end their ranks by themselves. The ranks of a notebook are forked from it. A rank
that is stopped keeps the others waiting without a word: who has come is written to the store at
which they meet.
"""

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from signal import Signals
from subprocess import Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lightfed.distributed.peers import SILENT
from lightfed.utils import signals
from lightfed.utils.errors import UserError, require
from lightfed.utils.process import LEAST

if TYPE_CHECKING:  # a rank is watched before it imports torch
    from torch.distributed import TCPStore

_LARGEST_PORT = 65535
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_LAUNCHER = "LIGHTFED_LAUNCHER"  # the process that launches ranks of its node
_EVERY = 0.2  # seconds between looks
_GRACE = 5.0  # seconds for a process to explain why a launched rank has ended
_ANSWER = 2.0  # seconds for a store to answer
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


def arrive(store: tuple[str, int], rank: int) -> None:
    """Note at the store, given by its address and port, that a rank has come."""
    _connection(store).set(_key(rank), "")


def absent(store: tuple[str, int], world: int) -> list[int]:
    """The ranks that have not come; rank 0 is there if the store is its own."""
    connection = _connection(store)
    first = 0 if has_store() else 1
    return [rank for rank in range(first, world) if not connection.check([_key(rank)])]


def watch_meeting(
    ask: Callable[[], list[int]], rank: int, limit: float, kill: Callable[[], None]
) -> None:
    """Report the ranks that do not come, and end this process if they still have not at the limit.

    torch waits in silence, and for a rank 0 that is stopped without limit. `ask` says which ranks
    are absent; it may not return if rank 0 is stopped. Rank 0 reports the others, and rank 1 only
    rank 0. `limit` is in seconds, until torch's own error, where it has one. `kill` ends the
    processes that this one has launched.
    """
    limit = max(limit, 2 * SILENT)
    ends = f"{limit / 60:g} minutes (trainer.strategy.init_args.timeout)"

    def watch() -> None:
        if _connected.wait(SILENT):
            return
        missing = _answer(ask) if rank < 2 else []
        reports = rank == 0 or 0 in missing
        who = "all ranks have come, but do not answer"
        if missing:
            who = f"no sign of rank {', '.join(map(str, missing))}"
        if reports:
            said = f"{who} for {SILENT:g} s; the run ends after {ends}"
            print(f"lightfed: {said}", file=sys.stderr, flush=True)
        if not _connected.wait(limit - SILENT + 2 * _GRACE):
            _end(f"{who} for {ends}" if reports else None, kill, "start all ranks again")

    _connected.clear()
    threading.Thread(target=watch, name="lightfed-meeting", daemon=True).start()


def _answer(ask: Callable[[], list[int]]) -> list[int]:
    """What is asked of the store; rank 0, which has it, if there is no answer."""
    found = [[0]]

    def put() -> None:
        with suppress(RuntimeError):  # nobody listens
            found.append(ask())

    thread = threading.Thread(target=put, name="lightfed-absent", daemon=True)
    thread.start()
    thread.join(2 * _ANSWER)
    return found[-1]


def _connection(store: tuple[str, int]) -> "TCPStore":
    """A connection of its own: one on which this process waits answers nothing else."""
    from torch.distributed import TCPStore

    return TCPStore(*store, wait_for_workers=False, timeout=timedelta(seconds=_ANSWER))


def _key(rank: int) -> str:
    return f"lightfed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


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


def fork_ranks(ranks: int, work: Callable[[int], Any]) -> Any:
    """Run a function on ranks that are forked from this process, which waits for them.

    A signal that asks this process to stop is passed on. `work` is called in each with its rank,
    and leaves the process group. Returns what it returns on rank 0; it is pickled. Raises the
    UserError or SystemExit of a rank, or a ProcessException with the traceback if a rank has died
    or raised something else.
    """
    from torch.multiprocessing.spawn import ProcessException, start_processes

    with TemporaryDirectory() as folder:
        job = start_processes(_fork, (work, folder), ranks, join=False, start_method="fork")
        try:
            passed, died = False, None
            while not job.join(_EVERY, grace_period=_GRACE):
                number = signals.asked()
                for process in job.processes if number and not passed else ():
                    os.kill(process.pid, number)  # type: ignore[arg-type]
                passed = bool(number)
        except ProcessException as error:
            died = error
        finally:  # a second Ctrl-C does not wait
            for process in job.processes:
                process.kill()
        made = [pickle.loads(path.read_bytes()) for path in sorted(Path(folder).iterdir())]
    for one in made:
        if isinstance(one, BaseException):
            raise one
    if died is not None:
        raise died
    return made[0]


def _fork(rank: int, work: Callable[[int], Any], folder: str) -> None:
    os.setpgid(0, 0)  # a notebook's interrupt goes to a group, and is passed on
    made: Any
    try:
        made = work(rank)
    except (SystemExit, UserError) as error:
        made = error
    if rank == 0 or isinstance(made, BaseException):
        (Path(folder) / f"{rank:06}").write_bytes(pickle.dumps(made))


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


def _runs(pid: int) -> bool:
    """Whether a process runs; one that has ended but is not reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return not Path("/proc/self/stat").exists()  # unknown on other systems
    return state not in ("Z", "X")
