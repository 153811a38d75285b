"""What a DisPFL exchange costs, against a loop over clients and tensors that does the same work.

    python tests/benchmarks/exchange.py [--clients 100] [--neighbours 10] [--receivers 10]

ResNet-18 with GroupNorm, 11.17 M parameters, masks of density 0.5 (ERK), a client receives from 10
others: CPU time of one rank with one torch thread. The loop is the released code's formulation: for
every client and every tensor the sum of the neighbours' weights over the sum of their masks, which
are float tensors, 0 where that is not a number, times the client's own mask. It is timed on a few
receivers and scaled to all; ours is timed whole. 100 clients need 7 GiB of memory.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

# Before torch is imported: both sides are measured at one thread.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from figures import Figure
from lightfed_kernels import Segments, apply_mask_, select_random, unpack_mask
from torch import Tensor

from lightfed.aggregation.gossip import Exchange
from lightfed.algorithms.shared.sparsity import active_counts, erk_densities
from lightfed.distributed.collectives import Ranks
from lightfed.models.networks.cifar_resnet import ResNet18GN
from lightfed.state.rows import ModelLayout, Row
from lightfed.topology.topology import TimeVarying, round_senders
from lightfed.utils.rng import derive_seed, torch_generator

SEED = 0
DENSITY = 0.5
Tensors = list[Tensor]


@dataclass(frozen=True)
class Clients:
    """What clients have before an exchange, and whom they hear.

    Attributes:
        layout: of their rows.
        rows: 0 outside of the masks.
        masks: packed.
        senders: to each of them.
    """

    layout: ModelLayout
    rows: dict[int, Row]
    masks: dict[int, Tensor]
    senders: dict[int, list[int]]

    @classmethod
    def make(cls, count: int, neighbours: int) -> "Clients":
        """Random rows under masks of their own."""
        torch.manual_seed(SEED)
        layout = ModelLayout.of(ResNet18GN(num_classes=10))
        segments = Segments.build(layout.floats)
        shapes = [entry.shape for entry in layout.floats]
        counts = active_counts(shapes, erk_densities(shapes, DENSITY))
        none = layout.integers.new_row(dtype=torch.int64)
        rows, masks = {}, {}
        for client in range(count):
            seed = derive_seed(SEED, "benchmark/mask", client=client)
            masks[client] = select_random(segments.live, counts, segments, seed=seed)
            floats = torch.empty(layout.size)
            floats.normal_(generator=torch_generator(SEED, "benchmark/row", client=client))
            rows[client] = Row(apply_mask_(floats, masks[client]), none)
        senders = round_senders(TimeVarying(neighbours), 0, clients=count, seed=SEED)
        return cls(layout, rows, masks, senders)

    def tensors(self, client: int) -> Tensors:
        """A client's weights, as a state dict has them."""
        return list(self.layout.floats.views(self.rows[client].floats).values())

    def float_masks(self, client: int) -> Tensors:
        """A client's mask as the released code has it."""
        mask = unpack_mask(self.masks[client]).float()
        return list(self.layout.floats.views(mask).values())


def loop(weights: Sequence[Tensors], masks: Sequence[Tensors], own: Tensors) -> Tensors:
    """One receiver's mean, tensor by tensor, neighbour by neighbour."""
    means = []
    for position, mask in enumerate(own):
        total, count = torch.zeros_like(mask), torch.zeros_like(mask)
        for theirs, covered in zip(weights, masks, strict=True):
            total += theirs[position]
            count += covered[position]
        mean = total / count
        mean[torch.isnan(mean)] = 0.0
        means.append(mean * mask)
    return means


def time_loop(clients: Clients, receiver: int) -> tuple[float, Tensors]:
    """CPU seconds of one receiver, and its mean."""
    heard = sorted({receiver, *clients.senders[receiver]})
    weights = [clients.tensors(k) for k in heard]
    masks = [clients.float_masks(k) for k in heard]
    own = masks[heard.index(receiver)]
    start = time.process_time()
    means = loop(weights, masks, own)
    return time.process_time() - start, means


def time_exchange(clients: Clients) -> float:
    """CPU seconds of an exchange of all clients, on one rank."""
    owner = dict.fromkeys(clients.rows, 0)
    start = time.process_time()
    cpu = torch.device("cpu")
    exchange = Exchange(clients.layout, Ranks(cpu), owner=owner, device=cpu)
    exchange.mean_(
        clients.rows, clients.senders, masks=clients.masks, keep=clients.masks, over="covered"
    )
    return time.process_time() - start


def compare(options: argparse.Namespace) -> Figure:
    """Let both sides take turns on the same rows; check that they agree."""
    clients = Clients.make(options.clients, options.neighbours)
    chosen = range(0, options.clients, -(-options.clients // options.receivers))
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(options.passes):
        timed = {k: time_loop(clients, k) for k in chosen}
        theirs.append(statistics.fmean(t for t, _ in timed.values()) * options.clients)
        ours.append(time_exchange(clients))
        for client, (_, means) in timed.items():
            for found, mean in zip(clients.tensors(client), means, strict=True):
                torch.testing.assert_close(found, mean, rtol=0, atol=1e-6)
    parameters = clients.layout.parameter_numel
    print(f"{options.clients} clients of {parameters:,} parameters, density {DENSITY}")
    print(f"    {options.neighbours} neighbours each; one rank, one thread, CPU time")
    scaled = f"scaled from {len(chosen)} receivers"
    for name, times, how in (("loop", theirs, scaled), ("lightfed", ours, "all receivers")):
        least, median = min(times), statistics.median(times)
        print(f"    {name:9} {least:7.2f} s at least, {median:7.2f} s median, {how}")
    return Figure(theirs, ours)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--neighbours", type=int, default=10, help="senders to a client")
    parser.add_argument("--receivers", type=int, default=10, help="that the loop is timed on")
    parser.add_argument("--passes", type=int, default=3, help="measurements of either side")
    options = parser.parse_args(argv)
    if not 0 < options.neighbours < options.clients:
        parser.error(f"--neighbours: {options.neighbours} of {options.clients - 1} others")
    if not 0 < options.receivers <= options.clients or options.passes < 1:
        parser.error("--receivers, --passes: give at least 1, and no more receivers than clients")
    figure = compare(options)
    print(f"    {figure.text()}; the loop takes {1 / figure.median:.1f} times as long")
    return 0


if __name__ == "__main__":
    sys.exit(main())
