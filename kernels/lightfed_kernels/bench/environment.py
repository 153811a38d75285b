"""Where the benchmark runs: versions, the device, and how fast it copies today."""

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

# The copy rate of one H200, measured; floors for it are bytes divided by this.
H200_BYTES_PER_S = 4.3e12

NO_CUDA = (
    "No CUDA device: the compiled kernels cannot run here. They are checked in Triton's "
    "interpreter; times are the CPU's, of the torch paths; 'H200 floor' is bytes / 4.3 TB/s, a "
    "bound and not a measurement."
)


@dataclass(frozen=True)
class Environment:
    """What a reader needs to know beside the times.

    Attributes:
        clock: what is timed: `cuda events`, or the CPU time of the process.
        copy_gb_per_s: bytes read and written by a large copy, per second, in this run.
    """

    device: str
    processor: str
    clock: str
    copy_gb_per_s: float
    cache_mb: float
    threads: int
    python: str
    torch: str
    triton: str
    numpy: str
    cuda: str
    driver: str
    backend: str
    date: str

    def line(self) -> str:
        cuda = f", CUDA {self.cuda}, driver {self.driver}" if self.cuda else ""
        return (
            f"{self.processor} ({self.device}), {self.threads} thread"
            f"{'s' if self.threads > 1 else ''}; torch {self.torch}, triton {self.triton}, numpy "
            f"{self.numpy}, Python {self.python}{cuda}; kernels: {self.backend}; clock: "
            f"{self.clock}; copy {self.copy_gb_per_s:.4g} GB/s in this run; {self.date}"
        )

    def as_dict(self) -> dict[str, str | float | int]:
        return asdict(self)


class Clock:
    """Times calls whose data are not in the cache: a buffer beyond its size is read before each.

    On a CPU, holes that earlier calls left in the heap go back to the system first: temporaries as
    long as rows then cost page faults, as they do in a process that has just begun, and a time does
    not depend on what was measured before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cache_bytes = _cache_bytes(device)
        cuda = device.type == "cuda"
        size = 2**30 if cuda else max(2 * self.cache_bytes, 64 * 2**20)
        # glibc's; elsewhere there is nothing to do.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", int)
        self._scrap = torch.zeros(size // 4, device=device)

    @property
    def name(self) -> str:
        return "CUDA events" if self.device.type == "cuda" else "CPU time of the process"

    def __call__(
        self, run: Callable[[], object], *, other: Callable[[], object] | None = None
    ) -> tuple[float, float]:
        """(milliseconds, milliseconds of the host until the call returned).

        `other` is the same code on other data: run before, so that a CPU has the code, and not the
        data, in its cache.
        """
        if self.device.type == "cuda":
            return self._on_cuda(run)
        self._trim(0)
        self._scrap.sum()
        if other is not None:
            other()
        begin = time.process_time()
        run()
        milliseconds = 1e3 * (time.process_time() - begin)
        return milliseconds, milliseconds

    def _on_cuda(self, run: Callable[[], object]) -> tuple[float, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        # Reads leave no dirty lines to be written back in the timed part. They keep the device busy
        # for about 2 ms, while the host enqueues the call: what is timed is the device, unless the
        # host takes longer than that, as it does for thousands of launches.
        for _ in range(8):
            self._scrap.sum()
        start.record()
        begin = time.perf_counter()
        run()
        host = 1e3 * (time.perf_counter() - begin)
        end.record()
        end.synchronize()
        return start.elapsed_time(end), host


def read_environment(clock: Clock) -> Environment:
    device = clock.device
    cuda = device.type == "cuda"
    return Environment(
        device=str(device),
        processor=torch.cuda.get_device_name(device) if cuda else _cpu_name(),
        clock=clock.name,
        copy_gb_per_s=copy_bytes_per_s(clock) / 1e9,
        cache_mb=clock.cache_bytes / 2**20,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        numpy=_version("numpy"),
        cuda=(torch.version.cuda or "") if cuda else "",
        driver=_driver() if cuda else "",
        backend=os.environ.get("LIGHTFED_KERNELS", "auto"),
        date=time.strftime("%Y-%m-%d"),
    )


def copy_bytes_per_s(clock: Clock, *, repetitions: int = 9) -> float:
    """Bytes read and written a second by `Tensor.copy_` on a buffer far larger than the cache."""
    size = 2**30 if clock.device.type == "cuda" else max(2**27, 2 * clock.cache_bytes)
    source = torch.ones(size // 4, device=clock.device)
    target: Tensor = torch.zeros_like(source)
    times = [clock(lambda: target.copy_(source))[0] for _ in range(repetitions + 1)][1:]
    return 2 * size / (statistics.median(times) / 1e3)


def available_bytes(device: torch.device) -> int:
    """Memory that is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(x for x in lines if x.startswith("MemAvailable")).split()[1]) * 1024


def _cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    levels = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [int(path.read_text().strip().removesuffix("K")) * 1024 for path in levels]
    return max(sizes, default=32 * 2**20)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = info.read_text().split("model name")[1:2] if info.exists() else []
    return names[0].split("\n")[0].strip(" \t:") if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _driver() -> str:
    path = Path("/sys/module/nvidia/version")
    return path.read_text().strip() if path.exists() else "unknown"
