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
from lightfed.data.dataset import Dataset, Samples, Task
from lightfed.data.digests import Contents
from lightfed.data.partition.draw import Partition, PersonalTest, draw_partition
from lightfed.data.partition.schemes import Natural, Partitioner
from lightfed.data.partition.sorting import distinct
from lightfed.data.partition.unseen import check_unseen
from lightfed.data.tested_samples import TestedSamples, TestSplit
from lightfed.data.torch_data import FromTorch
from lightfed.utils.errors import UserError
from lightfed.utils.memory import trim_heap
from lightfed.utils.recorded import Recorded
from lightfed.utils.rng import numpy_generator

log = logging.getLogger(__name__)


class FederatedDataModule(Recorded, LightningDataModule):
    """A data set split among clients.

    Clients only exist as entries of the partition's flat arrays, and batches are gathered on
    demand, so that 100,000 clients need little memory. Every rank holds both splits.

    A client's samples are those of the partition without the hold-out, the share that no session
    trains on. They may be cut into chunks, of which a round uses one. Chunks and hold-outs are
    drawn by name when needed, and none is stored.

    Attributes:
        contents: Digests of what was loaded. This and all below exist after `prepare`.
        partition_: Which samples the clients own.
        train: The training samples.
        test: The test samples.
        tested: The samples that models are tested on: of `test`, and with `validation` also of the
            part of the training samples that clients keep for choices.
    """

    contents: Contents
    partition_: Partition
    train: Resident
    test: Resident
    tested: dict[TestSplit, TestedSamples]

    def __init__(
        self,
        dataset: Dataset,
        partition: Partitioner,
        *,
        batch_size: int = 32,
        eval_batch_size: int = 256,
        personal_test: PersonalTest = "auto",
        train_fraction: float = 0.8,
        validation: float = 0.0,
        unseen: float | list[str | int] | None = None,
        channels_last: bool | Literal["auto"] = "auto",
        last_batch: LastBatch = "keep",
        chunks: int = 1,
        resident: Place = "auto",
    ) -> None:
        """Describe the data of a run; nothing is loaded yet.

        Args:
            dataset: The source of the samples. A LightningDataModule, or anything else that
                `FromTorch` takes, is read by it.
            partition: How the training samples are split among clients.
            batch_size: Samples of a training batch.
            eval_batch_size: Samples of a batch in validation and test.
            personal_test: The test samples of a client: "match" takes test samples with its class
                proportions, shared between clients; "random" takes an equal share of the test set,
                regardless of the training samples; "split" holds out a part of its own training
                samples; "labels" takes all test samples of its classes; "all" takes the whole set;
                "owner" takes the test samples of its natural owners. "auto" is "owner" for a
                partition by owners (Natural) if every client has such samples, and else "match".
            train_fraction: The part used for training with personal_test: split.
            validation: The part of its training samples that a client keeps, class by class where
                possible, and does not train on. Every evaluation also tests on them, in columns
                that begin with validation/. If you choose learning rates, rounds or early stopping
                by these columns, test samples have no part in the choice.
            unseen: The clients that never train: their share, rounded up and drawn once, or a list
                of their numbers, or of the names of their owners where the data set knows them (a
                speaker, a writer). They keep their samples, and every evaluation tests the models
                on them too, in columns that begin with unseen.
            channels_last: Use that memory format for images. auto does so on a CPU, where
                convolutions are up to a third faster with it, for networks that normalize at least
                8 channels together and have no strided 1x1 convolution of fewer than 8 channels.
            last_batch: Keep a smaller last batch of an epoch; drop it; or join it to the one before
                if it is a single sample, which BatchNorm cannot normalize.
            chunks: Cut the samples of a client into this many random chunks, once; in round t it
                trains only on chunk t mod chunks.
            resident: Where the samples are: on the device; or on the host, from where batches are
                copied, in memory or mapped from a file of the cache, if the data set keeps one.
                auto takes the device if they fit in half of its free memory.

        Raises:
            UserError: If an argument is out of range.
        """
        super().__init__()
        self.dataset = dataset if isinstance(dataset, Dataset) else FromTorch(dataset)
        self.partition = partition
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.personal_test = personal_test
        self.train_fraction = train_fraction
        self.validation = validation
        self.unseen = unseen
        self.channels_last = channels_last
        self.last_batch: LastBatch = last_batch
        self.chunks = chunks
        self.resident: Place = resident
        self._check_arguments()

        # The number of clients, the seed and the device of the last `prepare`.
        self._prepared: tuple[int, int, torch.device] | None = None

    def _check_arguments(self) -> None:
        """Refuse arguments that a script, which no parser checks, may get wrong."""
        rules = get_args(PersonalTest)
        if self.personal_test not in rules:
            raise UserError(
                key="data.personal_test",
                found=repr(self.personal_test),
                fix=f"choose one of {', '.join(rules)}",
            )
        if not 0.0 < self.train_fraction < 1.0:
            raise UserError(
                key="data.train_fraction",
                found=f"{self.train_fraction}",
                fix="give a number between 0 and 1, as 0.8",
            )
        if not 0.0 <= self.validation < 1.0:
            raise UserError(
                key="data.validation",
                found=f"{self.validation}",
                fix="give a number from 0 to less than 1, as 0.1; 0 keeps no samples",
            )
        check_unseen(self.unseen or 0.0)
        for key in ("batch_size", "eval_batch_size", "chunks"):
            count = getattr(self, key)
            if count < 1:
                raise UserError(key=f"data.{key}", found=f"{count}", fix="give at least 1")

    # Some data sets know these three only after they are read.

    @property
    def task(self) -> Task:
        """What a model predicts."""
        return self.dataset.task

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample; () for named columns."""
        return self.dataset.input_shape

    @property
    def num_classes(self) -> int:
        """The size of a prediction, see `Dataset.num_classes`."""
        return self.dataset.num_classes

    def longest(self) -> Any:
        """Return a batch of the two longest training samples of named columns, on the CPU."""
        assert isinstance(self.train, ResidentColumns)
        return move_data_to_device(self.train.longest(), "cpu")

    @override
    def prepare_data(self) -> None:
        # Lightning calls this on one rank. If it fails, so does `setup` on all ranks, and they exit
        # together.
        with suppress(UserError):
            self.dataset.fetch()

    @property
    def _users_datamodule(self) -> LightningDataModule | None:
        """The data module that the samples come from, if they come from one."""
        datamodule: LightningDataModule | None = getattr(self.dataset, "datamodule", None)
        return datamodule

    @override
    def teardown(self, stage: str) -> None:
        """Tell the data module that the samples come from that the run is over."""
        if self._users_datamodule is not None:
            self._users_datamodule.teardown(stage)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Tell the data module that the samples come from that the run has failed."""
        if self._users_datamodule is not None:
            self._users_datamodule.on_exception(exception)

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
        """Return the evaluation jobs that the federation assigns to this rank."""
        assert self.trainer is not None
        federation: Any = self.trainer.lightning_module
        return federation.evaluation.jobs

    @override
    def test_dataloader(self) -> Any:
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> Any:
        """Return the test batches of the client whose model predicts, or of the server."""
        assert self.trainer is not None
        federation: Any = self.trainer.lightning_module
        client = federation.predicts
        if client is not None:
            return UserList(self.test_batches(client))
        return UserList([self.global_test_batch(i) for i in range(self.global_test_batches())])

    def prepare(self, *, clients: int, seed: int, device: torch.device) -> None:
        """Load the splits and draw the partition. A second call with equal values does nothing.

        Args:
            clients: The number of clients.
            seed: Names the draw of the partition.
            device: The device of batches.

        Raises:
            UserError: If the data cannot be read, or not be dealt in this way.
        """
        if self._prepared == (clients, seed, device):
            return

        train, test = loaded(self.dataset)
        self._warn_of_unused_settings()
        self.contents = Contents.of(train, test)
        self.partition_ = draw_partition(
            self.dataset,
            self.partition,
            clients=clients,
            seed=seed,
            test=self.personal_test,
            train_fraction=self.train_fraction,
            validation=self.validation,
            unseen=self.unseen or 0.0,
            train=train,
            test_samples=test,
        )
        trim_heap()  # of schemes that make an array for each client
        self._tell_of_owners(train, test)

        self.train = self._resident(train, device, train=True)
        self.test = self._resident(test, device, train=False)
        self._seed = seed
        self.tested = self._tested_samples()
        # The windows of tokens on the host, for the tokens that a client has.
        self._tokens = train.x if self.task == "masked_lm" else None
        # The training samples of all clients that train, each once.
        trained = self._of_seen(self.partition_.train_index, self.partition_.train_offsets)
        self._union = torch.from_numpy(distinct(trained, total=len(train)))
        self.reserve(0.0)
        self._prepared = (clients, seed, device)

    def _tested_samples(self) -> dict[TestSplit, TestedSamples]:
        """Return the samples of tests, in the order of `TEST_SPLITS`."""
        partition = self.partition_
        is_of_train = partition.meta["test_source"] == "train"
        tested: dict[TestSplit, TestedSamples] = {
            "test": TestedSamples(
                self.train if is_of_train else self.test,
                lambda client: self.partition_.test(client),
                self.test,
                None,
                batch_size=self.eval_batch_size,
            )
        }
        if partition.has_validation:
            self._warn_of_clients_without_validation()
            tested["validation"] = TestedSamples(
                self.train,
                lambda client: self.partition_.validation(client),
                self.train,
                np.sort(self._of_seen(partition.validation_index, partition.validation_offsets)),
                batch_size=self.eval_batch_size,
            )
        return tested

    def _tell_of_owners(self, train: Samples, test: Samples) -> None:
        """Say, on one rank, where the owners of test samples are not those of clients."""
        if self.trainer is not None and not self.trainer.is_global_zero:
            return
        partition = self.partition_
        is_of_owners = partition.meta["test"] == "owner"
        untested = int((np.diff(partition.test_offsets) == 0).sum())
        if is_of_owners and untested:
            log.warning(
                "data.personal_test: %d of %d clients have no test samples of their owners",
                untested,
                partition.clients,
            )

        have_owners = train.groups is not None and test.groups is not None
        asks_for_owners = self.personal_test == "auto" and isinstance(self.partition, Natural)
        if asks_for_owners and have_owners and not is_of_owners:
            log.warning(
                "data.personal_test: not every client has test samples of its owners, so all are "
                "tested on samples of their classes (match)"
            )

    def _of_seen(self, index: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the samples of those clients that can train, of an index of all clients."""
        unseen = self.partition_.unseen
        if not len(unseen):
            return index
        is_seen = np.ones(self.partition_.clients, dtype=bool)
        is_seen[unseen] = False
        return index[np.repeat(is_seen, np.diff(offsets))]

    def _warn_of_clients_without_validation(self) -> None:
        """Say, on one rank, how many clients have a single sample, which they train on."""
        if self.trainer is not None and not self.trainer.is_global_zero:
            return
        without = int((np.diff(self.partition_.validation_offsets) == 0).sum())
        if without:
            log.warning(
                "data.validation: %d of %d clients have a single training sample, "
                "and keep it for training",
                without,
                self.partition_.clients,
            )

    def _resident(self, samples: Samples, device: torch.device, *, train: bool) -> Resident:
        return resident(
            samples,
            self.dataset,
            device=device,
            place=self.resident,
            last=self.gives_channels_last(device),
            train=train,
        )

    def _warn_of_unused_settings(self) -> None:
        """Name the settings of a user's loaders that this run does not follow, on one rank."""
        if self.trainer is not None and not self.trainer.is_global_zero:
            return
        names = ("batch_size", "eval_batch_size", "last_batch")
        unused = self.dataset.unused_settings({name: getattr(self, name) for name in names})
        if unused:
            log.warning("data.dataset: ignored settings of its loaders: %s", ", ".join(unused))

    @override
    def __str__(self) -> str:
        name = f"{self.dataset.name}, divided by {type(self.partition).__name__}"
        if self._prepared is None:
            return name
        clients, _, _ = self._prepared
        return (
            f"{name} over {clients} clients: {len(self.train)} training samples, "
            f"{len(self.test)} test samples"
        )

    def gives_channels_last(self, device: torch.device) -> bool:
        """Return whether images on this device are in channels_last."""
        if self.channels_last != "auto":
            return self.channels_last
        are_images = len(self.dataset.input_shape) == 3
        return device.type == "cpu" and are_images

    @cached_property
    def augments(self) -> bool:
        """Whether training batches are transformed in another way than those of tests."""
        transform = self.dataset.transform
        return transform is not None and transform.augments

    def reserve(self, hold_out: float) -> None:
        """Hold this share of every client's training samples out of its epochs.

        It is at least one sample, unless the share is 0. The samples are drawn once.

        Raises:
            UserError: If a client would train on nothing.
        """
        num_owned = np.diff(self.partition_.train_offsets)
        num_trained = num_owned
        if hold_out:
            num_held = np.maximum(np.rint(hold_out * num_owned), 1).astype(np.int64)
            num_trained = num_owned - num_held

        client = int(num_trained.argmin())
        fewest = int(num_trained[client])
        if fewest <= 0:
            raise UserError(
                key="model.algorithm.init_args.hold_out",
                found=f"{hold_out} is all of what client {client} holds",
                fix="lower it, or deal more samples to every client",
            )
        smallest_chunk = fewest // self.chunks
        if smallest_chunk < 1:
            raise UserError(
                key="data.chunks",
                found=f"{self.chunks}, but client {client} holds {fewest} samples",
                fix=f"give at most {fewest}",
            )
        if self.last_batch == "drop" and smallest_chunk < self.batch_size:
            raise UserError(
                key="data.last_batch",
                found=(
                    f"drop, but client {client} holds {smallest_chunk} samples, less than a batch"
                ),
                fix="lower data.batch_size, or set data.last_batch to keep",
            )

        self._hold_out = hold_out
        self._num_trained = num_trained

    def num_samples(self, client: int) -> int:
        """Return the training samples of a client without the hold-out, n_k."""
        return int(self._num_trained[client])

    def num_held_out(self, client: int) -> int:
        """Return the training samples in the hold-out of a client."""
        return len(self.partition_.train(client)) - self.num_samples(client)

    def first_of_each_size(self, clients: slice) -> list[int]:
        """Return the first client with each number of training samples, ascending.

        Args:
            clients: The consecutive clients among which to look.
        """
        _, positions = np.unique(self._num_trained[clients], return_index=True)
        start = clients.start or 0
        return sorted((positions + start).tolist())

    def num_batches(self, client: int, t: int = 0) -> int:
        """Return the training batches of one local epoch in round t."""
        return len(self.batch_sizes(client, t))

    @property
    def largest_batch(self) -> int:
        """The samples of the largest training batch of any client."""
        largest_chunk = -(-int(self._num_trained.max(initial=1)) // self.chunks)
        if largest_chunk <= self.batch_size:
            return largest_chunk
        if self.last_batch == "join":
            # A single last sample may join a batch.
            return self.batch_size + 1
        return self.batch_size

    def batch_sizes(self, client: int, t: int = 0) -> tuple[int, ...]:
        """Return the sizes of the training batches of one local epoch in round t."""
        samples, rest = divmod(int(self._num_trained[client]), self.chunks)
        # The first chunks have one sample more.
        if t % self.chunks < rest:
            samples += 1
        return batch_sizes(samples, self.batch_size, self.last_batch)

    def epoch_samples(self, client: int, t: int) -> np.ndarray:
        """Return the samples that a client trains on in round t, as indices."""
        samples = self.partition_.train(client)
        if self._hold_out:
            samples = np.delete(samples, self._held_out_positions(client, len(samples)))
        if self.chunks == 1:
            return samples
        order = numpy_generator(self._seed, "chunks", client=client).permutation(len(samples))
        return samples[np.array_split(order, self.chunks)[t % self.chunks]]

    def _held_out_positions(self, client: int, num_owned: int) -> np.ndarray:
        """Return the positions of the hold-out among a client's samples, ascending.

        They are the same in all rounds.
        """
        order = numpy_generator(self._seed, "hold-out", client=client).permutation(num_owned)
        num_held = num_owned - self.num_samples(client)
        return np.sort(order[:num_held])

    def held_out_batches(self, client: int) -> Iterator[Batch]:
        """Yield the hold-out of a client in a fixed order, not augmented."""
        samples = self.partition_.train(client)
        held_out = samples[self._held_out_positions(client, len(samples))]
        return self.train.batches(self.train.plan(held_out, batch_size=self.batch_size))

    def client_plan(self, client: int, batch_size: int) -> Plan:
        """Return a pass over a client's training samples in a fixed order, not augmented.

        A single last sample joins the batch before it, because batch statistics need two.
        """
        samples = self.partition_.train(client)
        return self.train.plan(samples, batch_size=batch_size, last_batch="join")

    def labels(self, client: int) -> Tensor:
        """Return the classes, or tokens, that a client trains on: int64, ascending, on the CPU.

        In a regression they are all outputs, and with named columns there are none.
        """
        if self.task in ("regression", "columns"):
            return torch.arange(self.num_classes)
        if self._tokens is None:
            return torch.from_numpy(self.partition_.labels(client))

        samples = torch.from_numpy(self.partition_.train(client))
        tokens = self._tokens.index_select(0, samples)
        return torch.bincount(tokens.flatten()).nonzero().squeeze(1)

    def train_plan(
        self,
        client: int,
        *,
        order: torch.Generator,
        augment: torch.Generator | None,
        limit: int | None = None,
        t: int = 0,
    ) -> Plan:
        """Return one pass over the samples that a client trains on in a round.

        Args:
            client: The client.
            order: Draws the order.
            augment: Draws crops, flips and erased rectangles; None for none.
            limit: The largest number of batches; None for all.
            t: The round, which selects the chunk; -1, for an evaluation, selects the last one.
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
        """Yield the training batches of a plan."""
        return self.train.batches(plan)

    def test_batches(self, client: int) -> Iterator[Batch]:
        """Yield the test samples of a client in a fixed order; no batch if it has none."""
        return self.tested["test"].batches(client)

    def test_index(self, client: int) -> np.ndarray:
        """Return the test samples of a client, or of the whole test set for -1, as indices."""
        return self.tested["test"].index(client)

    def global_test_batches(self) -> int:
        """Return the number of batches of the whole test set."""
        return self.tested["test"].num_whole_batches

    def global_test_batch(self, i: int) -> Batch:
        """Return batch i of the whole test set."""
        return self.tested["test"].whole_batch(i)

    def train_batches(self, batch_size: int) -> int:
        """Return the number of batches of the training samples of all seen clients together.

        A single last sample is left out, unless it is the only one: these batches are for batch
        statistics, which need two.
        """
        num_whole, rest = divmod(len(self._union), batch_size)
        is_only_sample = rest == 1 and num_whole == 0
        if rest > 1 or is_only_sample:
            return num_whole + 1
        return num_whole

    def train_batch(self, i: int, batch_size: int) -> Batch:
        """Return batch i of the training samples of all seen clients, each once, not augmented."""
        return self.train.batch(self._union[i * batch_size : (i + 1) * batch_size])
