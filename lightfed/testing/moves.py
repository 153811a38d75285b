"""Moves clients between ranks at random, so that a test sees what does not move with them."""

from lightfed.api.fleet import Fleet
from lightfed.api.moving import move
from lightfed.utils.rng import numpy_generator


def shuffle(fleet: Fleet, t: int) -> None:
    """In place of `lightfed.api.moving.move_for`: all that can change places do so.

    Not before the first round, in which clients still are in order.
    """
    if fleet.algorithm.stateful and t > 0:
        move(fleet, random_pairs(fleet, t))


def random_pairs(fleet: Fleet, t: int) -> list[tuple[int, int]]:
    """Disjoint pairs of clients of one group on different ranks, as many as come up."""
    left = numpy_generator(fleet.seed, "test-moves", t).permutation(fleet.clients).tolist()
    pairs = []
    while left:
        one = left.pop()
        for other in left:
            alike = fleet.home_group(other) == fleet.home_group(one)
            if alike and fleet.home(other) != fleet.home(one):
                left.remove(other)
                pairs.append((one, other))
                break
    return pairs
