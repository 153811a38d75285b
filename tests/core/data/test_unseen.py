"""Which clients never train: by a share, by number, by the name of their owner."""

from typing import Any

import numpy as np
import pytest
import torch

from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.partition.schemes import Iid, Natural
from lightfed.datasets.speech import Tones
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator
from tests.small import random_data

CPU = torch.device("cpu")
SIZES = (40, 21, 9, 12, 15)


def prepared(unseen: Any, *, seed: int = 3, **settings: Any) -> FederatedDataModule:
    data = random_data(SIZES, unseen=unseen, **settings)
    data.prepare(clients=len(SIZES), seed=seed, device=CPU)
    return data


def spoken(unseen: Any, *, clients: int = 4, partition: Any = None) -> FederatedDataModule:
    tones = Tones(words=4, clips=80, speakers=5)  # the fifth only tests
    data = FederatedDataModule(tones, partition or Natural(), unseen=unseen)
    data.prepare(clients=clients, seed=0, device=CPU)
    return data


def test_a_share_is_drawn_by_its_name_and_rounded_up() -> None:
    partition = prepared(0.3).partition_
    rng = numpy_generator(3, "unseen")
    assert partition.unseen.tolist() == sorted(rng.choice(5, 2, replace=False, shuffle=False))
    assert sorted([*partition.seen, *partition.unseen]) == [0, 1, 2, 3, 4]

    draws = {tuple(prepared(0.3, seed=seed).partition_.unseen.tolist()) for seed in range(8)}
    assert len(draws) > 1


def test_samples_do_not_depend_on_it() -> None:
    without = prepared(0.0, validation=0.2).partition_
    with_unseen = prepared([1, 4], validation=0.2).partition_
    for client in range(len(SIZES)):
        for samples in ("train", "test", "validation"):
            expected = getattr(without, samples)(client)
            assert np.array_equal(getattr(with_unseen, samples)(client), expected)


@pytest.mark.parametrize("nobody", [None, 0, 0.0, []])
def test_nobody_unseen_is_the_partition_without_the_setting(nobody: Any) -> None:
    data = random_data(SIZES)
    data.prepare(clients=len(SIZES), seed=3, device=CPU)
    partition = prepared(nobody).partition_
    assert partition.digest == data.partition_.digest
    assert partition.meta == data.partition_.meta
    assert partition.table() == data.partition_.table()
    assert partition.numbers() == data.partition_.numbers()


def test_who_is_unseen_is_part_of_the_partition() -> None:
    partition = prepared([1, 4]).partition_
    assert partition.digest != prepared([1, 3]).partition_.digest
    assert "of which 2 never train" in partition.table()
    assert partition.numbers()["unseen"] == [1, 4]


def test_samples_of_all_together_are_those_of_clients_that_train() -> None:
    data = prepared([0, 2], validation=0.25)
    union = [data.train_batch(i, 16)[1] for i in range(data.train_batches(16))]
    assert sum(map(len, union)) == sum(map(data.num_samples, (1, 3, 4)))

    tested = data.tested["validation"]
    together = [tested.whole_batch(i)[0] for i in range(tested.num_whole_batches)]
    of_each = [x for client in (1, 3, 4) for x, _ in tested.batches(client)]
    assert sorted(torch.cat(together).tolist()) == sorted(torch.cat(of_each).tolist())


def test_owners_are_named() -> None:
    data = spoken(["speaker 2", 0])
    assert data.partition_.unseen.tolist() == [0, 2]
    assert data.train.y is not None


WRONG = {
    "-0.1": (-0.1, r"data\.unseen: -0.1; give a share from 0 to less than 1"),
    "1.0": (1.0, r"data\.unseen: 1.0; give a share"),
    "nan": (float("nan"), r"data\.unseen: nan; give a share"),
    "text": ("speaker 1", r"data\.unseen: 'speaker 1'; give a share, or a list"),
    "a number that is none": ([0.5], r"data\.unseen: 0.5; give a share, or a list"),
    "twice": ([1, 1], r"data\.unseen: 1 twice; name every client once"),
    "all but none": (0.9, r"data\.unseen: 0.9, which leaves none of 5 clients to train"),
    "all": ([0, 1, 2, 3, 4], r"data\.unseen: .* leaves none of 5 clients to train"),
    "unknown": ([5], r"data\.unseen: client 5 of 5; give 0 to 4"),
    "owner": (["ann"], r"data\.unseen: 'ann', and the data set knows no names of owners"),
}


@pytest.mark.parametrize(("unseen", "line"), WRONG.values(), ids=WRONG)
def test_what_no_client_can_be_is_refused(unseen: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        prepared(unseen)


def test_unknown_owners_and_owners_of_a_part_are_refused() -> None:
    with pytest.raises(UserError, match="unknown owner 'ann'; its owners are speaker 0, speaker 1"):
        spoken(["ann"])
    with pytest.raises(UserError, match="owner 'speaker 4', who has no training samples"):
        spoken(["speaker 4"])
    with pytest.raises(UserError, match="owner 'speaker 1', and clients have samples of several"):
        spoken(["speaker 1"], clients=2)
    with pytest.raises(UserError, match="owner 'speaker 1', and clients have samples of several"):
        spoken(["speaker 1"], partition=Iid())
    with pytest.raises(UserError, match=r"\[0, 'speaker 0'\], which has a client twice"):
        spoken([0, "speaker 0"])
