"""The batches of clients, and of whole splits, once the data of a run are prepared."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lightfed.data.batches import Batch, LastBatch, PackBatches, Plan, Resident, batch_sizes
from lightfed.data.partition.draw import Partition
from lightfed.data.portions import Portions


class ClientBatches:
    """What clients own, train on and are tested on, gathered on demand."""

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
        portions = Portions(self.partition_, seed=self._seed, chunks=self.chunks, hold_out=hold_out)
        portions.check(batch_size=self.batch_size, last_batch=self.last_batch)
        self._portions = portions

    def num_samples(self, client: int) -> int:
        """Training samples of a client without the hold-out, n_k."""
        return self._portions.trained(client)

    def num_held_out(self, client: int) -> int:
        """Training samples in the hold-out of a client."""
        return len(self.partition_.train(client)) - self.num_samples(client)

    @property
    def skipped_samples(self) -> int:
        """Samples that `last_batch` drops, of all clients in one pass over their chunks."""
        return self._portions.skipped(batch_size=self.batch_size, last_batch=self.last_batch)

    def first_of_each_size(self, clients: slice) -> list[int]:
        """Of consecutive clients, the first with each number of training samples, ascending."""
        return self._portions.first_of_each(clients)

    def epoch_sizes(self, client: int) -> range:
        """The possible sizes of a client's local epoch, which are those of its chunks."""
        return self._portions.sizes(client)

    def num_batches(self, client: int, t: int = 0) -> int:
        """Training batches of one local epoch in round t."""
        return len(self.batch_sizes(client, t))

    def batch_sizes(self, client: int, t: int = 0) -> tuple[int, ...]:
        """Their numbers of samples."""
        samples = self._portions.size(client, t)
        return batch_sizes(samples, self.batch_size, self.last_batch)

    def held_out_batches(self, client: int) -> Iterator[Batch]:
        """The hold-out of a client in a fixed order, not augmented."""
        return self.train.epoch(self._portions.held_out(client), batch_size=self.batch_size)

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
            self._portions.samples(client, t),
            batch_size=self.batch_size,
            generator=augment,
            order=order,
            last_batch=self.last_batch,
            limit=limit,
        )

    def batches(self, plan: Plan) -> Iterator[Batch]:
        """The training batches of a plan."""
        return self.train.batches(plan)

    def pack_batches(
        self, sessions: Sequence[Sequence[Plan]], idle: Collection[int] = ()
    ) -> PackBatches:
        """The training batches of K sessions, of which each has plans of its own; see there."""
        return PackBatches(self.train, sessions, idle)

    @property
    def _tested(self) -> Resident:
        """The split that the test samples of clients are in."""
        return self.train if self.partition_.meta["test_source"] == "train" else self.test

    def test_batches(self, client: int) -> Iterator[Batch]:
        """The test samples of a client in a fixed order; no batch if it has none."""
        return self._tested.epoch(self.partition_.test(client), batch_size=self.eval_batch_size)

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
