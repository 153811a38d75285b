"""Processes that run rounds on command and say what they cost; two of them take turns."""

import gc
import multiprocessing
import resource
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from workloads import CLIENT_SAMPLES, Workload

Side = Literal["bare", "lightfed"]
LOSS, MEMORY, STOP = "loss", "memory", "stop"


class Worker:
    """A process of its own: what one side asks of the allocator must not help the other.

    Args:
        side: whose loop.
        workload: what is trained.
    """

    def __init__(self, side: Side, workload: Workload) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        target = _bare if side == "bare" else _lightfed
        self._process = context.Process(target=target, args=(theirs, workload))
        self._process.start()
        theirs.close()
        self._pipe.recv()  # ready

    def seconds(self, rounds: int) -> float:
        """CPU seconds of the process and its children for one of so many rounds."""
        return self._ask(rounds) / rounds

    def loss(self) -> float:
        """Cross entropy of the global model over the training samples of all clients."""
        return self._ask(LOSS)

    def memory(self) -> float:
        """Bytes resident, without files such as libraries, which processes share."""
        return self._ask(MEMORY)

    def close(self) -> None:
        self._pipe.send(STOP)
        self._process.join()

    def _ask(self, question: int | str) -> float:
        self._pipe.send(question)
        return self._pipe.recv()


def cpu_seconds() -> float:
    """User and system time of this process and the children that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _bare(pipe: Connection, workload: Workload) -> None:
    import torch
    from bare import BareLoop

    torch.set_num_threads(1)
    loop = BareLoop(workload)
    pipe.send(0.0)
    while (question := pipe.recv()) != STOP:
        if question in (LOSS, MEMORY):
            pipe.send(_answer(question, workload, loop.global_model))
            continue
        start = cpu_seconds()
        for _ in range(question):
            loop.round()
        pipe.send(cpu_seconds() - start)


def _lightfed(pipe: Connection, workload: Workload) -> None:
    import logging

    from federated import Pace, build, global_model

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    start: float | None = None

    def between() -> int | None:
        """End a measurement, answer what is asked of the state, and start the next measurement."""
        nonlocal start
        pipe.send(0.0 if start is None else cpu_seconds() - start)
        while (question := pipe.recv()) in (LOSS, MEMORY):
            pipe.send(_answer(question, workload, lambda: global_model(federation)))
        start = cpu_seconds()
        return None if question == STOP else question

    with tempfile.TemporaryDirectory() as folder:
        trainer, federation, data = build(workload, folder, Pace(between))
        trainer.fit(federation, datamodule=data)


def _answer(question: str, workload: Workload, model: Callable[[], object]) -> float:
    return _loss(workload, model()) if question == LOSS else _resident_bytes()


def _loss(workload: Workload, model: object) -> float:
    import torch
    from torch import nn

    assert isinstance(model, nn.Module)
    count = min(workload.pool, workload.clients * CLIENT_SAMPLES)
    x, y = workload.samples("train", workload.pool)
    loss = nn.CrossEntropyLoss(reduction="sum")
    with torch.no_grad():
        parts = zip(x[:count].split(1000), y[:count].split(1000), strict=True)
        return sum(float(loss(model(xs), ys)) for xs, ys in parts) / count


def _resident_bytes() -> float:
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("Pss_Anon:"))
    return 1024.0 * int(kilobytes)
