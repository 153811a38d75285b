"""Host time of a DisPFL exchange: all that Python does, with kernels that do nothing.

    python -m tests.benchmarks.exchange_host [--clients 100] [--blocks 34] [--ranks 4]

The tensors of ResNet-18, each of them cut to 32 elements, so that copies take no time either; masks
of one bit, 10 neighbours. CPU time of one rank; ranks are threads. A real launch costs some 20 us
more than one here.
"""

import argparse
import os
import statistics
import sys
import time

# Before torch and Triton are imported.
os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "LIGHTFED_KERNELS": "triton"}

import torch
from lightfed_kernels import ALIGNMENT, Layout, Segments
from lightfed_kernels.gpu import masked_mean, masks, select

from lightfed.aggregation import gossip
from lightfed.distributed.collectives import Ranks
from lightfed.models.networks.cifar_resnet import ResNet18GN
from lightfed.state.rows import ModelLayout, RowStore
from lightfed.topology.topology import TimeVarying, round_senders
from tests.distributed.threads import on_ranks

CPU = torch.device("cpu")


class Nothing:
    """A kernel that does nothing, and counts its launches."""

    def __init__(self) -> None:
        self.launches, self.__name__ = 0, "nothing"

    def __getitem__(self, grid: object) -> "Nothing":
        return self

    def __call__(self, *arguments: object, **constants: object) -> None:
        self.launches += 1


def measure(
    clients: int, neighbours: int, blocks: int, passes: int, world: int
) -> tuple[list[float], float]:
    """CPU seconds of every exchange of the last rank, and launches in one on all ranks.

    Args:
        clients: on all ranks.
        neighbours: senders to a client.
        blocks: of columns.
        passes: exchanges.
        world: ranks.
    """
    whole = ModelLayout.of(ResNet18GN(num_classes=10))
    small = Layout.build((entry.name, (ALIGNMENT,)) for entry in whole.floats)
    layout = ModelLayout(small, whole.integers, whole.parameters)
    live = Segments.build(small).live
    senders = round_senders(TimeVarying(neighbours), 0, clients=clients, seed=0)
    owner = {k: k * world // clients for k in range(clients)}
    kernel = Nothing()
    for module, names in (
        (masked_mean, ("masked_mean", "mean_tile")),
        (masks, ("compress", "expand")),
        (select, ("count",)),
    ):
        vars(module).update(dict.fromkeys(names, kernel))
    # All bits are ones, and that many values are sent.
    vars(masks)["tile_counts"] = lambda words: torch.full((len(words), 1), 32 * words.shape[1])
    vars(gossip)["_LEAST"] = -(-len(small.entries) // blocks) * ALIGNMENT

    def exchanges(ranks: Ranks) -> list[float]:
        own = [k for k in owner if owner[k] == ranks.rank]
        store = RowStore(layout, device=CPU, host=False)
        store.open(own, keep=True)
        words = {k: live.clone() for k in own}
        exchange = gossip.Exchange(layout, ranks, owner=owner, buffer=1)
        seconds = []
        for _ in range(passes):
            start = time.thread_time()
            block = store.view(own)
            assert block is not None
            rows = dict(zip(own, block.each(), strict=True))
            exchange.mean_(rows, senders, masks=words, keep=words, over="covered", block=block)
            seconds.append(time.thread_time() - start)
        return seconds

    seconds = on_ranks(world, exchanges)[-1]
    return seconds, kernel.launches / passes


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--neighbours", type=int, default=10, help="senders to a client")
    parser.add_argument("--blocks", type=int, default=1, help="that the columns pass in")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--passes", type=int, default=20)
    options = parser.parse_args(argv)
    seconds, launches = measure(
        options.clients, options.neighbours, options.blocks, options.passes, options.ranks
    )
    least, median = 1e3 * min(seconds), 1e3 * statistics.median(seconds)
    print(
        f"{options.clients} clients, {options.ranks} ranks, {options.blocks} blocks: "
        f"{least:.2f} ms at least, {median:.2f} ms median, {launches:.0f} launches"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
