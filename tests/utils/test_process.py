"""The beginning and the end of a process."""

import subprocess
import sys

_SCRIPT = """
import atexit, gc

def report():  # registered first, so it is called last
    print("at the end", gc.get_freeze_count())

atexit.register(report)
from lightfed.utils.process import imports_begin, imports_end
imports_begin()
import json
imports_end()
print("meanwhile", gc.get_freeze_count() > 0, gc.isenabled())
"""


def test_what_is_frozen_is_collected_at_the_end() -> None:
    """Else bindings of nanobind, such as those of Triton 3.9, print what they take for leaks."""
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == ["meanwhile True True", "at the end 0"]
    assert found.stderr == ""
