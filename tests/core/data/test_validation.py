"""The part of its training samples that a client keeps for choices."""

import logging

import numpy as np
import pytest
import torch

from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.partition.draw import Partition
from lightfed.utils.errors import UserError
from tests.small import data_of, random_data

CPU = torch.device("cpu")
SIZES = (40, 21, 9, 2)


def prepared(validation: float, **settings: object) -> FederatedDataModule:
    data = random_data(SIZES, validation=validation, **settings)
    data.prepare(clients=len(SIZES), seed=3, device=CPU)
    return data


def partition(validation: float) -> Partition:
    return prepared(validation).partition_


def test_a_client_keeps_a_share_of_every_class() -> None:
    whole = partition(0.0)
    cut = partition(0.25)
    data = prepared(0.25)
    labels = data.train.y.numpy()
    for client, size in enumerate(SIZES):
        kept = cut.validation(client)
        trained = cut.train(client)
        assert sorted([*kept, *trained]) == whole.train(client).tolist()
        assert len(kept) == max(1, round(0.25 * size))
        assert data.num_samples(client) == len(trained)

        of_class = np.bincount(labels[kept], minlength=3)
        held_of_class = np.bincount(labels[whole.train(client)], minlength=3)
        # Within a sample of the class's share.
        assert (np.abs(of_class - 0.25 * held_of_class) <= 1).all()
        assert (
            cut.train_counts[client].tolist() == np.bincount(labels[trained], minlength=3).tolist()
        )


def test_validation_changes_no_test_sample() -> None:
    without = partition(0.0)
    cut = partition(0.25)
    assert np.array_equal(without.test_index, cut.test_index)
    assert np.array_equal(without.test_offsets, cut.test_offsets)


def test_without_validation_nothing_is_drawn_or_written() -> None:
    data = random_data(SIZES)
    data.prepare(clients=len(SIZES), seed=3, device=CPU)
    assert partition(0.0).digest == data.partition_.digest
    assert "validation" not in data.partition_.meta
    assert [*data.tested] == ["test"]


def test_no_pass_over_training_samples_has_one_of_validation() -> None:
    data = random_data((40, 21, 9), validation=0.25, chunks=2)
    data.prepare(clients=3, seed=3, device=CPU)
    for client in range(3):
        kept = set(data.partition_.validation(client).tolist())
        passes = [data.epoch_samples(client, t) for t in range(2)]
        passes.append(np.asarray(data.client_plan(client, 8).index))
        assert not kept & set(np.concatenate(passes).tolist())
    union = [data.train_batch(i, 16)[1] for i in range(data.train_batches(16))]
    assert sum(map(len, union)) == sum(map(data.num_samples, range(3)))


def test_samples_of_all_clients_together_are_those_of_each() -> None:
    data = prepared(0.25, eval_batch_size=4)
    tested = data.tested["validation"]
    together = [tested.whole_batch(i)[0] for i in range(tested.num_whole_batches)]
    of_each = [x for client in range(len(SIZES)) for x, _ in tested.batches(client)]
    assert sorted(torch.cat(together).tolist()) == sorted(torch.cat(of_each).tolist())
    assert max(map(len, together)) == 4


def test_a_client_with_one_sample_trains_on_it_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = random_data((5, 1, 1), validation=0.2)
    with caplog.at_level(logging.WARNING):
        data.prepare(clients=3, seed=0, device=CPU)
    assert [len(data.partition_.validation(client)) for client in range(3)] == [1, 0, 0]
    assert "data.validation: 2 of 3 clients have a single training sample" in caplog.text


def test_clients_of_which_none_can_keep_a_sample_are_refused() -> None:
    data = random_data((1, 1, 1), validation=0.2)
    with pytest.raises(UserError) as refused:
        data.prepare(clients=3, seed=0, device=CPU)
    assert refused.value.line == (
        "data.validation: 0.2, and no client has more than one training sample; "
        "set it to 0, or give clients more samples"
    )


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(UserError, match=r"data\.validation: .*give a number from 0"):
        random_data(SIZES, validation=share)


def test_samples_that_two_clients_hold_are_refused() -> None:
    x = torch.randn(6, 4)
    data = data_of(x, torch.arange(6) % 3, [[0, 1, 2, 3], [3, 4, 5]], validation=0.2)
    with pytest.raises(UserError, match=r"data\.validation: not 0, and .* gives 1 samples"):
        data.prepare(clients=2, seed=0, device=CPU)


def test_the_table_counts_validation_samples() -> None:
    cut = partition(0.25)
    assert "validation" in cut.table().splitlines()[1]
    assert "validation" not in partition(0.0).table()
    assert [row["validation"] for row in cut.numbers()["clients"]] == [10, 5, 2, 1]
