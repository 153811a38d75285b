"""How many operators a round takes: one client after the other, and side by side.

    python benchmarks/operators.py [--workloads W1,W2,W5] [--device cuda] [--out FOLDER]

Counted by torch.profiler in one round, after others: operators that Python or autograd calls (not
those that operators call), those that do the work below them (a launch each on a card; foreach
takes one a tensor where rows are strided), launches on a card, and values that the host waits for
(`item` and the like). A step is one client's. `--out` keeps a trace of each for chrome://tracing,
and tables of the most expensive operators. The ways:

    off      one client after the other
    packed   32 side by side
"""

import argparse
import logging
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from federated import build
from figures import machine, out_folder
from lightning.pytorch.callbacks import Callback
from rounds import WARM_UP, workloads
from torch.profiler import ProfilerActivity, profile
from typing_extensions import override
from workloads import WORKLOADS, Workload

_LAUNCHES = (*("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync"),)
_OPERATORS = ("aten::", "lightfed::")
# They move no data.
_IDLE = re.compile(
    "aten::(empty|new_empty|resize|view|_?reshape|slice|select|transpose|as_strided|detach|alias|"
    "t$|unsqueeze|squeeze|expand|permute|flatten|unflatten|unbind|narrow|split|to$|item)"
)
WAYS: dict[str, dict[str, Any]] = {
    "off": {"side_by_side": "off"},
    "packed": {"side_by_side": 32, "pack_memory": 1 << 17},
}
_READ = "aten::_local_scalar_dense"
_TO_HOST = "Memcpy DtoH"


@dataclass(frozen=True)
class Counts:
    """Of one round.

    Attributes:
        operators: that no other operator calls.
        working: that do the work.
        launches: on a card.
        reads: values that the host waits for; on a card, copies to the host.
        table: the most expensive operators or, on a card, kernels.
    """

    operators: int
    working: int
    launches: int
    reads: int
    table: str

    @classmethod
    def of(cls, profiled: profile) -> "Counts":
        events = profiled.events() or []
        operators = [event for event in events if event.name.startswith(_OPERATORS)]
        # A number of the host is read by the same operator, and nobody waits for it.
        copies = [event for event in events if event.name.startswith(_TO_HOST)]
        reads = [event for event in events if event.name == _READ]
        return cls(
            sum(not _in_operator(event) for event in operators),
            sum(_work(event) for event in operators if not _in_operator(event)),
            sum(event.name.startswith(_LAUNCHES) for event in events),
            len(copies if torch.cuda.is_available() else reads),
            _most_expensive(profiled),
        )


def _most_expensive(profiled: profile) -> str:
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    averages = profiled.key_averages()
    return averages.table(sort_by=key, row_limit=14, max_name_column_width=60)


def _in_operator(event: object) -> bool:
    parent = getattr(event, "cpu_parent", None)
    while parent is not None and not parent.name.startswith(_OPERATORS):
        parent = parent.cpu_parent
    return parent is not None


def _work(event: Any) -> int:
    """Operators that do the work of one: itself, unless others below it do."""
    below = sum(map(_work, event.cpu_children)) if not event.name.startswith("lightfed::") else 0
    does = event.name.startswith(_OPERATORS) and not _IDLE.match(event.name)
    return below or int(does)


class OneRound(Callback):
    """Profiles the round after the warm-up, and ends the run."""

    def __init__(self, device: str) -> None:
        cards = [ProfilerActivity.CUDA] if device == "cuda" else []
        self.profile = profile(activities=[ProfilerActivity.CPU, *cards], acc_events=True)

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == WARM_UP:
            self.profile.start()

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == WARM_UP:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.profile.stop()
            trainer.should_stop = True


def count(workload: Workload, *, way: str, device: str, trace: Path | None = None) -> Counts:
    """Profile a round of a workload.

    Args:
        workload: what is trained.
        way: how clients are trained.
        device: cpu or cuda.
        trace: file for the trace.
    """
    once = OneRound(device)
    with tempfile.TemporaryDirectory() as folder:
        trainer, federation, data = build(workload, folder, once, device=device, **WAYS[way])
        trainer.fit(federation, datamodule=data)
    if trace is not None:
        once.profile.export_chrome_trace(str(trace))
    return Counts.of(once.profile)


def main(argv: list[str] | None = None) -> int:
    """Print a line for each workload and way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("W1", "W2", "W5")
    parser.add_argument("--workloads", type=workloads, default=[WORKLOADS[name] for name in names])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=out_folder, help="folder for traces")
    options = parser.parse_args(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(machine())
    tables: list[str] = []
    for workload in options.workloads:
        steps = workload.per_round * -(-workload.each // workload.batch)
        print(f"\n{workload.name}  {workload.title}, {steps} steps of clients a round")
        for way in WAYS:
            file = f"{workload.name}-{way}.json.gz"
            trace = None if options.out is None else options.out / file
            found = count(workload, way=way, device=options.device, trace=trace)
            print(
                f"    {way:8}  {found.operators:6} operators, "
                f"{found.operators / steps:5.1f} a step, {found.working / steps:5.1f} working; "
                f"{found.launches} launches, "
                f"{found.launches / steps:.1f} a step; {found.reads} values read",
                flush=True,
            )
            tables.append(f"\n{workload.name} {way}\n{found.table}")
            if options.out is not None:
                (options.out / "tables.txt").write_text("\n".join(tables) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
