"""Draws of many streams: the hash of the reference on every backend, uniform and independent."""

import math

import numpy as np
import pytest
import torch
from lightfed_kernels import stream_keys, uniform_
from lightfed_kernels.reference.select import random_keys

SEEDS = (0, 1, 2, 2**32, 2**63 - 1)


@pytest.mark.parametrize("size", [1, 1000, 1024, 2100])
def test_every_backend_has_the_numbers_of_the_reference(device: torch.device, size: int) -> None:
    first = (0, 7, 2**32 - 5, 2**40, 3)
    found = torch.full((len(SEEDS), size), math.nan, device=device)
    offsets = torch.tensor(first, device=device)
    uniform_(found, stream_keys(SEEDS).to(device), offsets)
    for row, seed, begin in zip(found.cpu(), SEEDS, first, strict=True):
        expected = (random_keys(seed, size, first=begin) >> np.uint64(8)) * 2.0**-24
        assert np.array_equal(row.numpy(), expected.astype(np.float32))
    assert offsets.tolist() == list(first)


def test_numbers_are_uniform_and_streams_independent() -> None:
    count = 1 << 16
    found = uniform_(
        torch.empty(40, count), stream_keys(range(40)), torch.zeros(40, dtype=torch.int64)
    )
    assert found.min() >= 0
    assert found.max() < 1
    # Means and correlations are normal with these deviations.
    assert (found.mean(1) - 0.5).abs().max() < 4.5 * math.sqrt(1 / 12 / count)
    correlations = torch.corrcoef(found).triu(1).flatten()
    assert correlations.abs().max() < 4.5 / math.sqrt(count)
    bins = torch.stack([torch.histc(row, 64, 0, 1) for row in found])
    chi = ((bins - count / 64) ** 2 / (count / 64)).sum(1)
    assert (chi - 63).abs().max() < 4.5 * math.sqrt(2 * 63)
    lagged = torch.corrcoef(torch.stack([found[0, :-1], found[0, 1:]]))[0, 1]
    assert abs(lagged) < 4.5 / math.sqrt(count)


def test_a_stream_goes_on_where_it_stopped() -> None:
    keys, zero = stream_keys([5]), torch.zeros(1, dtype=torch.int64)
    whole = uniform_(torch.empty(1, 100), keys, zero)
    parts = [uniform_(torch.empty(1, n), keys, zero + at) for at, n in ((0, 30), (30, 70))]
    assert torch.equal(whole, torch.cat(parts, 1))


@pytest.mark.parametrize(
    ("out", "keys", "error"),
    [
        (torch.empty(3), stream_keys([1]), ValueError),
        (torch.empty(4, 2).T, stream_keys([1, 2]), ValueError),
        (torch.empty(2, 3, dtype=torch.float64), stream_keys([1, 2]), TypeError),
        (torch.empty(2, 3), stream_keys([1]), ValueError),
        (torch.empty(2, 3), stream_keys([1, 2]).int(), TypeError),
    ],
)
def test_tensors_that_do_not_fit(
    out: torch.Tensor, keys: torch.Tensor, error: type[Exception]
) -> None:
    with pytest.raises(error):
        uniform_(out, keys, torch.zeros_like(keys))


def test_no_stream_and_no_element() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert uniform_(torch.empty(0, 5), empty, empty).shape == (0, 5)
    assert uniform_(torch.empty(1, 0), stream_keys([1]), empty.new_zeros(1)).shape == (1, 0)
