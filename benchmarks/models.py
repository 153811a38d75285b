"""Rounds a second and memory of the papers' networks on a card, in every way and precision.

    python benchmarks/models.py [--workloads W6,W1] [--passes 3] [--device cuda] [--out DIR]

Every side has a process of its own, one after the other, so that each has the memory to itself.
Time is until the card is done (CPU time on a CPU), after rounds that warm up. The sides:

    loop, tuned  bare PyTorch, see rounds.py; there is none for the Transformer
    sequential   lightfed, one client after the other
    packs32      up to 32 side by side
    packs128     up to 128 side by side
    tf32, bf16   the fastest of lightfed's three again: products in TF32, and bf16-mixed

In 32 bits torch takes TF32 for convolutions, not for products.
Of W1, W3 and W5 there are only lightfed as it comes, and bf16: rounds.py has the others. Memory is
the most that tensors had on the card, with the data (on a CPU that of the process). `--out` keeps
the table, models.csv, as far as it is. The exit status is 1 if a side fails, or a loss is not a
finite number.
"""

import argparse
import csv
import hashlib
import logging
import math
import multiprocessing
import resource
import statistics
import sys
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import rounds  # noqa: F401 - first: it sets the number of threads
import torch
from bare import Way, bare
from federated import Pace, Run, build
from figures import machine, out_folder
from torch import Tensor
from typing_extensions import override
from workers import seconds_on
from workloads import LARGE, WORKLOADS, Workload

from lightfed.utils.errors import reason

KNOWN = LARGE | {name: WORKLOADS[name] for name in ("W1", "W3", "W5")}
BARE: tuple[Way, ...] = ("loop", "tuned")
AS_IT_COMES = "lightfed"
# The ways of lightfed: settings of the Federation.
WAYS: dict[str, dict[str, Any]] = {
    "sequential": {"side_by_side": "off"},
    "packs32": {"side_by_side": 32, "pack_memory": 1 << 17},
    "packs128": {"side_by_side": 128, "pack_memory": 1 << 19},
}
_EAGER = 2  # rounds that warm up; DisPFL searches from the second on
HEAD = (
    "workload", "side", "rounds_per_second", "ms", "ms_least", "ms_most", "megabytes",
    "first_loss", "last_loss", "note",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Of one side.

    Attributes:
        seconds: of a round, one a pass; empty if the side could not be measured.
        memory: bytes.
        losses: of training in the first and in the last round; empty for bare loops.
        note: why the side could not be measured, or what lightfed warned of.
        bits: a digest of the models after the rounds that warm up; empty for bare loops.
    """

    seconds: tuple[float, ...] = ()
    memory: float = 0.0
    losses: tuple[float, ...] = ()
    note: str = ""
    bits: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def cells(self) -> list[str]:
        """Of the table, after workload and side."""
        if not self.seconds:
            return [""] * len(HEAD[3:]) + [self.note]
        times = [self.median, min(self.seconds), max(self.seconds)]
        losses = [f"{loss:.4f}" for loss in self.losses] or ["", ""]
        milliseconds = [f"{1e3 * value:.1f}" for value in times]
        rate, memory = f"{1 / self.median:.3f}", f"{self.memory / 1e6:.0f}"
        return [rate, *milliseconds, memory, *losses, self.note]


class Warnings(logging.Handler):
    """Keeps what lightfed warns of, such as clients that train alone after all."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def memory(device: str) -> float:
    if device == "cuda":
        return float(torch.cuda.max_memory_allocated())
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def by_hand(workload: Workload, way: Way, device: str, passes: int) -> Measured:
    """A bare loop."""
    torch.set_num_threads(1)
    side, t, seconds = bare(workload, way, device), 0, []
    for count in (_EAGER, *[workload.rounds] * passes):
        draws = [workload.draws(t + ahead).to(device) for ahead in range(count)]
        start = seconds_on(device)
        for drawn in draws:
            side.round(drawn, t)
            t += 1
        seconds.append((seconds_on(device) - start) / count)
    return Measured(tuple(seconds[1:]), memory(device))


def by_lightfed(
    workload: Workload,
    way: str,
    device: str,
    passes: int,
    precision: str = "32",
    settings: dict[str, Any] | None = None,
) -> Measured:
    """A run of lightfed.

    Args:
        workload: what is trained.
        way: of `WAYS`, or as it comes.
        device: cpu or cuda.
        passes: measurements.
        precision: 32, tf32 or bf16.
        settings: of the Federation, instead of the way's.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    warned = Warnings()
    logging.getLogger("lightfed").addHandler(warned)
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    if settings is None:
        settings = WAYS.get(way, {})
    plan = [_EAGER, *[workload.rounds] * passes]
    times: list[float] = []
    losses: list[float] = []

    bits = ""

    def between() -> int | None:
        """The rounds until it is called again."""
        nonlocal bits
        if len(times) == 1:
            bits = _digest(Run(federation).models())
        times.append(seconds_on(device))
        if (loss := trainer.callback_metrics.get("train_loss")) is not None:
            losses.append(float(loss))
        return plan[len(times) - 1] if len(times) <= len(plan) else None

    mixed = "bf16-mixed" if precision == "bf16" else "32"
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):  # its summary
        trainer, federation, data = build(
            workload, folder, Pace(between), device=device, precision=mixed, **settings
        )
        trainer.fit(federation, datamodule=data)
    spans = [end - start for start, end in pairwise(times)]
    seconds = [span / count for span, count in zip(spans, plan, strict=True)]
    logging.getLogger("lightfed").removeHandler(warned)
    ends = losses[0], losses[-1]
    return Measured(
        tuple(seconds[1:]), memory(device), ends, "; ".join(dict.fromkeys(warned.texts)), bits
    )


def _digest(models: list[list[Tensor]]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for model in models:
        for value in model:
            state.update(value.detach().cpu().contiguous().numpy().tobytes())
    return state.hexdigest()


def apart(function: Any, *arguments: Any) -> Any:
    """The result of a function, called in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lightning.pytorch"])  # neither asks for a card
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


class Table:
    """Prints the sides as they come, and keeps them.

    Args:
        device: cpu or cuda.
        passes: measurements of a side.
        out: folder for the table; None for none.
        name: of the table.

    Attributes:
        good: whether no side failed, and all losses are numbers.
    """

    def __init__(
        self, device: str, passes: int, out: Path | None, name: str = "models.csv"
    ) -> None:
        self._device, self._passes = device, passes
        self._rows: list[list[str]] = []
        self._file = None if out is None else out / name
        self.good = True

    def side(self, workload: Workload, side: str, function: Any, way: str, *more: Any) -> Measured:
        """Measure a side; one that fails, such as for want of memory, leaves the others."""
        try:
            given = workload, way, self._device, self._passes, *more
            found: Measured = apart(function, *given)
            self.good = self.good and all(map(math.isfinite, found.losses))
        except Exception as error:  # of a process that may have died
            found, self.good = Measured(note=f"failed: {reason(error)[:200]}"), False
        self._rows.append([workload.name, side, *found.cells()])
        rate, middle, low, high, memory, first, last, note = found.cells()
        loss = f", loss {first} -> {last}" if first else ""
        text = f"{rate:>9} rounds/s, {middle} ({low}-{high}) ms, {memory} MB{loss}"
        print(f"    {side:18} {'  '.join(filter(None, (rate and text, note)))}", flush=True)
        if self._file is not None:
            with self._file.open("w", newline="") as file:
                csv.writer(file).writerows([HEAD, *self._rows])
        return found

    def workload(self, workload: Workload) -> None:
        """Measure all sides of a workload."""
        print(f"\n{workload.name}  {workload.title}", flush=True)
        if workload.name not in LARGE:
            self.side(workload, AS_IT_COMES, by_lightfed, AS_IT_COMES)
            self.side(workload, f"{AS_IT_COMES}, bf16", by_lightfed, AS_IT_COMES, "bf16")
            return
        if workload.words:
            print("    no bare loop", flush=True)
        else:
            for way in BARE:
                self.side(workload, way, by_hand, way)
        sides = {way: self.side(workload, way, by_lightfed, way) for way in WAYS}
        timed = {way: found for way, found in sides.items() if found.seconds}
        if not timed:
            return
        best = min(timed, key=lambda way: timed[way].median)
        for precision in ("tf32", "bf16"):
            self.side(workload, f"{best}, {precision}", by_lightfed, best, precision)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default=",".join(KNOWN), metavar="W6,W1,..")
    parser.add_argument("--passes", type=int, default=3, help="measurements of every side")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=out_folder, help="folder for models.csv")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it runs")
    options = parser.parse_args(argv)
    names = options.workloads.split(",")
    if unknown := set(names) - set(KNOWN):
        parser.error(f"--workloads: {', '.join(sorted(unknown))}; choose of {', '.join(KNOWN)}")
    if options.passes < 1:
        parser.error(f"--passes: {options.passes}; give at least 1")
    print(machine())
    table = Table(options.device, options.passes, options.out)
    for name in names:
        table.workload(KNOWN[name].tiny() if options.tiny else KNOWN[name])
    return 0 if table.good else 1


if __name__ == "__main__":
    sys.exit(main())
