"""The data of a run: both splits on the device, the partition, and the batches of each client."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from typing_extensions import override

from lightfed.data.batches import Batch, LastBatch, PackBatches, Plan, Resident, batch_sizes
from lightfed.data.checks import loaded
from lightfed.data.datasets.dataset import Dataset, Task
from lightfed.data.partition.draw import (
    Partition,
    Partitioner,
    PersonalTest,
    check_personal_test,
    draw_partition,
)
from lightfed.data.portions import Portions
from lightfed.data.resident import Place, resident
from lightfed.utils.errors import UserError, require
from lightfed.utils.recorded import Recorded

Pool = Literal["train", "union"]


class FederatedDataModule(Recorded, LightningDataModule):
    """A data set divided over clients.

    Clients only exist as entries of the partition's flat arrays, and batches are gathered on
    demand, so that 100,000 clients need little memory. Every rank holds both splits.

    Attributes:
        partition_: which samples each client owns; set by `prepare`.
        train: the training split on the device; set by `prepare`.
        test: the test split on the device; set by `prepare`.
    """

    partition_: Partition
    train: Resident
    test: Resident

    def __init__(
        self,
        dataset: Dataset,
        partition: Partitioner,
        *,
        batch_size: int = 32,
        eval_batch_size: int = 256,
        personal_test: PersonalTest = "match",
        train_fraction: float = 0.8,
        channels_last: bool = False,
        last_batch: LastBatch = "keep",
        chunks: int = 1,
        pool: Pool = "train",
        resident: Place = "auto",
    ) -> None:
        """Describe the data of a run; nothing is loaded yet.

        Args:
            dataset: the source of the samples.
            partition: how the training samples are dealt to clients.
            batch_size: samples of a training batch.
            eval_batch_size: samples of a batch in validation and test.
            personal_test: the test samples of a client: "match" takes test samples with its class
                proportions, shared between clients; "disjoint" likewise, each sample once; "random"
                takes an equal share of the test set, regardless of the training samples; "split"
                holds out a part of its own training samples; "labels" takes all test samples of its
                classes.
            train_fraction: the part used for training with personal_test: split.
            channels_last: give images in that memory format, faster for convolutions.
            last_batch: keep a smaller last batch of an epoch; drop it; or join it to the one before
                if it is a single sample, which BatchNorm cannot normalise.
            chunks: cut the samples of a client into this many random chunks, once; in round t it
                trains only on chunk t mod chunks.
            pool: what the partition deals to clients: the training set, or its union with the test
                set; this needs personal_test: split, and leaves no sample for a global test.
            resident: where the samples are: on the device; in the memory of the host, from where
                batches are copied; or mapped from a file of the cache, if the data set keeps one.
                auto takes the first that fits in half of the free memory.
        """
        super().__init__()
        check_personal_test(personal_test, train_fraction)
        found = f"union, whose test samples personal_test: {personal_test} tests on"
        fits = pool != "union" or personal_test == "split"
        require(fits, "data.pool", found, "set data.personal_test: split")
        self.dataset, self.partition = dataset, partition
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.personal_test, self.train_fraction = personal_test, train_fraction
        self.channels_last, self.chunks = channels_last, chunks
        self.last_batch: LastBatch = last_batch
        self.pool: Pool = pool
        self.resident: Place = resident
        for key in ("batch_size", "eval_batch_size", "chunks"):
            count = getattr(self, key)
            require(count >= 1, f"data.{key}", count, "give at least 1")
        self._prepared: tuple[int, int, torch.device] | None = None

    # Some data sets know these only after they are read.

    @property
    def task(self) -> Task:
        return self.dataset.task

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.dataset.classes

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.dataset.input_shape

    @property
    def num_classes(self) -> int:
        return self.dataset.num_classes

    @override
    def prepare_data(self) -> None:
        # Called on one rank. If it fails, so does `setup` on all ranks, and they exit together.
        with suppress(UserError):
            self.dataset.fetch()

    @override
    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        federation: Any = self.trainer.lightning_module
        logger = getattr(self.trainer, "run_logger", None)
        self.prepare(
            clients=federation.num_clients,
            seed=federation.seed,
            device=self.trainer.strategy.root_device,
            folder=logger.folder if logger is not None and logger.claimed else None,
        )

    @override
    def val_dataloader(self) -> Any:
        """The evaluation jobs that the federation assigns to this rank."""
        assert self.trainer is not None
        return self.trainer.lightning_module.evaluation_jobs()  # type: ignore[operator]

    @override
    def test_dataloader(self) -> Any:
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> Any:
        """The test batches of the client whose model predicts."""
        assert self.trainer is not None
        return self.trainer.lightning_module.prediction_batches()  # type: ignore[operator]

    def prepare(
        self, *, clients: int, seed: int, device: torch.device, folder: Path | None
    ) -> None:
        """Load the splits and draw the partition; a second call with equal values does nothing.

        Args:
            clients: number of clients.
            seed: names the draw of the partition.
            device: of the splits.
            folder: of the run. Its partition.npz is used if it was drawn from the same data in the
                same way. Nothing is written: the caller saves `partition_`.

        Raises:
            UserError: the data cannot be read, or not be dealt in this way.
        """
        if self._prepared == (clients, seed, device):
            return
        train, test = loaded(self.dataset)
        if self.pool == "union":
            train = train.and_then(test)
        self.partition_ = draw_partition(
            self.dataset,
            self.partition,
            clients=clients,
            seed=seed,
            test=self.personal_test,
            train_fraction=self.train_fraction,
            train=train,
            test_samples=test,
        )
        if folder is not None and (path := folder / "partition.npz").is_file():
            stored = Partition.load(path)
            if stored.meta == self.partition_.meta:
                self.partition_ = stored
        self._seed = seed
        self.reserve(0.0)
        how: dict[str, Any] = {"device": device, "place": self.resident, "last": self.channels_last}
        self.train = resident(train, self.dataset, train=True, **how)
        self.test = resident(test, self.dataset, train=False, **how)
        self._tokens = train.x if self.task == "masked_lm" else None
        self._union = torch.from_numpy(np.unique(self.partition_.train_index))
        self._prepared = (clients, seed, device)

    @property
    def augments(self) -> bool:
        """Whether training batches are augmented at random."""
        transform = self.dataset.transform
        return transform is not None and transform.is_random

    def reserve(self, hold_out: float) -> None:
        """Hold this share of every client's training samples out of its epochs, drawn once.

        Raises:
            UserError: a client would have no training sample.
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

    def epoch_sizes(self, client: int) -> range:
        """The possible sizes of a client's local epoch, which are those of its chunks."""
        return self._portions.sizes(client)

    def num_batches(self, client: int, t: int = 0) -> int:
        """Training batches of one local epoch in round t."""
        samples = self._portions.size(client, t)
        return len(batch_sizes(samples, self.batch_size, self.last_batch))

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

        Args:
            client: number of the client.
            order: draws the order.
            augment: draws crops, flips and erased rectangles; None for none.
            limit: at most this many batches.
            t: the round, which selects the chunk; -1, for an evaluation, selects the last one.
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

    def pack_batches(self, sessions: Sequence[Sequence[Plan]]) -> PackBatches:
        """The training batches of K sessions, of which each has plans of its own."""
        return PackBatches(self.train, sessions)

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
        """Batch i of the whole test set; it may be a view, so do not write to it."""
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
