"""Named randomness: every draw comes from a generator seeded by (seed, purpose, round, client).

lightfed never reads global random state. So checkpoints hold no random state, and a client's draws
depend neither on the rank that trains it nor on earlier draws.
"""

import hashlib

import numpy as np
import torch


def derive_seed(seed: int, purpose: str, round: int = -1, client: int = -1) -> int:
    """A 63-bit seed that is a pure function of its name.

    -1 means "not bound to a round (client)".
    """
    name = f"{seed}/{purpose}/{round}/{client}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def torch_generator(seed: int, purpose: str, round: int = -1, client: int = -1) -> torch.Generator:
    """A CPU generator: the stream is the same on every device."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, round, client))


def numpy_generator(
    seed: int, purpose: str, round: int = -1, client: int = -1
) -> np.random.Generator:
    return np.random.default_rng(derive_seed(seed, purpose, round, client))


def seed_default_generators(seed: int, device: torch.device) -> None:
    """Seed the generators used by dropout; torch.manual_seed costs a hundred times as much.

    The CPU's too: modules may draw on it to get the same draws on every device.
    """
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    torch.default_generator.manual_seed(seed)
