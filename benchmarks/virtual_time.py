"""What virtual time costs: the clock's own calls in a round, in milliseconds of CPU time.

    python benchmarks/virtual_time.py

W1 has 10 of 100 clients, W5 100 of 10,000 (`workloads.py`). A round opens, draws participants if
some may be away, notes their sessions, closes at the merge and ends. Rates of devices are drawn
once, and delays in every round, for all clients. The least of twenty batches counts.
"""

from time import process_time

import numpy as np

from lightfed.devices.delays import Exponential, LogNormal
from lightfed.devices.device_clock import DeviceClock
from lightfed.devices.devices import Bernoulli, Devices
from lightfed.devices.policy import Policy
from lightfed.state.costs import Ledger

SIZES = {"W1": (100, 10), "W5": (10_000, 100)}
RATES = Devices(flops=LogNormal(20.0, 1.0), up=1e6, down=4e6, latency=0.05)
GIVEN = {
    "rates": (RATES, None),
    "availability and a deadline": (
        Devices(flops=LogNormal(20.0, 1.0), up=1e6, availability=Bernoulli(0.8)),
        Policy(deadline=9.0, over_select=0.3),
    ),
    "rates and delays": (Devices(flops=1e9, up=1e6, delay=Exponential(1.0)), None),
}
ROUNDS = 50


def measure(devices: Devices, policy: Policy | None, clients: int, sampled: int) -> float:
    """Milliseconds of a round."""
    ledger, usable = Ledger(clients), dict.fromkeys(range(clients), True)
    values = devices.of({"all": clients}, seed=0)
    clock = DeviceClock(devices, values, ledger, sampled=sampled, policy=policy)
    # If clients are always there and never busy, the draw of the participants is not the clock's.
    selects = devices.availability is not None or policy is not None
    fixed = [*range(0, clients, clients // sampled)]
    best = np.inf
    for batch in range(20):
        spent = 0.0
        for t in range(batch * ROUNDS, (batch + 1) * ROUNDS):
            start = process_time()
            clock.open()
            asked = clock.participants(t) if selects else fixed
            clock.trained(dict.fromkeys(asked, 5), t)
            spent += process_time() - start
            for add, amount in (
                (ledger.sent_down, 1e6),
                (ledger.computed, 1e9),
                (ledger.sent_up, 1e6),
            ):
                add(asked, amount)
            start = process_time()
            clock.close((), usable)
            clock.close_round((), usable)
            spent += process_time() - start
        best = min(best, 1000 * spent / ROUNDS)
    return float(best)


if __name__ == "__main__":
    for name, given in GIVEN.items():
        found = {workload: measure(*given, *size) for workload, size in SIZES.items()}
        print(f"{name}: " + ", ".join(f"{w} {ms:.3f} ms" for w, ms in found.items()))
