"""Named randomness: every draw comes from a generator seeded by (seed, purpose, round, client).

lightfed never reads global random state, and sets it only for a user's code. So checkpoints hold no
random state, and a client's draws depend neither on the rank that trains it nor on earlier draws.
"""

import hashlib
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(seed: int, purpose: str, round: int = -1, client: int = -1) -> int:
    """Return a 63-bit seed that is a pure function of its name.

    Args:
        seed: The seed of the run.
        purpose: What is drawn.
        round: The round; -1 if the draw belongs to none.
        client: The client; -1 if the draw belongs to none.
    """
    name = f"{seed}/{purpose}/{round}/{client}".encode()
    digest = hashlib.blake2b(name, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def torch_generator(seed: int, purpose: str, round: int = -1, client: int = -1) -> torch.Generator:
    """Return a generator of the CPU, whose draws are the same with every device."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, round, client))


def numpy_generator(
    seed: int, purpose: str, round: int = -1, client: int = -1
) -> np.random.Generator:
    """Return a generator of numpy."""
    return np.random.default_rng(derive_seed(seed, purpose, round, client))


def seed_default_generators(seed: int, device: torch.device) -> None:
    """Seed the generators used by dropout; torch.manual_seed costs a hundred times as much.

    The CPU's is seeded too: modules may draw on it to get the same draws on every device. A user's
    module may also draw from numpy's and Python's, as code for mixup does.
    """
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Set the global random state by a seed within a context; afterwards it is as before.

    It is that of Python, numpy, torch on the CPU, and of a device.
    """
    if device is None:
        device = torch.device("cpu")
    state_of_python = random.getstate()
    state_of_numpy = np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            seed_default_generators(seed, device)
            yield
        finally:
            random.setstate(state_of_python)
            np.random.set_state(state_of_numpy)


def python_states() -> bytes:
    """Return the states of Python's and numpy's generators, which no pack seeds for its clients."""
    return pickle.dumps((random.getstate(), np.random.get_state()))
