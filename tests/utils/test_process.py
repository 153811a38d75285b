"""The end of a command's process: as Python's own, but at once."""

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = "import atexit, gc, sys, threading, time\nfrom lightfed.utils.process import *\n"


def ended(code: str, **options: object) -> "subprocess.CompletedProcess[str]":
    """A process of some lines that then ends."""
    words = [sys.executable, "-c", BEGIN + code]
    return subprocess.run(words, text=True, check=False, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("status", [0, 1, 2])
def test_threads_exit_functions_and_buffers_are_waited_for(status: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = f"""
file = open({str(tmp_path / "late")!r}, "w")
def late():
    time.sleep(0.2)
    file.write("thread")
    file.close()
threading.Thread(target=late).start()
atexit.register(print, "exit function")
print("printed")
class Slow:
    def __del__(self): print("freed")
slow = Slow()
end_process({status})
"""
    with out.open("w") as stream:
        done = ended(code, stdout=stream)
    assert done.returncode == status, done.stderr
    assert out.read_text() == "printed\nexit function\n"
    assert (tmp_path / "late").read_text() == "thread"


def test_a_stream_that_cannot_be_flushed_is_left_to_python() -> None:
    code = 'import os\nos.close(1)\nprint("lost")\nend_process(0)\nsys.exit(7)'
    done = ended(code, stdout=subprocess.PIPE)
    assert done.returncode not in (0, 7), done.stderr  # Python's 120
    assert "flush" in done.stderr or "Bad file" in done.stderr
