"""What a run gets from its data: the epochs, tests and labels of clients, and the whole sets."""

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lightfed.data.batches import Batch
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.dataset import Dataset, Samples, Split, Transform
from lightfed.data.partition.schemes import Classes, Diversity, Iid, Partitioner
from lightfed.data.torch_data import FromTorch
from lightfed.datasets.vision import CIFAR10
from lightfed.utils.errors import UserError
from tests.datasets import tiny
from tests.datasets.kit import prepared
from tests.small import CPU


class Counted(Dataset):
    """Sample i of a split is the number i, which identifies the samples of a batch."""

    classes = tuple("abcd")
    input_shape = (1,)

    def __init__(self, *, train: int = 100, test: int = 40) -> None:
        self.sizes = {"train": train, "test": test}
        self.loads = 0

    @property
    def transform(self) -> Transform:
        return Transform((0.0,), (1.0,))

    def load(self, split: Split) -> Samples:
        self.loads += 1
        number = torch.arange(self.sizes[split])
        return Samples(x=number.float().unsqueeze(1), y=number % 4)


def counted(scheme: Partitioner | None = None, **settings: Any) -> FederatedDataModule:
    return prepared(Counted(), scheme, clients=6, **settings)


def epoch(data: FederatedDataModule, client: int, *, seed: int = 0) -> Iterator[Batch]:
    """Yield the batches of one local epoch."""
    order = torch.Generator().manual_seed(seed)
    augment = torch.Generator().manual_seed(seed + 1)
    return data.batches(data.train_plan(client, order=order, augment=augment))


def numbers(batches: Any) -> list[int]:
    """Return which samples are in some batches."""
    return [int(value) for x, _ in batches for value in x[:, 0]]


def test_an_epoch_is_the_clients_samples_in_random_order() -> None:
    data = counted(batch_size=8)
    samples_of_all: list[int] = []
    for client in range(6):
        batches = list(epoch(data, client, seed=client))

        samples = data.partition_.train(client).tolist()
        assert sorted(numbers(batches)) == samples
        assert numbers(batches) != samples
        assert all(torch.equal(y, x[:, 0].long() % 4) for x, y in batches)

        assert data.num_samples(client) == len(samples)
        assert data.num_batches(client) == len(batches) == ceil(len(samples) / 8)
        samples_of_all += samples
    assert sorted(samples_of_all) == list(range(100))


def test_labels_are_those_of_the_training_samples() -> None:
    data = counted(Classes(2))
    for client in range(6):
        labels = torch.from_numpy(data.partition_.train(client)) % 4
        assert torch.equal(data.labels(client), labels.unique().long())
        assert data.labels(client).dtype == torch.int64
    assert data.num_classes == 4
    assert data.input_shape == (1,)


def test_a_client_is_tested_on_its_test_samples() -> None:
    data = counted(eval_batch_size=3, personal_test="random")
    tested: list[int] = []
    for client in range(6):
        batches = list(data.test_batches(client))
        assert numbers(batches) == data.partition_.test(client).tolist()
        assert max(len(y) for _, y in batches) <= 3
        tested += numbers(batches)
    assert sorted(tested) == list(range(40))


def test_a_split_client_is_tested_on_training_samples() -> None:
    data = counted(personal_test="split", train_fraction=0.5)
    for client in range(6):
        tested = set(numbers(data.test_batches(client)))
        trained = set(numbers(epoch(data, client)))
        assert not tested & trained
        assert tested == set(data.partition_.test(client).tolist())
        # The test set ends at 39: these samples are of the training set.
        assert max(tested | trained) >= 40


def test_the_whole_test_set_in_batches() -> None:
    data = counted(eval_batch_size=16)
    assert data.global_test_batches() == 3

    batches = [data.global_test_batch(i) for i in range(3)]
    assert numbers(batches) == list(range(40))
    labels = torch.cat([y for _, y in batches])
    assert torch.equal(labels, torch.arange(40) % 4)


def all_train_batches(data: FederatedDataModule, batch_size: int) -> list[Batch]:
    """Return the training samples of all clients, in batches."""
    return [data.train_batch(i, batch_size) for i in range(data.train_batches(batch_size))]


@pytest.mark.parametrize(("batch_size", "count"), [(30, 4), (33, 3), (99, 1), (98, 2), (1000, 1)])
def test_a_single_last_sample_is_left_out(batch_size: int, count: int) -> None:
    assert counted().train_batches(batch_size) == count


def test_a_single_sample_is_a_batch_if_it_is_the_only_one() -> None:
    data = prepared(Counted(train=1), clients=1)
    assert data.train_batches(30) == 1


def test_the_training_samples_of_all_clients_each_once() -> None:
    assert numbers(all_train_batches(counted(), 30)) == list(range(100))


def test_samples_of_several_clients_are_in_one_batch() -> None:
    data = counted(Diversity(2, 40))
    partition = data.partition_
    union = np.unique(partition.train_index).tolist()
    assert len(union) < len(partition.train_index)

    # A single last sample would be left out.
    batch_size = 7 if len(union) % 7 != 1 else 6
    assert numbers(all_train_batches(data, batch_size)) == union


def test_samples_that_clients_are_tested_on_are_in_no_batch_of_all() -> None:
    data = counted(personal_test="split")
    tested = set(data.partition_.test_index.tolist())
    assert not tested & set(numbers(all_train_batches(data, 30)))


@pytest.mark.parametrize("preset", ["heterofl", "pfedmoe"])
def test_only_training_batches_are_augmented(preset: Any, tmp_path: Path) -> None:
    tiny.cifar10(tmp_path)
    augmented = CIFAR10(str(tmp_path), verify_checksums=False, preset=preset)
    data = prepared(augmented, clients=4, channels_last=True, batch_size=50)
    plain = CIFAR10(str(tmp_path), verify_checksums=False, preset=preset, augment=False)
    plain_data = prepared(plain, clients=4, batch_size=50)

    ((x, y),) = epoch(data, 1)
    ((plain_x, plain_y),) = epoch(plain_data, 1)
    assert x.shape == (50, 3, 32, 32)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, plain_y)
    assert not torch.equal(x, plain_x)

    ((same_draws_x, _),) = epoch(data, 1)
    assert torch.equal(same_draws_x, x)

    for batch, plain_batch in (
        (data.train_batch(0, 64), plain_data.train_batch(0, 64)),
        (data.global_test_batch(0), plain_data.global_test_batch(0)),
        (next(data.test_batches(2)), next(plain_data.test_batches(2))),
    ):
        assert torch.equal(batch[0], plain_batch[0])
        assert torch.equal(batch[1], plain_batch[1])
        assert batch[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("setting", "is_last"), [("auto", True), (True, True), (False, False)])
def test_images_for_a_cpu_are_in_channels_last(setting: Any, is_last: bool) -> None:
    train = TensorDataset(torch.randn(8, 3, 6, 6), torch.arange(8) % 2)
    test = TensorDataset(torch.randn(8, 3, 6, 6), torch.arange(8) % 2)
    data = prepared(FromTorch(train, test), channels_last=setting)

    x, _ = data.train_batch(0, 4)
    assert x.is_contiguous(memory_format=torch.channels_last) == is_last
    if setting == "auto":
        assert not data.gives_channels_last(torch.device("cuda"))


def test_preparing_twice_loads_once() -> None:
    dataset = Counted()
    data = prepared(dataset, clients=6)
    before = data.partition_

    data.prepare(clients=6, seed=0, device=CPU)
    assert data.partition_ is before
    assert dataset.loads == 2  # of the two splits

    data.prepare(clients=6, seed=1, device=CPU)
    assert data.partition_.digest != before.digest


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("batch_size", {"batch_size": 0}),
        ("chunks", {"chunks": 0}),
        ("eval_batch_size", {"eval_batch_size": -1}),
        ("train_fraction", {"train_fraction": 0.0}),
        ("personal_test", {"personal_test": "none"}),
    ],
)
def test_a_bad_argument_is_named(key: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        FederatedDataModule(Counted(), Iid(), **settings)
    assert error.value.key == f"data.{key}"


def test_many_clients_need_little_memory() -> None:
    data = prepared(Counted(train=40_000, test=1000), clients=20_000)
    partition = data.partition_
    assert partition.clients == 20_000

    array_bytes = sum(v.nbytes for v in vars(partition).values() if isinstance(v, np.ndarray))
    index_bytes = partition.train_index.nbytes + partition.test_index.nbytes
    assert array_bytes - index_bytes < 100 * 20_000

    # Nothing else of the module has an entry for each client.
    for value in vars(data).values():
        if isinstance(value, list | dict):
            assert len(value) < 20
    assert numbers(epoch(data, 19_999))
