"""Named randomness: every draw comes from a generator seeded by (seed, purpose, round, client).

lightfed never reads global random state, and sets it only for a user's code. So checkpoints hold no
random state, and a client's draws depend neither on the rank that trains it nor on earlier draws.
"""

import hashlib
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from lightfed_kernels import stream_keys, uniform_
from torch import Tensor
from typing_extensions import override

from lightfed.utils.memory import sent


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

    The CPU's too: modules may draw on it to get the same draws on every device. A user's module
    may also draw from numpy's and Python's, as code for mixup does.
    """
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Global random state that depends on the seed alone; afterwards it is as before.

    It is that of Python, numpy, torch on the CPU, and of a device.
    """
    device = device or torch.device("cpu")
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            seed_default_generators(seed, device)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def torch_states(device: torch.device) -> list[bytes]:
    """The states of the generators that `seed_default_generators` seeds."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return [generator.get_state().numpy().tobytes() for generator in generators]


def python_states() -> bytes:
    """The states of the generators of Python and numpy, which no pack seeds for its clients."""
    return pickle.dumps((random.getstate(), np.random.get_state()))


class Streams(Protocol):
    """Random numbers of K clients, each from a stream of its own."""

    def bernoulli_(self, out: Tensor, p: float) -> Tensor:
        """Fill (K, ...) with ones, with probability p, and zeros."""

    def uniform_(self, out: Tensor) -> Tensor:
        """Fill (K, ...) with numbers in [0, 1)."""

    def part(self, places: Sequence[int], real: int | None = None) -> "Streams":
        """The streams of some clients, the first `real` (None: all) of which go on from here."""


Draws = Callable[[], Streams]  # called when something is drawn


def streams(seeds: Sequence[int], device: torch.device) -> Streams:
    """Streams of clients with these seeds; on a CPU those of torch's generators."""
    if device.type == "cpu":
        return _TorchStreams([torch.Generator().manual_seed(seed) for seed in seeds])
    keys = sent(stream_keys(seeds), device)
    return DeviceStreams(keys, torch.zeros_like(keys))


class _TorchStreams(Streams):
    """A generator for each client: the draws of torch for one client."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators

    @override
    def bernoulli_(self, out: Tensor, p: float) -> Tensor:
        for part, generator in zip(out, self._generators, strict=True):
            part.bernoulli_(p, generator=generator)
        return out

    @override
    def uniform_(self, out: Tensor) -> Tensor:
        for part, generator in zip(out, self._generators, strict=True):
            part.uniform_(generator=generator)
        return out

    @override
    def part(self, places: Sequence[int], real: int | None = None) -> Streams:
        found = [self._generators[place] for place in places[:real]]
        return _TorchStreams(found + [torch.Generator() for _ in places[len(found) :]])


class DeviceStreams(Streams):
    """Counters on the device: one launch draws for all clients.

    `offsets` (K,) int64 are elements of each that have been drawn; advanced in place.
    """

    def __init__(self, keys: Tensor, offsets: Tensor) -> None:
        self._keys, self._offsets = keys, offsets

    @override
    def bernoulli_(self, out: Tensor, p: float) -> Tensor:
        return out.copy_(self.uniform_(torch.empty_like(out, dtype=torch.float32)) < p)

    @override
    def uniform_(self, out: Tensor) -> Tensor:
        uniform_(out.view(len(out), -1), self._keys, self._offsets)
        self._advance(out[0].numel())
        return out

    def _advance(self, drawn: int) -> None:
        self._offsets += drawn

    def load(self, others: "DeviceStreams") -> None:
        """Go on as others, as many or fewer, in the place of the first of these."""
        count = len(others._keys)
        self._keys[:count].copy_(others._keys)
        self._offsets[:count].copy_(others._offsets)

    @override
    def part(self, places: Sequence[int], real: int | None = None) -> Streams:
        if isinstance(places, range):  # views: the offsets of all are advanced
            chosen = slice(places.start, places.stop)
            return DeviceStreams(self._keys[chosen], self._offsets[chosen])
        return _SomeStreams(self._keys, self._offsets, places, real)


class _SomeStreams(DeviceStreams):
    """Of clients that do not follow each other; padding repeats some and advances none."""

    def __init__(
        self, keys: Tensor, offsets: Tensor, places: Sequence[int], real: int | None
    ) -> None:
        index = sent(torch.tensor(places), keys.device)
        super().__init__(keys[index], offsets[index])
        self._all, self._real = offsets, index[:real]

    @override
    def _advance(self, drawn: int) -> None:
        super()._advance(drawn)
        self._all.index_add_(0, self._real, torch.full_like(self._real, drawn))
