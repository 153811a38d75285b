from collections.abc import Iterator
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


def counted(scheme: Partitioner | None = None, **given: Any) -> FederatedDataModule:
    return prepared(Counted(), scheme, clients=6, **given)


def epoch(data: FederatedDataModule, client: int, *, seed: int = 0) -> Iterator[Batch]:
    order, augment = (torch.Generator().manual_seed(seed + i) for i in range(2))
    return data.batches(data.train_plan(client, order=order, augment=augment))


def numbers(batches: Any) -> list[int]:
    return [int(value) for x, _ in batches for value in x[:, 0]]


def test_an_epoch_is_the_clients_samples_in_random_order() -> None:
    data = counted(batch_size=8)
    seen: list[int] = []
    for client in range(6):
        batches = list(epoch(data, client, seed=client))
        own = data.partition_.train(client).tolist()
        assert sorted(numbers(batches)) == own
        assert numbers(batches) != own
        assert all(torch.equal(y, x[:, 0].long() % 4) for x, y in batches)
        assert data.num_samples(client) == len(own)
        assert data.num_batches(client) == len(batches) == -(-len(own) // 8)
        seen += own
    assert sorted(seen) == list(range(100))


def test_labels_are_those_of_the_training_samples() -> None:
    data = counted(Classes(2))
    for client in range(6):
        own = torch.from_numpy(data.partition_.train(client)) % 4
        assert torch.equal(data.labels(client), own.unique().long())
        assert data.labels(client).dtype == torch.int64
    assert data.num_classes == 4
    assert data.input_shape == (1,)


def test_a_client_is_tested_on_its_test_samples() -> None:
    data = counted(eval_batch_size=3, personal_test="random")
    for client in range(6):
        batches = list(data.test_batches(client))
        assert numbers(batches) == data.partition_.test(client).tolist()
        assert max(len(y) for _, y in batches) <= 3
    assert sorted(numbers(b for k in range(6) for b in data.test_batches(k))) == list(range(40))


def test_a_split_client_is_tested_on_training_samples() -> None:
    data = counted(personal_test="split", train_fraction=0.5)
    for client in range(6):
        tested = set(numbers(data.test_batches(client)))
        trained = set(numbers(epoch(data, client)))
        assert not tested & trained
        assert tested == set(data.partition_.test(client).tolist())
        assert max(tested | trained) >= 40  # beyond the test set


def test_the_whole_test_set_in_batches() -> None:
    data = counted(eval_batch_size=16)
    assert data.global_test_batches() == 3
    batches = [data.global_test_batch(i) for i in range(3)]
    assert numbers(batches) == list(range(40))
    assert torch.equal(torch.cat([y for _, y in batches]), torch.arange(40) % 4)


def test_the_training_samples_of_all_clients_each_once() -> None:
    data = counted()
    # A single last sample is left out, but never the only batch.
    sizes = {30: 4, 33: 3, 99: 1, 98: 2, 1000: 1}
    assert [data.train_batches(size) for size in sizes] == list(sizes.values())
    assert numbers(data.train_batch(i, 30) for i in range(4)) == list(range(100))
    shared = counted(Diversity(2, 40))
    union = np.unique(shared.partition_.train_index).tolist()
    assert len(union) < shared.partition_.train_offsets[-1]
    size = 7 if len(union) % 7 != 1 else 6  # a lone last sample would be left out
    assert numbers(shared.train_batch(i, size) for i in range(shared.train_batches(size))) == union
    split = counted(personal_test="split")
    tested = set(split.partition_.test_index.tolist())
    batches = (split.train_batch(i, 30) for i in range(split.train_batches(30)))
    assert not tested & set(numbers(batches))


@pytest.mark.parametrize("preset", ["heterofl", "pfedmoe"])
def test_only_training_batches_are_augmented(preset: Any, tmp_path: Path) -> None:
    tiny.cifar10(tmp_path)
    dataset = CIFAR10(str(tmp_path), verify_checksums=False, preset=preset)
    data = prepared(dataset, clients=4, channels_last=True, batch_size=50)
    without = CIFAR10(str(tmp_path), verify_checksums=False, preset=preset, augment=False)
    plain_data = prepared(without, clients=4, batch_size=50)
    ((x, y),) = epoch(data, 1)
    ((plain, plain_y),) = epoch(plain_data, 1)
    assert x.shape == (50, 3, 32, 32)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, plain_y)
    assert not torch.equal(x, plain)
    ((again, _),) = epoch(data, 1)
    assert torch.equal(again, x)
    for ours, theirs in (
        (data.train_batch(0, 64), plain_data.train_batch(0, 64)),
        (data.global_test_batch(0), plain_data.global_test_batch(0)),
        (next(data.test_batches(2)), next(plain_data.test_batches(2))),
    ):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
        assert ours[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("given", "last"), [("auto", True), (True, True), (False, False)])
def test_images_for_a_cpu_are_in_channels_last(given: Any, last: bool) -> None:
    pairs = (TensorDataset(torch.randn(8, 3, 6, 6), torch.arange(8) % 2) for _ in range(2))
    data = prepared(FromTorch(*pairs), channels_last=given)
    x, _ = data.train_batch(0, 4)
    assert x.is_contiguous(memory_format=torch.channels_last) == last
    if given == "auto":
        assert not data.gives_channels_last(torch.device("cuda"))


def test_preparing_twice_loads_once() -> None:
    dataset = Counted()
    data = prepared(dataset, clients=6)
    before = data.partition_
    data.prepare(clients=6, seed=0, device=CPU)
    assert data.partition_ is before
    assert dataset.loads == 2
    data.prepare(clients=6, seed=1, device=CPU)
    assert data.partition_.digest != before.digest


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("batch_size", {"batch_size": 0}),
        ("chunks", {"chunks": 0}),
        ("eval_batch_size", {"eval_batch_size": -1}),
        ("train_fraction", {"train_fraction": 0.0}),
        ("personal_test", {"personal_test": "none"}),
    ],
)
def test_a_bad_argument_is_named(key: str, given: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        FederatedDataModule(Counted(), Iid(), **given)
    assert error.value.key == f"data.{key}"


def test_many_clients_need_little_memory() -> None:
    data = prepared(Counted(train=40_000, test=1000), clients=20_000)
    partition = data.partition_
    assert partition.clients == 20_000
    fields = vars(partition).values()
    arrays = [value.nbytes for value in fields if isinstance(value, np.ndarray)]
    indices = partition.train_index.nbytes + partition.test_index.nbytes
    assert sum(arrays) - indices < 100 * 20_000  # bytes; the rest of the module keeps no client
    assert all(
        len(vars(data)[name]) < 20
        for name in vars(data)
        if isinstance(vars(data)[name], (list, dict))
    )
    assert numbers(epoch(data, 19_999))
