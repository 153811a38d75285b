"""The beginning and the end of a process."""

import subprocess
import sys

import pytest

_SCRIPT = """
import atexit, gc, sys, types

def report():  # registered first, so it is called last
    print("at the end", gc.get_freeze_count() > 0)

atexit.register(report)
triton = types.ModuleType("triton._C.libtriton")
triton.function = type("nb_func", (), {"__module__": sys.argv[1]})()
sys.modules[triton.__name__] = triton
from lightfed.utils.process import imports_begin, imports_end
imports_begin()
import json
imports_end()
print("meanwhile", gc.get_freeze_count() > 0, gc.isenabled())
"""


@pytest.mark.parametrize(("binding", "stays"), [("nanobind", False), ("pybind11_builtins", True)])
def test_what_is_frozen_is_collected_at_the_end_if_its_bindings_list_leaks(
    binding: str, stays: bool
) -> None:
    """Triton 3.9 prints what stays as leaked; without it, the end need not take seconds."""
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT, binding], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == ["meanwhile True True", f"at the end {stays}"]
    assert found.stderr == ""
