"""The samples of a client that are trained on, held out or skipped."""

from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightfed.data.datamodule import FederatedDataModule
from lightfed.utils.errors import UserError
from tests.datasets import kit
from tests.small import Given, Tensors

HOLD_OUT = "model.algorithm.init_args.hold_out"


def prepared(*sizes: int, seed: int = 0, **settings: Any) -> FederatedDataModule:
    """Return the data of clients of these sizes; sample i is the number i."""
    count = sum(sizes)
    x = torch.arange(float(count))[:, None]
    y = torch.arange(count) % 2
    bounds = np.cumsum([0, *sizes])
    parts = [range(start, end) for start, end in pairwise(bounds)]
    dataset = Tensors(x, y, classes=2, test=(x, y))
    return kit.prepared(dataset, Given(*parts), clients=len(sizes), seed=seed, **settings)


def trained(data: FederatedDataModule, client: int, t: int = 0, order: int = 0) -> list[int]:
    rng = torch.Generator().manual_seed(order)
    epoch = data.batches(data.train_plan(client, order=rng, augment=None, t=t))
    return [int(value) for x, _ in epoch for value in x[:, 0]]


def held(data: FederatedDataModule, client: int) -> list[int]:
    return [int(value) for x, _ in data.held_out_batches(client) for value in x[:, 0]]


@given(st.integers(2, 60), st.floats(0.01, 0.9), st.integers(1, 4))
def test_every_sample_is_held_out_or_in_one_chunk(owned: int, share: float, chunks: int) -> None:
    data = prepared(owned, 70, batch_size=5)
    data.chunks = chunks
    num_held = max(1, round(share * owned))
    if owned - num_held < chunks:
        with pytest.raises(UserError):
            data.reserve(share)
        return

    data.reserve(share)

    assert data.num_held_out(0) == len(held(data, 0)) == num_held
    assert data.num_samples(0) == owned - num_held
    samples: list[int] = []
    for t in range(chunks):
        chunk = trained(data, 0, t)
        assert sum(data.batch_sizes(0, t)) == len(chunk)
        assert data.num_batches(0, t) == ceil(len(chunk) / 5)
        samples += chunk
    assert sorted(held(data, 0) + samples) == list(range(owned))


def test_the_hold_out_is_drawn_once_by_name() -> None:
    data = prepared(40, 40)
    data.reserve(0.25)
    of_first_client = held(data, 0)
    assert held(data, 0) == of_first_client == sorted(of_first_client)
    assert set(trained(data, 0, 3, order=7)) == set(range(40)) - set(of_first_client)

    # Another client and another seed have other draws.
    assert held(data, 1) != [i + 40 for i in of_first_client]
    other_seed = prepared(40, 40, seed=1)
    other_seed.reserve(0.25)
    assert held(other_seed, 0) != of_first_client


def test_a_share_of_zero_holds_nothing_out() -> None:
    data = prepared(40, 40)
    data.reserve(0.25)
    data.reserve(0.0)
    assert sorted(trained(data, 0)) == list(range(40))
    assert data.num_held_out(0) == 0
    assert held(data, 0) == []


def test_hold_out_batches_have_the_training_batches_size() -> None:
    data = prepared(20, 20, batch_size=4, eval_batch_size=3, last_batch="drop")
    data.reserve(0.3)
    assert [len(y) for _, y in data.held_out_batches(1)] == [4, 2]


@pytest.mark.parametrize(
    ("settings", "share", "key", "found"),
    [
        ({}, 0.9, HOLD_OUT, "0.9 is all of what client 1 holds"),
        ({"chunks": 4}, 0.25, "data.chunks", "4, but client 1 holds 3 samples; give at most 3"),
        (
            {"last_batch": "drop", "batch_size": 4},
            0.25,
            "data.last_batch",
            "client 1 holds 3 samples, less than a batch",
        ),
    ],
)
def test_a_hold_out_that_leaves_too_little_is_refused(
    settings: dict[str, Any], share: float, key: str, found: str
) -> None:
    data = prepared(20, 4, **settings)
    with pytest.raises(UserError) as error:
        data.reserve(share)
    assert error.value.key == key
    assert found in str(error.value)
    assert data.num_samples(1) == 4  # as before


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("chunks", {"chunks": 5}),
        ("last_batch", {"last_batch": "drop", "batch_size": 5}),
        ("last_batch", {"last_batch": "drop", "batch_size": 2, "chunks": 4}),
    ],
)
def test_every_client_trains_on_something_in_every_round(
    key: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(UserError) as error:
        prepared(20, 4, **settings)
    assert error.value.key == f"data.{key}"


def test_chunks_take_turns() -> None:
    """Rounds 4 to 7 are as 0 to 3; each client, and each seed, has its own chunks."""
    data, other = prepared(16, 16, chunks=4), prepared(16, 16, chunks=4, seed=1)
    seen = [sorted(trained(data, 0, t, order=t)) for t in range(-1, 8)]
    assert seen[5:] == seen[1:5]
    assert seen[0] == seen[4]
    first = sorted(trained(data, 0))
    assert first != list(range(4))  # not in the order of the samples
    assert first != [number - 16 for number in sorted(trained(data, 1))]
    assert first != sorted(trained(other, 0))


def test_the_first_client_of_each_size_stands_for_the_others() -> None:
    data = prepared(9, 7, 9, 8, 7, 9)
    assert data.first_of_each_size(slice(None)) == [0, 1, 3]
    assert data.first_of_each_size(slice(2, 6)) == [2, 3, 4]
    data.reserve(0.2)  # seven, six and six are trained on
    assert data.first_of_each_size(slice(None)) == [0, 1]
