"""Holds every code of a case to the reference, then times it.

Times are Triton's `do_bench` on a GPU, `torch.utils.benchmark` on a CPU; both start with data
that are not in the cache. CUDA graphs (`do_bench_cudagraph`) would leave them there, and the
papers' codes wait for the device in a call, which a graph cannot.
"""

import os
import platform
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from lightfed_kernels._rows import short
from torch import Tensor
from torch.utils.benchmark import Timer

from bench.case import COMPILED, OFFICIAL, OURS, Case, Run, relative_error

# Timed calls on a CPU: at most so many; no more, from the third on, after so many seconds.
CALLS = 7
SECONDS = 10.0

# Read before a timed call: more than a core's share of the last cache.
SCRAP_BYTES = 2**26


@dataclass(frozen=True)
class Environment:
    """The machine, for readers of the results.

    Attributes:
        processor: the name of the card or of the CPU.
        copy_gb_per_s: bytes read and written by a large copy, per second, in this run.
        backend: the choice of LIGHTFED_KERNELS.
    """

    device: str
    processor: str
    clock: str
    copy_gb_per_s: float
    threads: int
    python: str
    torch: str
    triton: str
    numpy: str
    backend: str
    date: str

    def line(self) -> str:
        return (
            f"{self.processor} ({self.device}), {self.threads} threads; torch {self.torch}, triton "
            f"{self.triton}, numpy {self.numpy}, Python {self.python}; kernels: {self.backend}; "
            f"clock: {self.clock}; copy {self.copy_gb_per_s:.4g} GB/s in this run; {self.date}"
        )


def read_environment(device: torch.device) -> Environment:
    """The versions; and how fast `Tensor.copy_` is on buffers far larger than the cache."""
    cuda = device.type == "cuda"
    size = 2**30 if cuda else 4 * SCRAP_BYTES
    source, target = (torch.ones(size // 4, device=device) for _ in range(2))
    milliseconds = np.median(time_calls(lambda: target.copy_(source), device))
    return Environment(
        device=str(device),
        processor=torch.cuda.get_device_name(device) if cuda else _cpu_name(),
        clock="CUDA events" if cuda else "CPU time of the process",
        copy_gb_per_s=2 * size / 1e6 / float(milliseconds),
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=version("triton") if find_spec("triton") else "none",
        numpy=np.__version__,
        backend=os.environ.get("LIGHTFED_KERNELS", "auto"),
        date=time.strftime("%Y-%m-%d"),
    )


@dataclass(frozen=True)
class Row:
    """One code in one case: a line of the table and of the CSV.

    Attributes:
        ms, ms_p20, ms_p80: median and percentiles of `samples` calls.
        gb_per_s: the case's floor bytes per second: the useful rate.
        copy_percent: the useful rate in percent of this run's copy.
        read_percent: the same of the bytes moved if nothing is read from the cache.
        times_official: official time / this time.
        error: relative, against the float64 reference; of masks the share of wrong bits.
    """

    operation: str
    model: str
    shape: str
    dtype: str
    contender: str
    ms: float
    ms_p20: float
    ms_p80: float
    samples: int
    floor_bytes: int
    gb_per_s: float
    copy_percent: float
    read_percent: float
    times_official: float
    error: float
    passed: bool


def measure(
    case: Case, device: torch.device, *, copy_gb_per_s: float, calls: int = CALLS
) -> list[Row]:
    """Check and time every code of a case, one after the other."""
    truth = case.reference(case.build(0))
    found: dict[str, tuple[float, list[float]]] = {}
    for name in case.codes:
        if name == COMPILED:
            torch.compiler.reset()  # what was compiled for another shape
        run, error = _first_call(case, name, truth)
        found[name] = error, time_calls(run, device, calls)
        del run  # and its input set
    official = np.median(found[OFFICIAL][1])
    rows = []
    for name, (error, taken) in found.items():
        p20, ms, p80 = (float(value) for value in np.percentile(taken, (20, 50, 80)))
        rate = case.floor_bytes / 1e6 / ms
        reads = (case.read_bytes or case.floor_bytes) / case.floor_bytes
        rows.append(
            Row(
                operation=case.operation,
                model=case.model,
                shape=case.shape,
                dtype=short(case.dtype),
                contender=name,
                ms=ms,
                ms_p20=p20,
                ms_p80=p80,
                samples=len(taken),
                floor_bytes=case.floor_bytes,
                gb_per_s=rate,
                copy_percent=100 * rate / copy_gb_per_s,
                read_percent=100 * rate * reads / copy_gb_per_s,
                times_official=float(official) / ms,
                error=error,
                # NaN is not small enough.
                passed=error <= case.allowed(name),
            )
        )
    return rows


def check(case: Case) -> tuple[float, bool]:
    """Our relative error and whether it is allowed; nothing is timed."""
    _, error = _first_call(case, OURS, case.reference(case.build(0)))
    return error, error <= case.allowed(OURS)


def _first_call(case: Case, name: str, truth: Tensor) -> tuple[Run, float]:
    """A code with an input set of its own, and its relative error."""
    run = case.codes[name](case.build(0))
    with poisoned() if name == OURS else nullcontext():
        return run, relative_error(run(), truth)


def time_calls(run: Callable[[], object], device: torch.device, calls: int = CALLS) -> list[float]:
    """Milliseconds of each call: on a GPU as many as `do_bench` takes, else at most `calls`."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return list(do_bench(run, return_mode="all"))
    scrap = torch.ones(SCRAP_BYTES // 4)
    timer = Timer(
        "run()",
        setup="scrap.sum()",
        globals={"run": run, "scrap": scrap},
        timer=time.process_time,
        num_threads=torch.get_num_threads(),
    )
    times: list[float] = []
    end = time.process_time() + SECONDS
    while len(times) < min(3, calls) or (len(times) < calls and time.process_time() < end):
        times.append(1e3 * timer.timeit(1).mean)
    return times


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is allocated and not yet written reads as NaN, or as the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile finds what it needs: Triton, or a C++ compiler."""
    return device.type == "cuda" or shutil.which(os.environ.get("CXX", "g++")) is not None


def available_bytes(device: torch.device) -> int:
    """Memory that is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(x for x in lines if x.startswith("MemAvailable")).split()[1]) * 1024


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = info.read_text().split("model name")[1:2] if info.exists() else []
    return names[0].split("\n")[0].strip(" \t:") if names else platform.machine()
