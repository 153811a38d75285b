"""Compares every code of a case with the reference, and then times it.

Calls are timed by Triton's `do_bench` on a GPU, and by `torch.utils.benchmark` on a CPU. Both start
with data that are not in the cache. CUDA graphs (`do_bench_cudagraph`) would leave them there, and
the papers' codes wait for the device within a call, which a graph cannot.
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

# The most timed calls on a CPU. From the third one on, none begins after so many seconds.
CALLS = 7
SECONDS = 10.0

# On a GPU a code whose call takes longer is called so often at most, and once if it takes seconds.
SLOW_MS = 100.0
SLOW_CALLS = 2

# What is read before a timed call: more than a core's share of the last cache.
SCRAP_BYTES = 2**26


@dataclass(frozen=True)
class Environment:
    """The machine, for readers of the results.

    Attributes:
        device: The device, as torch names it.
        processor: The name of the card or of the CPU.
        clock: What measures the time.
        copy_gb_per_s: Bytes read and written by a large copy in this run, in GB/s.
        threads: The number of torch's threads.
        python: The version, as the next three.
        backend: The choice of LIGHTFED_KERNELS.
        date: The date of the run.
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
        """Return all of it in a line."""
        return (
            f"{self.processor} ({self.device}), {self.threads} threads; torch {self.torch}, triton "
            f"{self.triton}, numpy {self.numpy}, Python {self.python}; kernels: {self.backend}; "
            f"clock: {self.clock}; copy {self.copy_gb_per_s:.4g} GB/s in this run; {self.date}"
        )


def read_environment(device: torch.device) -> Environment:
    """Read the versions, and measure how fast `Tensor.copy_` is.

    Its buffers are far larger than the cache.
    """
    on_cuda = device.type == "cuda"
    size = 2**30 if on_cuda else 4 * SCRAP_BYTES  # bytes of a buffer
    source = torch.ones(size // 4, device=device)
    target = torch.ones(size // 4, device=device)
    milliseconds = float(np.median(time_calls(lambda: target.copy_(source), device)))
    return Environment(
        device=str(device),
        processor=torch.cuda.get_device_name(device) if on_cuda else _cpu_name(),
        clock="CUDA events" if on_cuda else "CPU time of the process",
        copy_gb_per_s=2 * size / 1e6 / milliseconds,
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
        operation: As of the case, like the next three.
        contender: The name of the code.
        ms: The median of the calls' times, in milliseconds.
        ms_p20: Their 20th percentile.
        ms_p80: Their 80th percentile.
        samples: The number of calls.
        floor_bytes: The bytes that have to be moved.
        gb_per_s: The useful rate: these bytes over the time.
        copy_percent: The useful rate in percent of this run's copy.
        read_percent: The same for the bytes moved if nothing is read from the cache.
        times_official: The time of the official code over this time.
        error: The relative error against the float64 reference; of masks the share of wrong bits.
        passed: Whether the error is allowed.
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


class Measurement:
    """Checks and times the codes of a case, one after the other, and keeps what it has.

    Args:
        case: The case.
        device: Where its rows are.
        copy_gb_per_s: The rate of a copy in this run.
        calls: The most timed calls on a CPU.
    """

    def __init__(
        self, case: Case, device: torch.device, *, copy_gb_per_s: float, calls: int = CALLS
    ) -> None:
        self.case = case
        self._device = device
        self._copy_gb_per_s = copy_gb_per_s
        self._calls = calls
        self._truth = case.reference(case.build(0))
        self._error_of: dict[str, float] = {}
        self._times_of: dict[str, list[float]] = {}

    def take(self, name: str) -> None:
        """Check and time one code."""
        if name == COMPILED:
            torch.compiler.reset()  # forget what was compiled for another shape
        run, self._error_of[name] = _first_call(self.case, name, self._truth)
        # `run` has an input set of its own, which may fill the memory: it goes with this call.
        self._times_of[name] = time_calls(run, self._device, self._calls)

    def rows(self) -> list[Row]:
        """Return a row for every code that was taken, in their order."""
        return [self._row(name) for name in self._times_of]

    def _row(self, name: str) -> Row:
        case = self.case
        p20, ms, p80 = (float(value) for value in np.percentile(self._times_of[name], (20, 50, 80)))
        # Unknown until the official code is taken.
        official_ms = float(np.median(self._times_of.get(OFFICIAL, [np.nan])))
        rate = case.floor_bytes / 1e6 / ms
        reads = (case.read_bytes or case.floor_bytes) / case.floor_bytes
        error = self._error_of[name]
        return Row(
            operation=case.operation,
            model=case.model,
            shape=case.shape,
            dtype=short(case.dtype),
            contender=name,
            ms=ms,
            ms_p20=p20,
            ms_p80=p80,
            samples=len(self._times_of[name]),
            floor_bytes=case.floor_bytes,
            gb_per_s=rate,
            copy_percent=100 * rate / self._copy_gb_per_s,
            read_percent=100 * rate * reads / self._copy_gb_per_s,
            times_official=official_ms / ms,
            error=error,
            passed=error <= case.allowed(name),  # NaN is not small enough
        )


def measure(
    case: Case, device: torch.device, *, copy_gb_per_s: float, calls: int = CALLS
) -> list[Row]:
    """Check and time every code of a case; arguments as of Measurement."""
    measurement = Measurement(case, device, copy_gb_per_s=copy_gb_per_s, calls=calls)
    for name in case.codes:
        measurement.take(name)
    return measurement.rows()


def check(case: Case) -> tuple[float, bool]:
    """Return our relative error, and whether it is allowed; nothing is timed."""
    _, error = _first_call(case, OURS, case.reference(case.build(0)))
    return error, error <= case.allowed(OURS)


def _first_call(case: Case, name: str, truth: Tensor) -> tuple[Run, float]:
    """Return a code with an input set of its own, and its relative error."""
    run = case.codes[name](case.build(0))
    with poisoned() if name == OURS else nullcontext():
        return run, relative_error(run(), truth)


def time_calls(run: Callable[[], object], device: torch.device, calls: int = CALLS) -> list[float]:
    """Return the milliseconds of each call.

    Args:
        run: What is called.
        device: The device on which it works.
        calls: The most calls on a CPU; on a GPU `do_bench` decides.
    """
    if device.type == "cuda":
        return _time_on_card(run)
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


def _time_on_card(run: Callable[[], object]) -> list[float]:
    """Return the milliseconds of each call on a GPU.

    `do_bench` makes eight calls before it is satisfied, however slow they are. The papers' codes
    take seconds, and their times hardly differ: of such a code, the first calls are all.
    """
    times: list[float] = []
    for _ in range(SLOW_CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
        if times[0] < SLOW_MS:
            from triton.testing import do_bench

            return list(do_bench(run, return_mode="all"))
        if times[0] > 1e3:
            break
    return times


@contextmanager
def poisoned() -> Iterator[None]:
    """Let memory that is allocated but not written read as NaN, or as the largest integer.

    So a code that does not write an element is wrong there, and not by chance right.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile finds what it needs: Triton, or a C++ compiler."""
    return device.type == "cuda" or shutil.which(os.environ.get("CXX", "g++")) is not None


def available_bytes(device: torch.device) -> int:
    """Return how many bytes of a device's memory are free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            _, kibibytes, _ = line.split()
            return int(kibibytes) * 1024
    raise RuntimeError("/proc/meminfo does not say how much memory is available")


def _cpu_name() -> str:
    """Return the name of the processor; its architecture if the system gives no name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()
