"""The part of a client's samples that a session trains on: a chunk of all but the hold-out."""

import numpy as np

from lightfed.data.batches import LastBatch, batch_sizes
from lightfed.data.partition.draw import Partition
from lightfed.utils.errors import require
from lightfed.utils.rng import numpy_generator


class Portions:
    """Portions of the clients' samples; each is drawn by name when needed, and none is stored.

    A round uses one of `chunks` of a client's samples outside the hold-out, the share that no
    session trains on (at least one sample, or 0 for none).
    """

    def __init__(
        self, partition: Partition, *, seed: int, chunks: int = 1, hold_out: float = 0.0
    ) -> None:
        self._partition, self._seed, self._chunks = partition, seed, chunks
        self._hold_out = hold_out
        owned = np.diff(partition.train_offsets)
        sizes, which = np.unique(owned, return_inverse=True)
        self._trained = owned - np.array([self._held(n) for n in sizes.tolist()])[which]

    def check(self, *, batch_size: int, last_batch: LastBatch) -> None:
        """Refuse settings with which a client, which is named, would train on nothing."""
        left = self._trained
        least = int(left.argmin())
        owned = len(self._partition.train(least))
        found = f"{self._hold_out} is all of what client {least} holds: {self._held(owned)} of "
        fix = "lower it, or deal more samples to every client"
        key = "model.algorithm.init_args.hold_out"
        require(left[least] > 0, key, f"{found}{owned} samples", fix)
        sizes = left // self._chunks
        found = f"{self._chunks}, but client {least} holds {left[least]} samples"
        require(sizes.min() >= 1, "data.chunks", found, f"give at most {left[least]}")
        found = (
            f"{(sizes < batch_size).sum()} clients hold less than a batch of {batch_size} "
            f"(the smallest {sizes.min()}) and would train on nothing"
        )
        fix = "lower data.batch_size or set last_batch: keep"
        fits = last_batch != "drop" or sizes.min() >= batch_size
        require(fits, "data.last_batch", found, fix)

    def _held(self, owned: int) -> int:
        """Size of the hold-out of a client that owns so many samples."""
        return max(1, round(self._hold_out * owned)) if self._hold_out else 0

    def trained(self, client: int) -> int:
        """Samples in all chunks of a client."""
        return int(self._trained[client])

    def first_of_each(self, clients: slice) -> list[int]:
        """Of consecutive clients, the first with each number of samples, ascending."""
        _, first = np.unique(self._trained[clients], return_index=True)
        return sorted((first + (clients.start or 0)).tolist())

    def sizes(self, client: int) -> range:
        """The possible sizes of a client's local epoch."""
        least, rest = divmod(self.trained(client), self._chunks)
        return range(least, least + (rest > 0) + 1)

    def size(self, client: int, t: int) -> int:
        """Samples of a local epoch in round t."""
        least, rest = divmod(self.trained(client), self._chunks)
        return least + (t % self._chunks < rest)

    def skipped(self, *, batch_size: int, last_batch: LastBatch) -> int:
        """Samples in no batch, of all clients in one pass over all their chunks."""
        if last_batch != "drop":
            return 0
        _, first, clients = np.unique(self._trained, return_index=True, return_counts=True)
        return sum(
            same * (size - sum(batch_sizes(size, batch_size, last_batch)))
            for client, same in zip(first.tolist(), clients.tolist(), strict=True)
            for size in (self.size(client, t) for t in range(self._chunks))
        )

    def samples(self, client: int, t: int) -> np.ndarray:
        """The client's samples of round t; the first chunks may have one more than the others."""
        own = self._partition.train(client)
        if self._hold_out:
            own = np.delete(own, self._held_positions(client, len(own)))
        if self._chunks == 1:
            return own
        order = numpy_generator(self._seed, "chunks", client=client).permutation(len(own))
        return own[np.array_split(order, self._chunks)[t % self._chunks]]

    def held_out(self, client: int) -> np.ndarray:
        """The hold-out of a client, ascending."""
        own = self._partition.train(client)
        return own[self._held_positions(client, len(own))]

    def _held_positions(self, client: int, owned: int) -> np.ndarray:
        """Positions among a client's samples, ascending; the same in all rounds."""
        order = numpy_generator(self._seed, "hold-out", client=client).permutation(owned)
        return np.sort(order[: self._held(owned)])
