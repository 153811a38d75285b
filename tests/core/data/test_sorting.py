"""Orders and distinct values against numpy's."""

import numpy as np
import pytest

from lightfed.data.partition.sorting import distinct, stable_order


@pytest.mark.parametrize("largest", [1, 40, 2**16 - 2, 2**16 - 1, 2**16, 200_000, 2**32, 2**40])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_the_order_is_that_of_numpy(largest: int, kind: type) -> None:
    if largest > np.iinfo(kind).max:
        largest = np.iinfo(kind).max
    rng = np.random.default_rng(0)
    # Each key several times, from -1 to the largest one.
    keys = rng.integers(-1, largest, endpoint=True, size=500, dtype=kind)
    keys = np.concatenate((keys, keys[::-1], [-1, 0, largest])).astype(kind)

    order = stable_order(keys)
    np.testing.assert_array_equal(order, np.argsort(keys, kind="stable"))
    assert order.dtype == np.int64


def test_negative_keys_have_the_order_of_numpy() -> None:
    keys = np.array([3, -100, 3, -1, -100, 70_000])
    np.testing.assert_array_equal(stable_order(keys), np.argsort(keys, kind="stable"))


def test_no_keys_have_an_order() -> None:
    assert len(stable_order(np.empty(0, np.int64))) == 0


def test_distinct_samples_are_ascending_and_of_their_type() -> None:
    samples = np.array([7, 0, 7, 3, 9], dtype=np.int32)
    result = distinct(samples, total=10)
    np.testing.assert_array_equal(result, np.unique(samples))
    assert result.dtype == np.int32
