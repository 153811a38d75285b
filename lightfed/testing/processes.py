"""Processes that start in milliseconds: forks of one that has imported what they need.

`python -m lightfed.testing.processes DESCRIPTOR` is that one, and ends with the process that
started it. It has no threads, so that its children can fork ranks.
"""

import atexit
import gc
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory

from lightfed.utils.process import LEAST

_IMPORTED = "lightfed.testing.worker"
_SERVER = "from lightfed.testing.processes import main; main()"
_SECONDS = 900
_ended: dict[int, int] = {}


@dataclass(frozen=True)
class Command:
    """`python -m MODULE ARGUMENTS` with its folder, environment, and files for what it prints."""

    module: str
    arguments: tuple[str, ...]
    folder: str
    environment: dict[str, str]
    printed: str
    errors: str


def run_module(module: str, *arguments: str) -> None:
    """Run a module in a process that can fork ranks; an AssertionError if it failed."""
    with TemporaryDirectory() as place:
        errors = Path(place) / "stderr"
        pid = start(module, *arguments, printed="/dev/null", errors=str(errors))
        assert status_of(pid) == 0, errors.read_text()[-3000:]


def start(
    module: str,
    *arguments: str,
    folder: str = ".",
    environment: Mapping[str, str] | None = None,
    printed: str,
    errors: str,
) -> int:
    """Start a module as the leader of a new session.

    Standard output and error go to the files `printed` and `errors`. Without an environment it has
    this process's, less the variables of a launcher of ranks. Returns its process id; `status_of`
    has to be called for it.
    """
    given = _own_environment() if environment is None else dict(environment)
    place = os.path.abspath(folder)
    _server().send(Command(module, arguments, place, given, printed, errors))
    while isinstance(answer := _server().recv(), tuple):
        _ended.update([answer])
    return int(answer)


def status_of(pid: int, seconds: float = _SECONDS) -> int:
    """Wait for a process; its exit status, negative for a signal. TimeoutError if killed."""
    while pid not in _ended:
        if not _server().poll(seconds):
            os.killpg(pid, signal.SIGKILL)
            raise TimeoutError(f"process {pid} took more than {seconds} seconds")
        _ended.update([_server().recv()])
    return _ended.pop(pid)


def _own_environment() -> dict[str, str]:
    """Lightning leaves a launcher's variables even in a process of a single rank."""
    return {name: x for name, x in os.environ.items() if name not in {"MASTER_ADDR", *LEAST}}


@cache
def _server() -> Connection:
    """The connection to the process that forks, started with the first call."""
    here, there = Pipe()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", _SERVER, str(there.fileno())]
    process = subprocess.Popen(
        command, env=environment, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    there.close()
    atexit.register(process.wait)
    atexit.register(here.close)  # first
    return here


def _become(command: Command) -> None:
    """Run a command in a forked process, and end as Python ends."""
    os.setsid()
    os.chdir(command.folder)
    os.environ.clear()
    os.environ.update(command.environment)
    for descriptor, path in ((1, command.printed), (2, command.errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.argv = [command.module, *command.arguments]
    runpy.run_module(command.module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def main() -> None:
    """Fork commands and report their ends until the other side is closed."""
    import_module(_IMPORTED)
    gc.freeze()
    connection, running = Connection(int(sys.argv[1])), set[int]()
    with suppress(EOFError):
        while True:
            if wait([connection], timeout=0.01 if running else None):
                command = connection.recv()
                pid = os.fork()
                if pid == 0:
                    connection.close()
                    _become(command)
                running.add(pid)
                connection.send(pid)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                running.remove(ended[0])
                connection.send((ended[0], os.waitstatus_to_exitcode(ended[1])))
    for pid in running:
        os.killpg(pid, signal.SIGKILL)
