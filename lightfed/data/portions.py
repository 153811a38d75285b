"""What of a client's samples its sessions train on: all but a hold-out, in chunks by rounds."""

import numpy as np

from lightfed.data.partition.draw import Partition
from lightfed.data.resident import LastBatch, batch_sizes
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator


class Portions:
    """Nothing is kept per client: a portion is drawn by its name whenever it is asked for.

    Args:
        partition: who owns what.
        seed: of the run; names the draws.
        chunks: into which what is left of a client's samples is cut; one a round, in turn.
        hold_out: share of a client's samples that no session trains on, at least one sample; 0
            for none.
    """

    def __init__(
        self, partition: Partition, *, seed: int, chunks: int = 1, hold_out: float = 0.0
    ) -> None:
        self._partition = partition
        self._seed = seed
        self._chunks = chunks
        self._hold_out = hold_out

    def check(self, *, batch_size: int, last_batch: LastBatch) -> None:
        """Refuse what would let clients train on nothing.

        Raises:
            UserError: naming the key and a client.
        """
        owned = np.diff(self._partition.train_offsets)
        held = np.array([self._held(n) for n in owned.tolist()])
        least = int((owned - held).argmin())
        if owned[least] <= held[least]:
            found = (
                f"{self._hold_out} is all of what client {least} holds: {held[least]} of "
                f"{owned[least]} samples"
            )
            fix = "lower it, or deal more samples to every client"
            raise UserError("model.algorithm.init_args.hold_out", found, fix)
        sizes = (owned - held) // self._chunks
        if sizes.min() < 1:
            count = int((owned - held)[least])
            found = f"{self._chunks}, but client {least} holds {count} samples"
            raise UserError("data.chunks", found, f"give at most {count}")
        if last_batch == "drop" and sizes.min() < batch_size:
            raise UserError(
                "data.last_batch",
                f"{int((sizes < batch_size).sum())} clients hold less than a batch of "
                f"{batch_size} (the smallest {sizes.min()}) and would train on nothing",
                "lower data.batch_size or set last_batch: keep",
            )

    def _held(self, owned: int) -> int:
        """Samples of a hold-out of so many."""
        return max(1, round(self._hold_out * owned)) if self._hold_out else 0

    def trained(self, client: int) -> int:
        """Samples that a client trains on in all its chunks together."""
        owned = len(self._partition.train(client))
        return owned - self._held(owned)

    def sizes(self, client: int) -> range:
        """Which numbers of samples a local epoch of a client may have."""
        least, rest = divmod(self.trained(client), self._chunks)
        return range(least, least + (rest > 0) + 1)

    def size(self, client: int, t: int) -> int:
        """Samples of a local epoch in round t."""
        least, rest = divmod(self.trained(client), self._chunks)
        return least + (t % self._chunks < rest)

    def skipped(self, *, batch_size: int, last_batch: LastBatch) -> int:
        """Samples that no batch takes, of all clients in one pass over all their chunks."""
        if last_batch != "drop":
            return 0
        return sum(
            size - sum(batch_sizes(size, batch_size, last_batch))
            for client in range(self._partition.clients)
            for size in (self.size(client, t) for t in range(self._chunks))
        )

    def samples(self, client: int, t: int) -> np.ndarray:
        """What round t trains on, of the client's samples; the first chunks may have one more."""
        own = self._partition.train(client)
        if self._hold_out:
            own = np.delete(own, self._held_positions(client, len(own)))
        if self._chunks == 1:
            return own
        order = numpy_generator(self._seed, "chunks", client=client).permutation(len(own))
        return own[np.array_split(order, self._chunks)[t % self._chunks]]

    def held_out(self, client: int) -> np.ndarray:
        """What no session trains on, ascending."""
        own = self._partition.train(client)
        return own[self._held_positions(client, len(own))]

    def _held_positions(self, client: int, owned: int) -> np.ndarray:
        """Positions among a client's samples, ascending; the same in all rounds."""
        order = numpy_generator(self._seed, "hold-out", client=client).permutation(owned)
        return np.sort(order[: self._held(owned)])
