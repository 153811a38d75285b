"""Runs the contenders of a case: correctness first, then times, taken in turn."""

import os
import shutil
import statistics
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode

from lightfed_kernels.bench.case import COMPILED, OFFICIAL, OURS, Case, Run, short
from lightfed_kernels.bench.environment import H200_BYTES_PER_S, Clock

# A contender that is slow is timed at least so often, and then no longer than so many ms in all.
LEAST_SAMPLES = 3
BUDGET_MS = 15_000.0

# A call that takes longer is not preceded by one on other data: its own code is soon in the cache.
WARM_MS = 20.0

# Memory that the input sets of a case may take; below it, several are rotated.
SETS = 3
SETS_BYTES = 6 * 2**30


@dataclass(frozen=True)
class Row:
    """One contender in one case: a line of the table, of the CSV and of the JSON.

    Attributes:
        ms, ms_p20, ms_p80: of the device; median and percentiles of `samples` calls.
        host_ms: until the call returned; that of the CPU's own work where that is the device.
        gb_per_s: the case's floor bytes per second: the useful rate.
        copy_percent: that, of the copy bandwidth of this run.
        read_percent: the same of the bytes moved if nothing is read from the cache.
        times_official: official time / this time.
        times_ours: this time / our time.
        launches: on CUDA, of kernels and copies; else calls of torch operators, views and
            allocations left out, where an operation of ours counts as one.
        error: relative, against the float64 reference; of masks the share of wrong bits.
    """

    operation: str
    model: str
    shape: str
    clients: int
    dtype: str
    contender: str
    ms: float
    ms_p20: float
    ms_p80: float
    host_ms: float
    samples: int
    floor_bytes: int
    gb_per_s: float
    copy_percent: float
    read_percent: float
    times_official: float
    times_ours: float
    launches: int | None
    error: float
    passed: bool
    h200_floor_ms: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(case: Case, clock: Clock, *, copy_gb_per_s: float, repetitions: int) -> list[Row]:
    """Check and time every contender of a case."""
    count = min(SETS, max(1, SETS_BYTES // max(case.input_bytes, 1)))
    inputs = [case.build(seed) for seed in range(count)]
    truth = case.reference(inputs[0])
    if COMPILED in case.contenders:
        torch.compiler.reset()  # what was compiled for another shape
    bound: dict[str, list[Run]] = {}
    errors: dict[str, float] = {}
    launches: dict[str, int | None] = {}
    for name, contender in case.contenders.items():
        bound[name] = [contender.bind(given) for given in inputs]
        with poisoned() if name == OURS else nullcontext():
            errors[name] = case.error(bound[name][0](), truth)
        # Again, so that compilers and allocators are warm; the last set, to leave the first alone.
        bound[name][-1]()
        launches[name] = count_launches(name, bound[name][-1], clock.device)
    del truth
    times = _take_turns(bound, clock, repetitions)
    nothing = float("nan")
    medians = {name: statistics.median(ms for ms, _ in taken) for name, taken in times.items()}
    return [
        _row(
            case, name, taken, copy_gb_per_s, errors[name], launches[name],
            medians.get(OFFICIAL, nothing) / medians[name],
            medians[name] / medians.get(OURS, nothing),
        )
        for name, taken in times.items()
    ]  # fmt: skip


def _take_turns(
    bound: dict[str, list[Run]], clock: Clock, repetitions: int
) -> dict[str, list[tuple[float, float]]]:
    """Interleaved, so that whatever else the machine does slows all contenders."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in bound}
    warm = {name: max(clock(runs[0])) for name, runs in bound.items()}
    for turn in range(repetitions):
        for name, runs in bound.items():
            taken = times[name]
            if turn < LEAST_SAMPLES or sum(max(pair) for pair in taken) < BUDGET_MS:
                short_call = len(runs) > 1 and warm[name] < WARM_MS
                other = runs[(turn + 1) % len(runs)] if short_call else None
                taken.append(clock(runs[turn % len(runs)], other=other))
    return times


def _row(
    case: Case, contender: str, taken: Sequence[tuple[float, float]], copy_gb_per_s: float,
    error: float, launches: int | None, times_official: float, times_ours: float,
) -> Row:  # fmt: skip
    device = sorted(ms for ms, _ in taken)
    ms = statistics.median(device)
    rate = case.floor_bytes / 1e6 / ms
    return Row(
        operation=case.operation,
        model=case.model,
        shape=case.shape,
        clients=case.clients,
        dtype=short(case.dtype),
        contender=contender,
        ms=ms,
        ms_p20=device[round(0.2 * (len(device) - 1))],
        ms_p80=device[round(0.8 * (len(device) - 1))],
        host_ms=statistics.median(host for _, host in taken),
        samples=len(device),
        floor_bytes=case.floor_bytes,
        gb_per_s=rate,
        copy_percent=100 * rate / copy_gb_per_s,
        read_percent=100 * (case.read_bytes or case.floor_bytes) / 1e6 / ms / copy_gb_per_s,
        times_official=times_official,
        times_ours=times_ours,
        launches=launches,
        error=error,
        # NaN is no number that is small enough.
        passed=error <= case.allowed(contender),
        h200_floor_ms=1e3 * case.floor_bytes / H200_BYTES_PER_S,
    )


def check(case: Case) -> tuple[float, bool]:
    """Our relative error and whether it is allowed; nothing is timed."""
    inputs = case.build(0)
    truth = case.reference(inputs)
    with poisoned():
        error = case.error(case.contenders[OURS].bind(inputs)(), truth)
    return error, error <= case.allowed(OURS)


@contextmanager
def poisoned() -> Iterator[None]:
    """Whatever is allocated and not yet written reads as NaN, or as the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile finds what it needs: a C++ compiler, or Triton."""
    if device.type == "cuda":
        return True
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def count_launches(name: str, run: Run, device: torch.device) -> int | None:
    """Launches of a call; None where they cannot be counted."""
    if device.type == "cuda":
        return _count_on_cuda(run)
    if name == COMPILED:
        return None
    counter = _Operators()
    with counter:
        run()
    return counter.count


def _count_on_cuda(run: Run) -> int | None:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in seen.events()) or None


class _Operators(TorchDispatchMode):
    """Counts the operators that would be launches on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        self.count += not (func.is_view or name.startswith(("empty", "new_empty", "_unsafe_view")))
        return func(*args, **(kwargs or {}))
