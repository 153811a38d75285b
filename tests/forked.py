"""Work in a child that is forked from this process: it has all imports, and ends without a trace.

A new process costs seconds of imports, a forked one milliseconds. What the child changes (modules,
variables, handlers of signals) ends with it.
"""

import gc
import os
import pickle
import runpy
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn, TypeVar

from lightfed.testing.ranks import PACKAGE, call_alone

T = TypeVar("T")
_LENGTH, _STATUS = struct.Struct("!Q"), struct.Struct("!i")


def forked(work: Callable[[], object]) -> int:
    """Start work in a child; its process, whose status is 0 unless the work raises."""
    gc.freeze()  # the child neither scans what is imported nor copies its pages
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def result_of(work: Callable[[], T]) -> T:
    """What work in a child returns.

    Raises:
        ChildProcessError: The child ended before it had a result; with the status it left.
    """
    reader, writer = os.pipe()

    def send() -> None:
        os.close(reader)
        content = pickle.dumps(work())
        with os.fdopen(writer, "wb") as file:
            file.write(content)

    pid = forked(send)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        content = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status or not content:
        raise ChildProcessError(f"the child ended with status {status}")
    found: T = pickle.loads(content)
    return found


class Server:
    """A process that is forked from this one early, and from which others are forked later.

    They have all that was imported when it began, and nothing of what was done since: no threads,
    no groups of ranks, no changes of modules.
    """

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair()
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            self._requests.close()
            _serve(theirs)
        theirs.close()

    def call(
        self,
        function: Callable[..., int | None],
        *arguments: Any,
        output: int = 1,
        errors: int = 2,
    ) -> int:
        """The status of a new process that calls a function and ends; both are pickled.

        What it prints appears where this process prints, or at other descriptors.
        """
        place = (dict(os.environ), [*sys.path])
        # Pickled apart: a module of the function is found only where the paths are those of here.
        work = pickle.dumps((function, arguments))
        request = pickle.dumps((os.getcwd(), place, work))
        socket.send_fds(self._requests, [_LENGTH.pack(len(request))], [output, errors])
        self._requests.sendall(request)
        status: int = _STATUS.unpack(_received(self._requests, _STATUS.size))[0]
        return status


def _received(connection: socket.socket, size: int) -> bytes:
    """So many bytes; an EOFError if the other side has ended."""
    content = b""
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            raise EOFError("the server of processes has ended")
        content += part
    return content


def _serve(requests: socket.socket) -> NoReturn:
    """Fork a process for each request, one after the other, until the other side ends."""
    try:
        while True:
            head, outputs, _, _ = socket.recv_fds(requests, _LENGTH.size, 2)
            if not head:
                break
            request = _received(requests, _LENGTH.unpack(head)[0])
            pid = os.fork()
            if pid == 0:
                requests.close()
                _become(request, *outputs)
            for output in outputs:
                os.close(output)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            requests.sendall(_STATUS.pack(status))
    finally:
        os._exit(0)


def _become(request: bytes, output: int, errors: int) -> NoReturn:
    """Do what a request asks for, and end."""
    status = 1
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    try:
        folder, place, work = pickle.loads(request)
        os.chdir(folder)
        sys.path[:] = place[1]
        function, arguments = pickle.loads(work)
        call_alone(*place, output, errors, PACKAGE, function, *arguments)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


_servers: list[Server] = []  # the one of this process


def begin() -> None:
    """Start the server of this process: all tests are imported, and none has run."""
    if not _servers:
        _servers.append(Server())


def in_new_process(function: Callable[..., int | None], *arguments: Any) -> None:
    """Call a function in a new process, which can fork ranks; an AssertionError if it failed."""
    begin()
    status = _servers[0].call(function, *arguments)
    assert status == 0, f"{function}: status {status}, see the end of what it has printed"


def run_script(
    script: Path, folder: Path, *, forgotten: str | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a script in a new process that has imported everything, as `python script` would.

    Args:
        script: The file.
        folder: The working folder.
        forgotten: A package that the script imports anew.
    """
    begin()
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        status = _servers[0].call(
            _be_script,
            str(script.resolve()),
            str(folder),
            forgotten,
            output=output.fileno(),
            errors=errors.fileno(),
        )
        # The descriptors have been written to by the other process.
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(
            [str(script)], status, stdout=output.read(), stderr=errors.read()
        )


def _be_script(script: str, folder: str, forgotten: str | None) -> None:
    os.chdir(folder)
    sys.argv = [script]
    sys.path.insert(0, os.path.dirname(script))
    for name in list(sys.modules):
        if forgotten is not None and (name == forgotten or name.startswith(f"{forgotten}.")):
            del sys.modules[name]
    runpy.run_path(script, run_name="__main__")
