"""Which clients take part in a round."""

from lightfed.local.local_work import LocalWork
from lightfed.utils.counts import rounded_up
from lightfed.utils.rng import numpy_generator


def participants(work: LocalWork, clients: int, *, seed: int, t: int) -> list[int]:
    """S_t: clients drawn uniformly without replacement, ascending; the same on every rank."""
    count = work.clients_per_round or rounded_up(work.fraction * clients)
    if count >= clients:
        return list(range(clients))
    rng = numpy_generator(seed, "participants", t)
    return sorted(rng.choice(clients, count, replace=False, shuffle=False).tolist())
