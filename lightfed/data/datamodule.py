"""The data of a run: both splits on the device, the partition, and the batches of each client."""

from collections import UserList
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from typing_extensions import override

from lightfed.data.batches import LastBatch, Place, resident
from lightfed.data.checks import loaded
from lightfed.data.client_batches import ClientBatches
from lightfed.data.datasets.dataset import Dataset, Task
from lightfed.data.datasets.torch_data import FromTorch
from lightfed.data.digests import Contents
from lightfed.data.partition import draw
from lightfed.utils.errors import UserError, require
from lightfed.utils.memory import trim_heap
from lightfed.utils.recorded import Recorded

Pool = Literal["train", "union"]


class FederatedDataModule(Recorded, ClientBatches, LightningDataModule):
    """A data set divided over clients.

    Clients only exist as entries of the partition's flat arrays, and batches are gathered on
    demand, so that 100,000 clients need little memory. Every rank holds both splits.

    Its batches, those of `ClientBatches`, are there after `prepare`.

    Attributes:
        contents: digests of what was loaded.
    """

    contents: Contents

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
        pool: Pool = "train",
        resident: Place = "auto",
    ) -> None:
        """Describe the data of a run; nothing is loaded yet.

        Args:
            dataset: the source of the samples; of a LightningDataModule, as by `FromTorch`.
            partition: how the training samples are dealt to clients.
            batch_size: samples of a training batch.
            eval_batch_size: samples of a batch in validation and test.
            personal_test: the test samples of a client: "match" takes test samples with its class
                proportions, shared between clients; "disjoint" likewise, each sample once; "random"
                takes an equal share of the test set, regardless of the training samples; "split"
                holds out a part of its own training samples; "labels" takes all test samples of its
                classes.
            train_fraction: the part used for training with personal_test: split.
            channels_last: give images in that memory format. auto does on a CPU, whose convolutions
                are up to a third faster with it, for networks that normalise no fewer than 8
                channels together and have no strided 1x1 convolution of fewer than 8 channels, on
                which torch may crash.
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
        draw.check_personal_test(personal_test, train_fraction)
        found = f"union, whose test samples personal_test: {personal_test} tests on"
        fits = pool != "union" or personal_test == "split"
        require(fits, "data.pool", found, "set data.personal_test: split")
        self.dataset = dataset if isinstance(dataset, Dataset) else FromTorch(dataset)
        self.partition = partition
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
        contents = Contents.of(train, test)
        if self.pool == "union":
            train = train.and_then(test)
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
        if folder is not None and (path := folder / "partition.npz").is_file():
            stored = draw.Partition.load(path)
            partition = stored if stored.meta == partition.meta else partition
        classes = len(self.dataset.classes)
        self.contents = contents.dealt(self.partition, train, clients=clients, classes=classes)
        trim_heap()  # of schemes that make an array for each client
        last = self.gives_channels_last(device)
        how: dict[str, Any] = {"device": device, "place": self.resident, "last": last}
        self.set_data(
            partition,
            resident(train, self.dataset, train=True, **how),
            resident(test, self.dataset, train=False, **how),
            tokens=train.x if self.task == "masked_lm" else None,
            seed=seed,
        )
        self._prepared = (clients, seed, device)

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
