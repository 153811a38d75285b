import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightfed.data.partition.draw import (
    class_counts,
    draw_test,
    flatten,
    hold_out,
    matched_counts,
)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.just(1e-9) | st.floats(0.1, 0.9))
def test_hold_out_keeps_something_on_both_sides(sizes: list[int], fraction: float) -> None:
    """Also of a fraction below the jitter that decides ties, and of a class that nobody owns."""
    labels = np.random.default_rng(sum(sizes)).integers(4, size=sum(sizes))
    owned = flatten(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]))
    train, test = hold_out(
        owned, labels, fraction=fraction, num_classes=5, rng=np.random.default_rng(1)
    )
    kept = np.diff(train[1])
    np.testing.assert_array_equal(kept + np.diff(test[1]), sizes)
    assert (kept >= 1).all()
    assert (np.diff(test[1])[np.array(sizes) > 1] >= 1).all()
    both = class_counts(train, labels, 5) + class_counts(test, labels, 5)
    np.testing.assert_array_equal(both, class_counts(owned, labels, 5))
    np.testing.assert_array_equal(np.sort(np.concatenate((train[0], test[0]))), owned[0])


def test_hold_out_favours_no_class() -> None:
    """Many clients with one sample of each class: all classes are held out equally often."""
    labels = np.tile(np.arange(10), 500)
    owned = flatten(list(np.arange(5000).reshape(500, 10)))
    _, test = hold_out(owned, labels, fraction=0.8, num_classes=10, rng=np.random.default_rng(0))
    held_out = np.bincount(labels[test[0]], minlength=10)
    assert held_out.sum() == 1000
    assert np.abs(held_out - 100).max() < 45  # five standard deviations


def test_matched_counts_are_rounded_up_exactly() -> None:
    """A tenth of 100 is 10, though 0.1 * 100 may be more in floats; and a class has no more."""
    held = np.array([[1, 9], [3, 27], [0, 5]])
    counts = matched_counts(held, np.array([60, 240]))
    np.testing.assert_array_equal(counts, [[10, 90], [10, 90], [0, 100]])
    scarce = matched_counts(held, np.array([4, 296]))
    np.testing.assert_array_equal(scarce, [[4, 90], [4, 90], [0, 100]])
    huge = matched_counts(np.array([[2_000_000_000, 1]], np.int32), np.array([10**6, 10**6]))
    np.testing.assert_array_equal(huge, [[10**6, 1]])


def test_shared_test_samples_are_drawn_from_everywhere() -> None:
    """Every sample of a class is used about equally often, and no client has one twice."""
    labels = np.repeat([0, 1], [30, 50])
    counts = np.tile([10, 20], (600, 1))
    index, offsets = draw_test(counts, labels, np.random.default_rng(0))
    for client in range(600):
        own = index[offsets[client] : offsets[client + 1]]
        assert (np.diff(own) > 0).all()
        np.testing.assert_array_equal(np.bincount(labels[own]), [10, 20])
    uses = np.bincount(index, minlength=80)
    assert np.abs(uses[:30] - 200).max() < 60  # five standard deviations
    assert np.abs(uses[30:] - 240).max() < 60
