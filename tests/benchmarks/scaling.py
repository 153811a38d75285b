"""Registered clients cost next to nothing: the same rounds with ten times as many of them."""

from figures import Figure
from workers import Worker
from workloads import Workload

FACTOR = 10
TIME_LIMIT = 1.05
BYTES_LIMIT = 1000.0
WARM_UP = 2


def scaling(workload: Workload, *, passes: int) -> list[Figure]:
    """Compare rounds and resident memory of lightfed at `workload.clients` and ten times as many.

    Both draw as many participants a round from the same pool of samples.
    """
    many = workload.with_clients(FACTOR * workload.clients)
    workers = {size.clients: Worker("lightfed", size) for size in (workload, many)}
    seconds: dict[int, list[float]] = {clients: [] for clients in workers}
    try:
        for worker in workers.values():
            worker.seconds(WARM_UP)
        for number in range(passes):
            for clients in sorted(workers, reverse=number % 2 == 1):
                seconds[clients].append(workers[clients].seconds(workload.rounds))
        few_bytes, many_bytes = (worker.memory() for worker in workers.values())
    finally:
        for worker in workers.values():
            worker.close()
    added = (many_bytes - few_bytes) / (many.clients - workload.clients)
    time = Figure.of(
        f"{workload.name} with {many.clients:,} clients, round time",
        baseline=seconds[workload.clients],
        measured=seconds[many.clients],
        target=TIME_LIMIT,
    )
    memory = Figure.of(
        f"{workload.name} with {many.clients:,} clients, bytes an added client by {BYTES_LIMIT:g}",
        baseline=[BYTES_LIMIT],
        measured=[added],
        target=1.0,
        extra={"bytes_few": few_bytes, "bytes_many": many_bytes},
    )
    print(f"{workload.name}  {workload.clients:,} -> {many.clients:,} registered clients")
    print(f"    round time: {time.text()}")
    print(f"    memory: {few_bytes / 1e6:.0f} -> {many_bytes / 1e6:.0f} MB, ", end="")
    print(f"{added:.0f} bytes an added client; at most {BYTES_LIMIT:g}", flush=True)
    return [time, memory]
