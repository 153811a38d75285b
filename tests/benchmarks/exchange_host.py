"""Host time of a DisPFL exchange: all that Python does, with kernels that do nothing.

    python tests/benchmarks/exchange_host.py [--clients 100] [--blocks 34]

The tensors of ResNet-18, each of them cut to 32 elements, so that copies take no time either; masks
of one bit, 10 neighbours. CPU time of one rank. A real launch costs some 20 us more than one here.
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
from lightfed_kernels.gpu import masked_mean, select

from lightfed.aggregation import gossip
from lightfed.distributed.collectives import Ranks
from lightfed.models.networks.cifar_resnet import ResNet18GN
from lightfed.state.row_store import RowStore
from lightfed.state.rows import ModelLayout
from lightfed.topology.topology import TimeVarying, round_senders

CPU = torch.device("cpu")


class Nothing:
    """A kernel that does nothing, and counts its launches."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: object) -> "Nothing":
        return self

    def __call__(self, *arguments: object, **constants: object) -> None:
        self.launches += 1


def measure(clients: int, neighbours: int, blocks: int, passes: int) -> tuple[list[float], float]:
    """CPU seconds of every exchange, and launches in one.

    Args:
        clients: on the rank.
        neighbours: senders to a client.
        blocks: of columns.
        passes: exchanges.
    """
    whole = ModelLayout.of(ResNet18GN(num_classes=10))
    small = Layout.build((entry.name, (ALIGNMENT,)) for entry in whole.floats)
    layout = ModelLayout(small, whole.integers, whole.parameters)
    store = RowStore(layout, device=CPU, host=False)
    store.open(list(range(clients)), keep=True)
    live = Segments.build(small).live
    masks = {k: live.clone() for k in range(clients)}
    senders = round_senders(TimeVarying(neighbours), 0, clients=clients, seed=0)
    kernel = Nothing()
    vars(masked_mean)["masked_mean"] = vars(select)["count"] = kernel
    vars(gossip)["_LEAST"] = -(-len(small.entries) // blocks) * ALIGNMENT
    exchange = gossip.Exchange(layout, Ranks(CPU), owner=dict.fromkeys(masks, 0), buffer=1)
    seconds = []
    for _ in range(passes):
        start = time.process_time()
        block = store.view(range(clients))
        assert block is not None
        rows = dict(enumerate(block.each()))
        exchange.mean_(rows, senders, masks=masks, keep=masks, over="covered", block=block)
        seconds.append(time.process_time() - start)
    return seconds, kernel.launches / passes


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--neighbours", type=int, default=10, help="senders to a client")
    parser.add_argument("--blocks", type=int, default=1, help="that the columns pass in")
    parser.add_argument("--passes", type=int, default=20)
    options = parser.parse_args(argv)
    seconds, launches = measure(options.clients, options.neighbours, options.blocks, options.passes)
    least, median = 1e3 * min(seconds), 1e3 * statistics.median(seconds)
    print(
        f"{options.clients} clients, {options.blocks} blocks: {least:.2f} ms at least, "
        f"{median:.2f} ms median, {launches:.0f} launches"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
