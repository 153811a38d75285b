"""The data of a run: both splits on the device, the partition, and the batches of each client."""

import logging
from collections import UserList
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule
from torch import Tensor
from typing_extensions import override

from lightfed.data.batches import (
    Batch,
    LastBatch,
    Place,
    Plan,
    Resident,
    ResidentColumns,
    batch_sizes,
    resident,
)
from lightfed.data.checks import loaded
from lightfed.data.dataset import Dataset, Task
from lightfed.data.digests import Contents
from lightfed.data.partition import draw
from lightfed.data.torch_data import FromTorch
from lightfed.utils.errors import UserError, require
from lightfed.utils.memory import trim_heap
from lightfed.utils.recorded import Recorded
from lightfed.utils.rng import numpy_generator

log = logging.getLogger(__name__)


class FederatedDataModule(Recorded, LightningDataModule):
    """A data set divided over clients.

    Clients only exist as entries of the partition's flat arrays, and batches are gathered on
    demand, so that 100,000 clients need little memory. Every rank holds both splits.

    A round uses one of `chunks` of a client's samples outside the hold-out, the share that no
    session trains on. Chunks and hold-outs are drawn by name when needed, and none is stored.

    Attributes:
        contents: digests of what was loaded; as all below, it is there after `prepare`.
        partition_: which samples the clients own.
        train: the training samples.
        test: the test samples.
    """

    contents: Contents
    partition_: draw.Partition
    train: Resident
    test: Resident

    def __init__(
        self,
        dataset: Dataset,
        partition: draw.Partitioner,
        *,
        batch_size: int = 32,
        eval_batch_size: int = 256,
        personal_test: draw.PersonalTest = "match",
        train_fraction: float = 0.8,
        channels_last: bool | Literal["auto"] = "auto",
        last_batch: LastBatch = "keep",
        chunks: int = 1,
        resident: Place = "auto",
    ) -> None:
        """Describe the data of a run; nothing is loaded yet.

        Args:
            dataset: the source of the samples; of a LightningDataModule, as by `FromTorch`.
            partition: how the training samples are dealt to clients.
            batch_size: samples of a training batch.
            eval_batch_size: samples of a batch in validation and test.
            personal_test: the test samples of a client: "match" takes test samples with its class
                proportions, shared between clients; "random" takes an equal share of the test set,
                regardless of the training samples; "split" holds out a part of its own training
                samples; "labels" takes all test samples of its classes; "all" takes the whole set.
            train_fraction: the part used for training with personal_test: split.
            channels_last: give images in that memory format. auto does on a CPU, whose convolutions
                are up to a third faster with it, for networks that normalise no fewer than 8
                channels together and have no strided 1x1 convolution of fewer than 8 channels.
            last_batch: keep a smaller last batch of an epoch; drop it; or join it to the one before
                if it is a single sample, which BatchNorm cannot normalise.
            chunks: cut the samples of a client into this many random chunks, once; in round t it
                trains only on chunk t mod chunks.
            resident: where the samples are: on the device; or on the host, from where batches are
                copied, in memory or mapped from a file of the cache, if the data set keeps one.
                auto takes the device if they fit in half of its free memory.
        """
        super().__init__()
        known = get_args(draw.PersonalTest)
        fix = f"choose one of {', '.join(known)}"
        require(personal_test in known, "data.personal_test", repr(personal_test), fix)
        fix = "give a number between 0 and 1, as 0.8"
        require(0.0 < train_fraction < 1.0, "data.train_fraction", train_fraction, fix)
        self.dataset = dataset if isinstance(dataset, Dataset) else FromTorch(dataset)
        self.partition = partition
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.personal_test, self.train_fraction = personal_test, train_fraction
        self.channels_last, self.chunks = channels_last, chunks
        self.last_batch: LastBatch = last_batch
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
    def input_shape(self) -> tuple[int, ...]:
        return self.dataset.input_shape

    @property
    def num_classes(self) -> int:
        return self.dataset.num_classes

    def longest(self) -> Any:
        """A batch of the two longest training samples of named columns, on the CPU."""
        assert isinstance(self.train, ResidentColumns)
        return move_data_to_device(self.train.longest(), "cpu")

    @override
    def prepare_data(self) -> None:
        # Called on one rank. If it fails, so does `setup` on all ranks, and they exit together.
        with suppress(UserError):
            self.dataset.fetch()

    @override
    def teardown(self, stage: str) -> None:
        """The run is over: tell the data module that the samples come from."""
        given: Any = getattr(self.dataset, "datamodule", None)
        if given is not None:
            given.teardown(stage)

    @override
    def on_exception(self, exception: BaseException) -> None:
        given: Any = getattr(self.dataset, "datamodule", None)
        if given is not None:
            given.on_exception(exception)

    @override
    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        federation: Any = self.trainer.lightning_module
        self.prepare(
            clients=federation.num_clients,
            seed=federation.seed,
            device=self.trainer.strategy.root_device,
        )

    @override
    def val_dataloader(self) -> Any:
        """The evaluation jobs that the federation assigns to this rank."""
        assert self.trainer is not None
        federation: Any = self.trainer.lightning_module
        return federation.evaluation.jobs

    @override
    def test_dataloader(self) -> Any:
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> Any:
        """The test batches of the client whose model predicts, or of the server."""
        assert self.trainer is not None
        client: Any = self.trainer.lightning_module.predicts
        if client is not None:
            return UserList(self.test_batches(client))
        return UserList(map(self.global_test_batch, range(self.global_test_batches())))

    def prepare(self, *, clients: int, seed: int, device: torch.device) -> None:
        """Load the splits and draw the partition; a second call with equal values does nothing.

        Args:
            clients: number of clients.
            seed: names the draw of the partition.
            device: of the splits.

        Raises:
            UserError: the data cannot be read, or not be dealt in this way.
        """
        if self._prepared == (clients, seed, device):
            return
        train, test = loaded(self.dataset)
        self._warn_of_unused()
        self.contents = Contents.of(train, test)
        partition = draw.draw_partition(
            self.dataset,
            self.partition,
            clients=clients,
            seed=seed,
            test=self.personal_test,
            train_fraction=self.train_fraction,
            train=train,
            test_samples=test,
        )
        trim_heap()  # of schemes that make an array for each client
        last = self.gives_channels_last(device)
        how: dict[str, Any] = {"device": device, "place": self.resident, "last": last}
        self.partition_, self._seed = partition, seed
        self.train = resident(train, self.dataset, train=True, **how)
        self.test = resident(test, self.dataset, train=False, **how)
        # The split that the test samples of clients are in.
        self._tested = self.train if partition.meta["test_source"] == "train" else self.test
        self._tokens = train.x if self.task == "masked_lm" else None
        self._union = torch.from_numpy(np.unique(partition.train_index))
        self.reserve(0.0)
        self._prepared = (clients, seed, device)

    def _warn_of_unused(self) -> None:
        """Name the settings of a user's loaders that this run does not follow."""
        trainer = self.trainer
        if trainer is not None and not trainer.is_global_zero:
            return
        names = ("batch_size", "eval_batch_size", "last_batch")
        unused = self.dataset.unused_settings({name: getattr(self, name) for name in names})
        if unused:
            log.warning("data.dataset: its loaders say what does not hold: %s", ", ".join(unused))

    @override
    def __str__(self) -> str:
        name = f"{self.dataset.name}, divided by {type(self.partition).__name__}"
        if self._prepared is None:
            return name
        clients, *_ = self._prepared
        return (
            f"{name} over {clients} clients: {len(self.train)} training samples, "
            f"{len(self.test)} test samples"
        )

    def gives_channels_last(self, device: torch.device) -> bool:
        """Whether images on this device are in channels_last."""
        if self.channels_last != "auto":
            return self.channels_last
        shape = self.dataset.input_shape
        return device.type == "cpu" and len(shape) == 3

    @cached_property
    def augments(self) -> bool:
        """Whether training batches are transformed in another way than those of tests."""
        transform = self.dataset.transform
        return transform is not None and transform.augments

    def reserve(self, hold_out: float) -> None:
        """Hold this share of every client's training samples out of its epochs, drawn once.

        At least one sample, unless the share is 0. A UserError names a client that would train on
        nothing.
        """
        owned = np.diff(self.partition_.train_offsets)
        held = np.maximum(np.rint(hold_out * owned), 1).astype(np.int64) if hold_out else 0
        left = owned - held
        least = int(left.argmin())
        found = f"{hold_out} is all of what client {least} holds"
        fix = "lower it, or deal more samples to every client"
        require(left[least] > 0, "model.algorithm.init_args.hold_out", found, fix)
        smallest = int(left[least]) // self.chunks
        found = f"{self.chunks}, but client {least} holds {left[least]} samples"
        require(smallest >= 1, "data.chunks", found, f"give at most {left[least]}")
        found = f"drop, but client {least} holds {smallest} samples, less than a batch"
        fits = self.last_batch != "drop" or smallest >= self.batch_size
        require(fits, "data.last_batch", found, "lower data.batch_size, or set keep")
        self._hold_out, self._trained = hold_out, left

    def num_samples(self, client: int) -> int:
        """Training samples of a client without the hold-out, n_k."""
        return int(self._trained[client])

    def num_held_out(self, client: int) -> int:
        """Training samples in the hold-out of a client."""
        return len(self.partition_.train(client)) - self.num_samples(client)

    def first_of_each_size(self, clients: slice) -> list[int]:
        """Of consecutive clients, the first with each number of training samples, ascending."""
        _, first = np.unique(self._trained[clients], return_index=True)
        return sorted((first + (clients.start or 0)).tolist())

    def num_batches(self, client: int, t: int = 0) -> int:
        """Training batches of one local epoch in round t."""
        return len(self.batch_sizes(client, t))

    @property
    def largest_batch(self) -> int:
        """Samples of the largest training batch of any client."""
        most = -(-int(self._trained.max(initial=1)) // self.chunks)
        if most <= self.batch_size:
            return most
        # A single last sample may join a batch.
        return self.batch_size + (self.last_batch == "join")

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
        return np.sort(order[: owned - self.num_samples(client)])

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
        """The classes, or tokens, that a client trains on: int64, ascending, on the CPU.

        Of a regression all outputs, and of named columns none.
        """
        if self.task in ("regression", "columns"):
            return torch.arange(self.num_classes)
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
        start = i * self.eval_batch_size
        end = min(start + self.eval_batch_size, len(self.test))
        return self.test.batch(torch.arange(start, end))

    def train_batches(self, batch_size: int) -> int:
        """Number of batches of the training samples of all clients together.

        A single last sample is left out: batch statistics, which use these batches, need two.
        """
        whole, rest = divmod(len(self._union), batch_size)
        return whole + (rest > 1 or (rest == 1 and whole == 0))

    def train_batch(self, i: int, batch_size: int) -> Batch:
        """Batch i of the training samples of all clients, each sample once, not augmented."""
        return self.train.batch(self._union[i * batch_size : (i + 1) * batch_size])
