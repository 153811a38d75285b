"""NCCL with one rank: runs whose sums go through it have the bits of runs without, and over gloo.

    python benchmarks/nccl.py [--device cuda] [--rounds 3] [--out FOLDER]

One rank has nothing to add up, so lightfed calls no collective. Here it is made to: rows are summed
as they are on several ranks, and every all-reduce is done, which changes nothing over one rank.
Each backend has a process of its own, in which it also gets numbers to reduce and to exchange. On a
CPU there is gloo alone. A line for each case names what differs from the run without collectives;
`--out` keeps the digests, nccl.json. The exit status is 1 if something differs, or nothing was
reduced.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from figures import machine, out_folder
from models import apart
from torch import Tensor

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.flexifed import group_mean
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.topology.topology import TimeVarying
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.distributed import collectives
from lightfed.distributed.collectives import Ranks
from lightfed.networks.cnn import Conv
from lightfed.networks.mlp import MLP
from lightfed.testing.case import Case
from lightfed.testing.digest import digest, fit
from lightfed.utils.errors import reason

NONE = "none"
CASES = {
    "fedavg": Case(FedAvg),
    "heterofl": Case(HeteroFL, partial(Conv, hidden=(8, 16)), "abcde", {"fraction": 0.7}),
    "dispfl": Case(
        partial(DisPFL, TimeVarying(3), regrow="gradient", rounds=10),
        partial(MLP, hidden=(32,)), federation={"fraction": 1.0},
    ),
}  # fmt: skip
SUMS, WELL = "tensors reduced", "the same bits"


@contextmanager
def reducing(backend: str) -> Iterator[list[int]]:
    """One rank does what several do over a backend; gives the sizes of the tensors reduced."""
    made, sizes = Ranks.__init__, []

    def init(ranks: Ranks, device: torch.device, **more: Any) -> None:
        if not dist.is_initialized():  # one rank makes no process group of its own
            dist.init_process_group(
                backend,
                store=dist.HashStore(),
                rank=0,
                world_size=1,
                device_id=device if backend == "nccl" else None,
            )
        made(ranks, device, **more)
        if dist.get_backend() == "nccl":  # what a rank among several sets
            ranks.staged, ranks.side = False, collectives._group("side", ranks.timeout)

    def reduce(ranks: Ranks, tensor: Tensor, op: Any) -> Tensor:
        sent = ranks._sendable(tensor)
        dist.all_reduce(sent, op=op, group=ranks._group(sent))
        sizes.append(tensor.numel())
        return tensor if sent is tensor else tensor.copy_(sent)

    def summed(sums: Tensor, ranks: Ranks) -> Tensor:
        return sums.copy_(ranks.sum_(sums.to(ranks.device)))

    with ExitStack() as stack:
        for place, name, new in (
            (Ranks, "__init__", init), (Ranks, "_all_reduce", reduce), (Ranks, "alone", False),
            (group_mean, "sum_over_ranks", summed),
        ):  # fmt: skip
            stack.enter_context(patch.object(place, name, new))
        yield sizes


def unchanged(ranks: Ranks) -> bool:
    """Whether numbers are the same after all that a federation asks of its process group."""
    generator, equal = torch.Generator().manual_seed(0), []
    for dtype in (torch.float64, torch.float32, torch.int64):
        given = torch.randn(1 << 20, generator=generator).mul(1e6).to(dtype).to(ranks.device)
        equal += [torch.equal(reduce(given.clone()), given) for reduce in (ranks.sum_, ranks.max_)]
        sent = ranks._sendable(given)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ranks._group(sent))
        equal.append(torch.equal(received, sent))
    (package,) = ranks._packages(b"two", 4, "a gather")
    equal.append(package[-4:] == b"two\0")
    dist.barrier(group=ranks.side)
    return all(equal)


def run(case: str, backend: str, device: str, rounds: int) -> dict[str, str]:
    """What a run must have in common with others; of a backend also what it reduced."""
    flags = {"accelerator": "cpu" if device == "cpu" else "gpu"}
    with ExitStack() as stack, redirect_stdout(StringIO()):  # its summary
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sizes = [] if backend == NONE else stack.enter_context(reducing(backend))
        ended = fit(CASES[case], folder, rounds=rounds, **flags)
        found = digest(*ended)
        if backend == NONE:
            return found
        reduced = len(sizes)
        well = reduced and dist.get_backend() == backend and unchanged(ended[0].strategy.ranks)
    return found | {SUMS: str(reduced) if well else f"{reduced}, WRONG"}


def compared(without: dict[str, str], found: dict[str, str]) -> str:
    """What was reduced in a run, and how it differs from one without collectives."""
    differ = [key for key, value in without.items() if found[key] != value]
    reduced = f"{found.get(SUMS, 0)} {SUMS}, "
    return reduced + (f"DIFFERENT: {', '.join(differ)}" if differ else WELL)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each case and backend."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=out_folder, help="folder for nccl.json")
    options = parser.parse_args(argv)
    print(machine())
    cases = options.cases.split(",")
    # What the command is for comes first, of every case: the time may end.
    order = [(case, backend) for backend in ("nccl", "gloo") for case in cases]
    kept: dict[str, dict[str, dict[str, str]]] = {case: {} for case in cases}
    good = True
    for case, backend in order:
        if backend == "nccl" and options.device == "cpu":
            continue
        for way in (NONE, backend):
            if way in kept[case]:
                continue
            try:
                kept[case][way] = apart(run, case, way, options.device, options.rounds)
                outcome = compared(kept[case][NONE], kept[case][way])
            except Exception as error:  # the other backends may do
                outcome = f"FAILED: {reason(error)[:200]}"
            print(f"{case:10} {way:5} {outcome}", flush=True)
            good = good and outcome.endswith(WELL) and "WRONG" not in outcome
        if options.out is not None:
            (options.out / "nccl.json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
