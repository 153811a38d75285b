"""The data of a run: both splits on the device, who owns what, and the batches of each client."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from typing_extensions import override

from lightfed.data.datasets.dataset import Dataset, Samples, Task
from lightfed.data.partition.draw import (
    Partition,
    Partitioner,
    PersonalTest,
    check_personal_test,
    draw_partition,
)
from lightfed.data.portions import Portions
from lightfed.data.resident import (
    Batch,
    LastBatch,
    Plan,
    Resident,
    ResidentSplit,
    ResidentTokens,
    batch_sizes,
)
from lightfed.utils.errors import UserError

Pool = Literal["train", "union"]


class FederatedDataModule(LightningDataModule):
    """A data set divided over clients.

    Nothing is kept per client but the flat arrays of the partition; batches are gathered on demand,
    so that 100,000 clients are no burden. Every rank holds both splits.

    Attributes:
        partition_: who owns what; from `prepare` on.
        train: the training split on the device; from `prepare` on.
        test: the test split on the device; from `prepare` on.
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
    ) -> None:
        """Describe the data of a run; nothing is loaded yet.

        Args:
            dataset: where the samples come from.
            partition: how the training samples are dealt to clients.
            batch_size: samples of a training batch.
            eval_batch_size: samples of a batch in validation and test.
            personal_test: what a client is tested on: "match" takes test samples with its class
                proportions, shared between clients; "disjoint" likewise, each sample once; "random"
                takes an equal share of the test set, whatever the client trains on; "split" holds
                back a part of its own training samples; "labels" takes all test samples of its
                classes.
            train_fraction: the part that is trained on with personal_test: split.
            channels_last: give images in that memory format, faster for convolutions.
            last_batch: keep a smaller last batch of an epoch; drop it; or join it to the one before
                if it is a single sample, which BatchNorm cannot normalise.
            chunks: cut the samples of a client into so many chunks at random, once; in round t it
                trains on chunk t mod chunks alone.
            pool: what the partition deals to clients: the training set, or its union with the test
                set, for personal_test: split; no sample is left for a global test then.
        """
        super().__init__()
        counts = {"batch_size": batch_size, "eval_batch_size": eval_batch_size, "chunks": chunks}
        for key, value in counts.items():
            if value < 1:
                raise UserError(f"data.{key}", f"{value}", "give at least 1")
        check_personal_test(personal_test, train_fraction)
        if pool == "union" and personal_test != "split":
            found = f"union, whose test samples personal_test: {personal_test} tests on"
            raise UserError("data.pool", found, "set data.personal_test: split")
        self.dataset = dataset
        self.partition = partition
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.personal_test = personal_test
        self.train_fraction = train_fraction
        self.channels_last = channels_last
        self.last_batch: LastBatch = last_batch
        self.chunks = chunks
        self.pool: Pool = pool
        self._tokens: Tensor | None = None
        self._prepared: tuple[int, int, torch.device] | None = None

    @property
    def num_classes(self) -> int:
        return self.dataset.num_classes

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.dataset.classes

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.dataset.input_shape

    @property
    def task(self) -> Task:
        return self.dataset.task

    @override
    def prepare_data(self) -> None:
        # Called on one rank: where it fails, all ranks find out in `setup`, and leave together.
        with suppress(UserError):
            self.dataset.fetch()

    @override
    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        federation: Any = self.trainer.lightning_module
        self.prepare(
            clients=federation.num_clients,
            seed=federation.seed,
            device=self.trainer.strategy.root_device,
            folder=self._run_folder(),
        )

    def _run_folder(self) -> Path | None:
        """Where a resumed run keeps its partition."""
        logger = getattr(self.trainer, "run_logger", None)
        return logger.folder if logger is not None and logger.claimed else None

    @override
    def val_dataloader(self) -> Any:
        """The evaluation jobs of this rank; who evaluates what, the federation knows."""
        assert self.trainer is not None
        return self.trainer.lightning_module.evaluation_jobs()  # type: ignore[operator]

    @override
    def test_dataloader(self) -> Any:
        return self.val_dataloader()

    def prepare(
        self, *, clients: int, seed: int, device: torch.device, folder: Path | None
    ) -> None:
        """Load the splits and find out who owns what; nothing if that is done with these values.

        Args:
            clients: how many clients there are.
            seed: names the draw of the partition.
            device: where the splits go.
            folder: of the run. If it holds a partition.npz that was drawn from the same data in
                the same way, that one is used. Nothing is written: the caller saves `partition_`.

        Raises:
            UserError: the data cannot be read, or cannot be dealt in that way.
        """
        if self._prepared == (clients, seed, device):
            return
        train, test = self.dataset.load("train"), self.dataset.load("test")
        if self.pool == "union":
            train = train.and_then(test)
        self.partition_ = self._partition(train, test, clients=clients, seed=seed, folder=folder)
        self._seed = seed
        self.reserve(0.0)
        self.train = self._resident(train, device, train=True)
        self.test = self._resident(test, device, train=False)
        self._tokens = train.x if self.task == "masked_lm" else None
        self._union = torch.from_numpy(np.unique(self.partition_.train_index))
        self._prepared = (clients, seed, device)

    @property
    def augments(self) -> bool:
        """Whether training batches depend on draws."""
        transform = self.dataset.transform
        return transform is not None and transform.is_random

    def reserve(self, hold_out: float) -> None:
        """Take this share of every client's training samples out of its epochs, drawn once.

        Raises:
            UserError: a client would train on nothing.
        """
        portions = Portions(self.partition_, seed=self._seed, chunks=self.chunks, hold_out=hold_out)
        portions.check(batch_size=self.batch_size, last_batch=self.last_batch)
        self._portions = portions

    def num_samples(self, client: int) -> int:
        """Training samples of a client without those held out, n_k."""
        return self._portions.trained(client)

    def num_held_out(self, client: int) -> int:
        """Training samples of a client that are held out."""
        return len(self.partition_.train(client)) - self.num_samples(client)

    @property
    def skipped_samples(self) -> int:
        """Samples that `last_batch` leaves out, of all clients in one pass over their chunks."""
        return self._portions.skipped(batch_size=self.batch_size, last_batch=self.last_batch)

    def epoch_sizes(self, client: int) -> range:
        """Which numbers of samples a local epoch of a client may have: those of its chunks."""
        return self._portions.sizes(client)

    def num_batches(self, client: int, t: int = 0) -> int:
        """Training batches of one local epoch in round t."""
        samples = self._portions.size(client, t)
        return len(batch_sizes(samples, self.batch_size, self.last_batch))

    def held_out_batches(self, client: int) -> Iterator[Batch]:
        """What is held out of a client's training samples, in a fixed order, not augmented."""
        index = torch.from_numpy(self._portions.held_out(client))
        return self.train.epoch(index, batch_size=self.batch_size, generator=None, order=None)

    def client_batches(self, client: int, batch_size: int) -> Iterator[Batch]:
        """A client's training samples, each once, in a fixed order, not augmented.

        A lone last sample joins the batch before it: batch statistics need two.
        """
        index = torch.from_numpy(self.partition_.train(client))
        return self.train.epoch(
            index, batch_size=batch_size, generator=None, order=None, last_batch="join"
        )

    def labels(self, client: int) -> Tensor:
        """The classes, or the tokens, that a client trains on: int64, ascending, on the CPU."""
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
        """One pass over what a client trains on in a round, before its samples are gathered.

        Args:
            client: whose samples.
            order: draws the order.
            augment: draws crops, flips and what is erased; None for none.
            limit: at most this many batches.
            t: the round, which names the chunk; -1, an evaluation, takes the last one.
        """
        return self.train.plan(
            torch.from_numpy(self._portions.samples(client, t)),
            batch_size=self.batch_size,
            generator=augment,
            order=order,
            last_batch=self.last_batch,
            limit=limit,
        )

    def train_epoch(self, client: int, **how: Any) -> Iterator[Batch]:
        """The batches of a `train_plan`; takes its arguments."""
        return self.batches(self.train_plan(client, **how))

    def batches(self, plan: Plan) -> Iterator[Batch]:
        """The training batches of a plan."""
        return self.train.batches(plan)

    def side_by_side(self, plans: Sequence[Plan], batches: Sequence[int]) -> Batch:
        """One training batch of each of K plans, (K, B, ...); all of one size."""
        return self.train.side_by_side(plans, batches)

    def test_batches(self, client: int) -> Iterator[Batch]:
        """What a client is tested on, in a fixed order; nothing if it owns no test sample."""
        source = self.train if self.partition_.meta["test_source"] == "train" else self.test
        index = torch.from_numpy(self.partition_.test(client))
        return source.epoch(index, batch_size=self.eval_batch_size, generator=None, order=None)

    def global_test_batches(self) -> int:
        """How many batches the whole test set has."""
        return -(-len(self.test) // self.eval_batch_size)

    def global_test_batch(self, i: int) -> Batch:
        """Batch i of the whole test set; the samples may be views, so do not write into them."""
        return self.test.span(i * self.eval_batch_size, (i + 1) * self.eval_batch_size)

    def train_batches(self, batch_size: int) -> int:
        """How many batches the training samples of all clients together have.

        A lone last sample is left out: batch statistics, which these batches are for, need two.
        """
        whole, rest = divmod(len(self._union), batch_size)
        return whole + (rest > 1 or (rest == 1 and whole == 0))

    def train_batch(self, i: int, batch_size: int) -> Batch:
        """Batch i of the training samples of all clients, each sample once, not augmented."""
        return self.train.batch(self._union[i * batch_size : (i + 1) * batch_size])

    def _resident(self, samples: Samples, device: torch.device, *, train: bool) -> Resident:
        transform = self.dataset.transform
        if transform is None:
            return ResidentTokens(samples, device=device, windows=self.task == "masked_lm")
        return ResidentSplit(
            samples,
            transform,
            device=device,
            channels_last=self.channels_last,
            train=train,
        )

    def _partition(
        self, train: Samples, test: Samples, *, clients: int, seed: int, folder: Path | None
    ) -> Partition:
        """The stored partition if it is the one that would be drawn, else a new one."""
        drawn = draw_partition(
            self.dataset,
            self.partition,
            clients=clients,
            seed=seed,
            test=self.personal_test,
            train_fraction=self.train_fraction,
            train=train,
            test_samples=test,
        )
        path = None if folder is None else folder / "partition.npz"
        if path is None or not path.is_file():
            return drawn
        stored = Partition.load(path)
        return stored if stored.meta == drawn.meta else drawn
