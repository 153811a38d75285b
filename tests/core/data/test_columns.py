"""Samples of named columns, and targets of a regression."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightfed.data.partition.schemes import Dirichlet, Natural, Shards
from lightfed.data.torch_data import FromTorch
from lightfed.utils.errors import UserError
from tests.datasets.kit import INIT, prepared


class Rows(list[Any]):
    """A map-style data set."""


def sentences(count: int, *, seed: int = 0) -> Rows:
    """Token ids with the label of each, 2 to 6 long, and a topic."""
    draw = torch.Generator().manual_seed(seed)
    rows = Rows()
    for number in range(count):
        ids = torch.randint(1, 9, (2 + number % 5,), generator=draw)
        rows.append({"ids": ids, "labels": ids % 3, "topic": torch.tensor(10 * (number % 2))})
    return rows


class Pair(NamedTuple):
    x: Tensor
    weight: Tensor
    target: Tensor


def test_a_batch_of_dicts_is_as_long_as_its_longest_sample() -> None:
    train, test = sentences(20), sentences(5, seed=1)
    data: Any = prepared(FromTorch(train, test), batch_size=4)
    assert (data.task, data.dataset.classes, data.num_classes, data.input_shape) == (
        "columns", (), 0, ()
    )  # fmt: skip
    plan = data.train_plan(0, order=torch.Generator().manual_seed(0), augment=torch.Generator())
    ends = [0, 4, 8, 10]
    for batch, start, end in zip(data.batches(plan), ends[:-1], ends[1:], strict=True):
        assert list(batch) == ["ids", "labels", "topic"]
        own = [train[i] for i in plan.index[start:end]]
        most = max(len(row["ids"]) for row in own)
        assert batch["ids"].shape == batch["labels"].shape == (end - start, most)
        for i, row in enumerate(own):
            n = len(row["ids"])
            assert torch.equal(batch["ids"][i, :n], row["ids"])
            assert (batch["ids"][i, n:] == 0).all()
            assert (batch["labels"][i, n:] == -100).all()
            assert batch["topic"][i] == row["topic"]
    assert torch.equal(data.global_test_batch(0)["topic"], torch.tensor([0, 10, 0, 10, 0]))
    assert torch.equal(data.longest()["ids"], torch.stack([train[4]["ids"], train[9]["ids"]]))


def test_batches_have_the_form_of_samples() -> None:
    rows = Rows(Pair(torch.full((3,), float(i)), torch.tensor(i), torch.zeros(2)) for i in range(6))
    batch: Any = prepared(FromTorch(rows, Rows(rows[:2]))).global_test_batch(0)
    assert type(batch) is Pair
    assert (batch.x.shape, batch.weight.tolist()) == ((2, 3), [0, 1])
    tuples = TensorDataset(*(torch.arange(6.0) + i for i in range(3)))
    batch = prepared(FromTorch(tuples, TensorDataset(*tuples[:2]))).global_test_batch(0)
    assert type(batch) is tuple
    assert batch[2].tolist() == [2.0, 3.0]
    labelled = Rows((torch.arange(4), torch.arange(n)) for n in (2, 3, 4))
    batch = prepared(FromTorch(labelled, Rows(labelled[:2]))).global_test_batch(0)
    assert batch[1].tolist() == [[0, 1, 0], [0, 1, 2]]


def test_partitions_sort_by_a_column() -> None:
    dataset = FromTorch(sentences(20), sentences(10, seed=1), by="topic")
    data = prepared(dataset, Shards(per_client=1))
    assert data.dataset.classes == ("0", "10")
    assert sorted(data.partition_.train_counts.max(1).tolist()) == [10, 10]
    topics = {int(t) for batch in data.test_batches(0) for t in batch["topic"]}
    assert len(topics) == 1
    rows = Rows({"x": torch.zeros(2), "labels": i % 3} for i in range(12))
    named = FromTorch(rows, Rows(rows[:3]))
    assert prepared(named, Dirichlet(1.0)).dataset.classes == ("0", "1", "2")
    places = TensorDataset(torch.zeros(9, 2), torch.zeros(9), torch.arange(9) % 3)
    again = FromTorch(places, TensorDataset(*places[:3]), by=2, groups=[0, 1, 1] * 3)
    assert sorted(prepared(again, Natural()).num_samples(k) for k in range(2)) == [3, 6]
    assert again.classes == ("0", "1", "2")


def test_floats_are_targets_of_a_regression() -> None:
    x, y = torch.randn(12, 4), torch.arange(12.0)
    data = prepared(FromTorch(TensorDataset(x, y), TensorDataset(x[:4], y[:4])))
    assert (data.task, data.num_classes, data.dataset.classes) == ("regression", 1, ())
    got = data.global_test_batch(0)
    assert torch.equal(got[0], x[:4])
    assert torch.equal(got[1], y[:4])
    assert torch.equal(data.labels(0), torch.tensor([0]))
    mixed = prepared(FromTorch(Rows([(x[0], 0.5), (x[1], 2)]), Rows([(x[2], 1.0)])))
    assert sorted(mixed.train.y.tolist()) == [0.5, 2.0]
    both = TensorDataset(x, torch.stack((y, -y), 1))
    assert prepared(FromTorch(both, TensorDataset(*both[:4]))).num_classes == 2
    named = FromTorch(TensorDataset(x, y % 2), TensorDataset(x[:4], y[:4] % 2), classes=["a", "b"])
    assert prepared(named).task == "classification"


def test_the_digest_depends_on_all_columns() -> None:
    def digest(change: Callable[[Rows], None]) -> tuple[str, str]:
        rows = sentences(12)
        change(rows)
        return prepared(FromTorch(rows, sentences(4, seed=1))).contents

    one = digest(lambda rows: None)
    other = digest(lambda rows: rows[3]["labels"].fill_(1))
    assert one.form == other.form
    assert one.samples != other.samples


def refused(key: str, train: Any, test: Any = None, partition: Any = None, **named: Any) -> str:
    with pytest.raises(UserError) as error:
        prepared(FromTorch(train, Rows(train[:2]) if test is None else test, **named), partition)
    assert error.value.key == key
    assert "\n" not in error.value.line
    return str(error.value)


def test_columns_that_do_not_fit_are_refused() -> None:
    lacks = sentences(6)
    del lacks[3]["labels"]
    assert "sample 3" in refused(f"{INIT}.train", lacks)
    assert "labels" in refused(f"{INIT}.test", sentences(6), Rows(lacks[3:4]))
    wide = sentences(6)
    wide[2]["ids"] = torch.zeros(4, 2, dtype=torch.int64)
    assert "sample 2" in refused(f"{INIT}.train", wide)
    words = sentences(6)
    words[5]["topic"] = "sports"
    assert "sample 5" in refused(f"{INIT}.train", words)
    drawn = type("Drawn", (Rows,), {"__getitem__": lambda self, i: {"x": torch.rand(2)}})
    assert "read again" in refused(f"{INIT}.train", drawn(range(3)), sentences(3))
    assert "it has no columns" in refused(f"{INIT}.train", Rows([{}] * 3))
    refused("data.dataset", Rows([{"x": torch.tensor([1.0, float("nan")])}] * 3))


def test_settings_that_do_not_fit_columns_are_refused() -> None:
    assert "topic" in refused(f"{INIT}.by", sentences(6), by="kind")
    refused(f"{INIT}.by", sentences(6), by="labels")  # of sequences
    refused(f"{INIT}.by", Rows([(torch.zeros(2), 0)] * 4), by="labels")
    refused(f"{INIT}.train_transform", sentences(6), train_transform=torch.neg)
    floats = Rows([(torch.zeros(2), 0.5)] * 4)
    for rows in (sentences(6), floats):
        line = refused("data.partition", rows, partition=Dirichlet(1.0))
        assert "Dirichlet" in line
    refused(f"{INIT}.test", floats, Rows([(torch.zeros(2), 1)]))
