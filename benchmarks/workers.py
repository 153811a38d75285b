"""Processes that run rounds on command and say what they cost; the sides take turns.

On a CPU that is CPU time, on a card the time until all its work is done.
"""

import gc
import multiprocessing
import resource
import tempfile
import time
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from workloads import Workload

Side = Literal["loop", "tuned", "batched", "lightfed", "packs32", "packs128", "sequential"]
# The ways of lightfed, and settings of the Federation: as it comes, and three fixed ones.
WAYS: dict[str, dict[str, Any]] = {
    "lightfed": {},
    "packs32": {"side_by_side": 32, "pack_memory": 1 << 17},
    "packs128": {"side_by_side": 128, "pack_memory": 1 << 19},
    "sequential": {"side_by_side": "off"},
}
LOSS, MEMORY, STOP = "loss", "memory", "stop"
_TESTED = 1000  # samples that the loss is computed on


class Worker:
    """A process of its own: what one side asks of the allocator must not help another.

    Args:
        side: whose rounds.
        workload: what is trained.
        device: cpu or cuda.
    """

    def __init__(self, side: Side, workload: Workload, device: str = "cpu") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        self._pipe, theirs = context.Pipe()
        target = _lightfed if side in WAYS else _bare
        self._process = context.Process(target=target, args=(theirs, workload, side, device))
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until it has imported and built what it needs; workers do so side by side."""
        self._pipe.recv()

    def seconds(self, rounds: int) -> float:
        """Seconds of one of so many rounds."""
        return self._ask(rounds) / rounds

    def loss(self) -> float:
        """Cross entropy on training samples: of the global model, or the mean of the clients'."""
        return self._ask(LOSS)

    def memory(self) -> float:
        """Bytes resident, without files such as libraries; or the most on the card."""
        return self._ask(MEMORY)

    def close(self) -> None:
        with suppress(BrokenPipeError):  # one that was interrupted has ended already
            self._pipe.send(STOP)
        self._process.join()

    def _ask(self, question: int | str) -> float:
        self._pipe.send(question)
        return self._pipe.recv()


def cpu_seconds() -> float:
    """User and system time of this process and the children that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def seconds_on(device: str) -> float:
    """CPU time; on a card the time of day, when all work on it is done."""
    if device == "cpu":
        return cpu_seconds()
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def _bare(pipe: Connection, workload: Workload, way: Any, device: str) -> None:
    import torch
    from bare import bare

    torch.set_num_threads(1)
    rounds, t = bare(workload, way, device), 0
    pipe.send(0.0)
    while (question := pipe.recv()) != STOP:
        if question in (LOSS, MEMORY):
            pipe.send(_answer(question, workload, rounds, device))
            continue
        draws = [workload.draws(t + ahead).to(device) for ahead in range(question)]
        start = seconds_on(device)
        for drawn in draws:
            rounds.round(drawn, t)
            t += 1
        pipe.send(seconds_on(device) - start)


def _lightfed(pipe: Connection, workload: Workload, side: Side, device: str) -> None:
    import logging

    from federated import Pace, Run, build

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    start: float | None = None

    def between() -> int | None:
        """End a measurement, answer what is asked of the state, and start the next measurement."""
        nonlocal start
        pipe.send(0.0 if start is None else seconds_on(device) - start)
        while (question := pipe.recv()) in (LOSS, MEMORY):
            pipe.send(_answer(question, workload, Run(federation), device))
        start = seconds_on(device)
        return None if question == STOP else question

    with tempfile.TemporaryDirectory() as folder:
        trainer, federation, data = build(
            workload, folder, Pace(between), device=device, **WAYS[side]
        )
        trainer.fit(federation, datamodule=data)


def _answer(question: str, workload: Workload, rounds: Any, device: str) -> float:
    if question == LOSS:
        return loss(workload, rounds.models())
    if device == "cpu":
        return _resident_bytes()
    import torch

    return float(torch.cuda.max_memory_allocated())


def loss(workload: Workload, models: list[list[Any]]) -> float:
    """The mean loss of models, given by their parameters, in training mode on training samples."""
    import torch
    from torch.nn.functional import cross_entropy

    x, y = (part[:_TESTED] for part in workload.samples("train", workload.pool))
    network, total = workload.build().train(), 0.0
    with torch.no_grad():
        for values in models:
            for place, value in zip(network.parameters(), values, strict=True):
                place.copy_(value)
            total += float(cross_entropy(network(x), y))
    return total / len(models)


def _resident_bytes() -> float:
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("Pss_Anon:"))
    return 1024.0 * int(kilobytes)
