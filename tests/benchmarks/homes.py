"""How long ranks wait for each other when clients keep their rows, and what moving them would save.

    python tests/benchmarks/homes.py [--ranks 8] [--clients 200]

A simulation with lightfed's own placement. Clients are of five groups whose sessions take 10 to 1
seconds per 100 samples, while their FLOPs differ by more (HeteroFL's widths). The clients' samples
differ fivefold. The idle share of a round is the part of the ranks' time in which they wait.

    FLOPs     homes of a first start: nothing is measured yet
    measured  homes of every later start, from the seconds in the checkpoint
    moved     rows move to the best rank before every round, as those of stateless clients do
"""

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence

from lightfed.distributed.placement import place

SECONDS = (10.0, 5.0, 2.5, 1.5, 1.0)  # of a session with 100 samples, by group
FLOPS = (256.0, 64.0, 16.0, 4.0, 1.0)
ROUNDS = 200


def idle(seconds: Mapping[int, float], homes: Mapping[int, int], ranks: int) -> float:
    """The share of the ranks' time in a round in which they wait for the last one."""
    loads = [0.0] * ranks
    for client, own in seconds.items():
        loads[homes[client]] += own
    return 1 - sum(loads) / (ranks * max(loads))


def shares(clients: int, ranks: int, fraction: float, draw: random.Random) -> Sequence[float]:
    """Mean idle shares with homes from FLOPs, from seconds, and with rows that move."""
    samples = {client: draw.uniform(1, 5) for client in range(clients)}
    group = {client: client * len(SECONDS) // clients for client in range(clients)}
    seconds = {k: SECONDS[group[k]] * samples[k] for k in samples}
    first = place({k: FLOPS[group[k]] * samples[k] for k in samples}, ranks=ranks)
    later = place(seconds, ranks=ranks)
    found = []
    for _ in range(ROUNDS if fraction < 1 else 1):
        chosen = draw.sample(range(clients), max(1, round(fraction * clients)))
        own = {k: seconds[k] for k in chosen}
        found.append([idle(own, homes, ranks) for homes in (first, later, place(own, ranks=ranks))])
    return [statistics.mean(column) for column in zip(*found, strict=True)]


def main() -> None:
    """Print a row for each share of the clients in a round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--clients", type=int, default=200)
    options = parser.parse_args()
    print(f"{options.clients} clients on {options.ranks} ranks: idle share of a round")
    print("clients in a round   FLOPs  measured   moved")
    for fraction in (1.0, 0.5, 0.1):
        first, later, moved = shares(options.clients, options.ranks, fraction, random.Random(7))
        print(f"{fraction:18.0%}  {first:6.1%}  {later:8.1%}  {moved:6.1%}")


if __name__ == "__main__":
    main()
