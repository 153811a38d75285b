"""Named randomness: every part of a name makes another stream, the same in every process."""

import random
from itertools import product

import numpy as np
import torch

from lightfed.utils.rng import (
    derive_seed,
    numpy_generator,
    seed_default_generators,
    seeded,
    torch_generator,
)

NAMES = list(product((0, 1), ("order", "augment", "session"), (-1, 0, 1, 11), (-1, 0, 1, 11)))


def test_every_part_of_the_name_makes_another_stream() -> None:
    assert len({derive_seed(*name) for name in NAMES}) == len(NAMES)
    torch_draws = {
        tuple(torch.randint(2**62, (3,), generator=torch_generator(*n)).tolist()) for n in NAMES
    }
    numpy_draws = {tuple(numpy_generator(*n).integers(2**62, size=3).tolist()) for n in NAMES}
    assert len(torch_draws) == len(numpy_draws) == len(NAMES)


def test_seeded_draws_leave_the_global_ones_alone() -> None:
    def draws() -> tuple[float, ...]:
        return torch.rand(()).item(), np.random.rand(), random.random()

    def rest(*seeds: int) -> tuple[float, ...]:
        seed_default_generators(3, torch.device("cpu"))
        for seed in seeds:
            with seeded(seed, torch.device("cpu")):
                inside.append(draws())
        return draws()

    inside: list[tuple[float, ...]] = []
    assert rest() == rest(8, 9, 8)
    assert inside[0] == inside[2] != inside[1]


def test_seeds_are_what_they_have_always_been() -> None:
    """A run that is resumed by a newer version goes on with the same draws."""
    assert derive_seed(0, "participants", 0) == 4295376579695085778
    assert derive_seed(3, "order", 2, 41) == 7122437206892188347
