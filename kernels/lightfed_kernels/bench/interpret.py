"""--check: the kernels in Triton's interpreter, on small rows, against the float64 references."""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from lightfed_kernels.bench import measure
from lightfed_kernels.bench.cases import build_cases
from lightfed_kernels.bench.models import TINY

# Triton has to see these before it is imported.
INTERPRETED = {"TRITON_INTERPRET": "1", "LIGHTFED_KERNELS": "triton"}

# All five widths, one of them twice.
CLIENTS = 6


def why_not() -> str | None:
    """Why kernels cannot be interpreted here, or None."""
    try:
        triton, numpy = (_release(name) for name in ("triton", "numpy"))
    except PackageNotFoundError:
        return "Triton is not installed"
    if triton < (3, 7) and numpy >= (2, 4):
        return "Triton before 3.7 interprets no run-time loop under NumPy 2.4 or later"
    return None


def _release(package: str) -> tuple[int, int]:
    major, minor = version(package).split(".")[:2]
    return int(major), int(minor)


def check_in_child(operations: Sequence[str], dtypes: Sequence[str]) -> int:
    """`check` in a process whose environment selects the interpreter; its exit status.

    The process runs this module and starts no other: without that environment it fails.
    """
    sys.stdout.flush()
    names = [",".join(operations), ",".join(dtypes)]
    command = [sys.executable, "-m", "lightfed_kernels.bench.interpret", *names]
    return subprocess.run(command, env={**os.environ, **INTERPRETED}).returncode


def check(operations: Sequence[str], dtypes: Sequence[torch.dtype]) -> int:
    """A line a case; 1 if one failed."""
    failed = 0
    cpu = torch.device("cpu")
    for case in build_cases(operations, [TINY], [CLIENTS], dtypes, cpu):
        error, passed = measure.check(case)
        failed += not passed
        word = "ok" if passed else "FAIL"
        print(f"  {word:4} {case.title}: interpreted kernel, error {error:.1e}", flush=True)
    return min(failed, 1)


def main(operations: str, dtypes: str) -> int:
    missing = [name for name, value in INTERPRETED.items() if os.environ.get(name) != value]
    if missing:
        print(f"set {', '.join(missing)}; or use --check, which does", file=sys.stderr)
        return 2
    return check(operations.split(","), [getattr(torch, name) for name in dtypes.split(",")])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
