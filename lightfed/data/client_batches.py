"""The batches of clients, and of whole splits, once the data of a run are prepared."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lightfed.data.batches import Batch, LastBatch, PackBatches, Plan, Resident, batch_sizes
from lightfed.data.partition.draw import Partition
from lightfed.utils.errors import require
from lightfed.utils.rng import numpy_generator


class ClientBatches:
    """What clients own, train on and are tested on, gathered on demand.

    A round uses one of `chunks` of a client's samples outside the hold-out, the share that no
    session trains on. Chunks and hold-outs are drawn by name when needed, and none is stored.
    """

    partition_: Partition
    train: Resident
    test: Resident
    batch_size: int
    eval_batch_size: int
    last_batch: LastBatch
    chunks: int

    def set_data(
        self,
        partition: Partition,
        train: Resident,
        test: Resident,
        *,
        tokens: Tensor | None,
        seed: int,
    ) -> None:
        """Take prepared data; `tokens` are (N, window), if those are what is predicted."""
        self.partition_, self.train, self.test = partition, train, test
        self._tokens, self._seed = tokens, seed
        dealt = np.zeros(len(train), np.bool_)
        dealt[partition.train_index] = True
        self._union = torch.from_numpy(np.flatnonzero(dealt))
        self.reserve(0.0)

    def reserve(self, hold_out: float) -> None:
        """Hold this share of every client's training samples out of its epochs, drawn once.

        A UserError if a client would have no training sample.
        """
        owned = np.diff(self.partition_.train_offsets)
        sizes, which = np.unique(owned, return_inverse=True)
        left = owned - np.array([_held(n, hold_out) for n in sizes.tolist()])[which]
        self._check_portions(left, hold_out)
        self._hold_out, self._trained = hold_out, left

    def _check_portions(self, left: np.ndarray, hold_out: float) -> None:
        """Refuse settings with which a client, which is named, would train on nothing."""
        least = int(left.argmin())
        owned = len(self.partition_.train(least))
        found = f"{hold_out} is all of what client {least} holds: {_held(owned, hold_out)} of "
        fix = "lower it, or deal more samples to every client"
        key = "model.algorithm.init_args.hold_out"
        require(left[least] > 0, key, f"{found}{owned} samples", fix)
        sizes = left // self.chunks
        found = f"{self.chunks}, but client {least} holds {left[least]} samples"
        require(sizes.min() >= 1, "data.chunks", found, f"give at most {left[least]}")
        found = (
            f"{(sizes < self.batch_size).sum()} clients hold less than a batch of "
            f"{self.batch_size} (the smallest {sizes.min()}) and would train on nothing"
        )
        fix = "lower data.batch_size or set last_batch: keep"
        fits = self.last_batch != "drop" or sizes.min() >= self.batch_size
        require(fits, "data.last_batch", found, fix)

    def num_samples(self, client: int) -> int:
        """Training samples of a client without the hold-out, n_k."""
        return int(self._trained[client])

    def num_held_out(self, client: int) -> int:
        """Training samples in the hold-out of a client."""
        return len(self.partition_.train(client)) - self.num_samples(client)

    @property
    def skipped_samples(self) -> int:
        """Samples that `last_batch` drops, of all clients in one pass over their chunks."""
        if self.last_batch != "drop":
            return 0
        sizes, first, clients = np.unique(self._trained, return_index=True, return_counts=True)
        return sum(
            same * (size - sum(sum(self.batch_sizes(client, t)) for t in range(self.chunks)))
            for size, client, same in zip(
                sizes.tolist(), first.tolist(), clients.tolist(), strict=True
            )
        )

    def first_of_each_size(self, clients: slice) -> list[int]:
        """Of consecutive clients, the first with each number of training samples, ascending."""
        _, first = np.unique(self._trained[clients], return_index=True)
        return sorted((first + (clients.start or 0)).tolist())

    def epoch_sizes(self, client: int) -> range:
        """The possible sizes of a client's local epoch, which are those of its chunks."""
        least, rest = divmod(self.num_samples(client), self.chunks)
        return range(least, least + (rest > 0) + 1)

    def num_batches(self, client: int, t: int = 0) -> int:
        """Training batches of one local epoch in round t."""
        return len(self.batch_sizes(client, t))

    def batch_sizes(self, client: int, t: int = 0) -> tuple[int, ...]:
        """Their numbers of samples; the first chunks may have one more."""
        least, rest = divmod(int(self._trained[client]), self.chunks)
        return batch_sizes(least + (t % self.chunks < rest), self.batch_size, self.last_batch)

    def epoch_samples(self, client: int, t: int) -> np.ndarray:
        """The samples that a client trains on in round t."""
        own = self.partition_.train(client)
        if self._hold_out:
            own = np.delete(own, self._held_positions(client, len(own)))
        if self.chunks == 1:
            return own
        order = numpy_generator(self._seed, "chunks", client=client).permutation(len(own))
        return own[np.array_split(order, self.chunks)[t % self.chunks]]

    def _held_positions(self, client: int, owned: int) -> np.ndarray:
        """Positions of the hold-out among a client's samples, ascending; the same in all rounds."""
        order = numpy_generator(self._seed, "hold-out", client=client).permutation(owned)
        return np.sort(order[: _held(owned, self._hold_out)])

    def held_out_batches(self, client: int) -> Iterator[Batch]:
        """The hold-out of a client in a fixed order, not augmented."""
        own = self.partition_.train(client)
        held = own[self._held_positions(client, len(own))]
        return self.train.batches(self.train.plan(held, batch_size=self.batch_size))

    def client_plan(self, client: int, batch_size: int) -> Plan:
        """A client's training samples, each once, in a fixed order, not augmented.

        A single last sample joins the batch before it, because batch statistics need two.
        """
        own = self.partition_.train(client)
        return self.train.plan(own, batch_size=batch_size, last_batch="join")

    def labels(self, client: int) -> Tensor:
        """The classes, or tokens, that a client trains on: int64, ascending, on the CPU."""
        if self._tokens is None:
            return torch.from_numpy(self.partition_.labels(client))
        own = self._tokens.index_select(0, torch.from_numpy(self.partition_.train(client)))
        return torch.bincount(own.flatten()).nonzero().squeeze(1)

    def train_plan(
        self,
        client: int,
        *,
        order: torch.Generator,
        augment: torch.Generator | None,
        limit: int | None = None,
        t: int = 0,
    ) -> Plan:
        """One pass over the samples that a client trains on in a round, before it is gathered.

        `order` draws the order, and `augment` crops, flips and erased rectangles; None for none.
        There are at most `limit` batches. The round t selects the chunk; -1, for an evaluation, the
        last one.
        """
        return self.train.plan(
            self.epoch_samples(client, t),
            batch_size=self.batch_size,
            generator=augment,
            order=order,
            last_batch=self.last_batch,
            limit=limit,
        )

    def batches(self, plan: Plan) -> Iterator[Batch]:
        """The training batches of a plan."""
        return self.train.batches(plan)

    def pack_batches(self, sessions: Sequence[Sequence[Plan]]) -> PackBatches:
        """The training batches of K sessions, of which each has plans of its own; see there."""
        return PackBatches(self.train, sessions)

    @property
    def _tested(self) -> Resident:
        """The split that the test samples of clients are in."""
        return self.train if self.partition_.meta["test_source"] == "train" else self.test

    def test_batches(self, client: int) -> Iterator[Batch]:
        """The test samples of a client in a fixed order; no batch if it has none."""
        own = self.partition_.test(client)
        plan = self._tested.plan(own, batch_size=self.eval_batch_size)
        return self._tested.batches(plan)

    def test_index(self, client: int) -> np.ndarray:
        """The test samples of a client, or of the whole test set for -1; for `test_samples`."""
        return np.arange(len(self.test)) if client < 0 else self.partition_.test(client)

    def test_samples(self, client: int, index: Tensor) -> Batch:
        """Test samples by their index, of clients or of the whole test set (-1), not augmented."""
        return (self.test if client < 0 else self._tested).batch(index)

    def global_test_batches(self) -> int:
        """Number of batches of the whole test set."""
        return -(-len(self.test) // self.eval_batch_size)

    def global_test_batch(self, i: int) -> Batch:
        """Batch i of the whole test set."""
        return self.test.span(i * self.eval_batch_size, (i + 1) * self.eval_batch_size)

    def train_batches(self, batch_size: int) -> int:
        """Number of batches of the training samples of all clients together.

        A single last sample is left out: batch statistics, which use these batches, need two.
        """
        whole, rest = divmod(len(self._union), batch_size)
        return whole + (rest > 1 or (rest == 1 and whole == 0))

    def train_batch(self, i: int, batch_size: int) -> Batch:
        """Batch i of the training samples of all clients, each sample once, not augmented."""
        return self.train.batch(self._union[i * batch_size : (i + 1) * batch_size])


def _held(owned: int, hold_out: float) -> int:
    """Size of the hold-out of a client that owns so many samples: at least one, unless it is 0."""
    return max(1, round(hold_out * owned)) if hold_out else 0
