"""Moves clients between ranks at random, so that a test sees what does not move with them."""

from lightfed.api.fleet import Fleet
from lightfed.utils.rng import numpy_generator


def shuffle(fleet: Fleet, t: int) -> None:
    """In place of `Fleet.move_for`: all that can change places do so.

    Not before the first round, in which clients still are in order.
    """
    if fleet.algorithm.stateful and t > 0:
        fleet.deliver(fleet.mine(range(fleet.clients)))
        fleet.client_rows.move(random_pairs(fleet, t))


def random_pairs(fleet: Fleet, t: int) -> list[tuple[int, int]]:
    """Disjoint pairs of clients of blocks on different ranks, as many as come up."""
    blocks, owner = fleet.places.blocks, fleet.places.owner
    left = numpy_generator(fleet.seed, "test-moves", t).permutation(len(blocks)).tolist()
    pairs = []
    while left:
        one = left.pop()
        for other in left:
            home, its = (owner[blocks.members(block)[0]] for block in (one, other))
            if blocks.kind[other] == blocks.kind[one] and its != home:
                left.remove(other)
                pairs += blocks.pairs(one, other)
                break
    return pairs
