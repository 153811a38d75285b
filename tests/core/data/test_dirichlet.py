from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightfed.data.partition.schemes import Dirichlet, DirichletClient, Partitioner, Quantity
from tests.core.data.rules import (
    BALANCED,
    assert_exact_cover,
    classes_of,
    concentrations,
    label_sets,
    sizes,
    split,
    split_or_refuse,
)


@pytest.mark.parametrize("family", [Quantity, Dirichlet, partial(Dirichlet, balance=True)])
@settings(max_examples=20)
@given(label_sets(), st.integers(1, 12), concentrations, st.integers(1, 9))
def test_no_client_has_fewer_samples_than_the_least(
    family: Callable[..., Partitioner],
    drawn: tuple[np.ndarray, int],
    clients: int,
    concentration: float,
    min_size: int,
) -> None:
    """Of the largest least size none are left to spare, so that who gives away must keep enough."""
    labels, num_classes = drawn
    for least in (min_size, max(1, len(labels) // clients)):
        scheme = family(concentration, min_size=least)
        possible = clients * least <= len(labels)
        parts = split_or_refuse(scheme, labels, clients, num_classes, possible=possible)
        if parts:
            assert_exact_cover(parts, labels, clients)
            assert sizes(parts).min() >= least


@pytest.mark.parametrize("family", [Dirichlet, DirichletClient])
def test_concentration_orders_the_skew(family: Callable[[float], Partitioner]) -> None:
    def classes_per_client(alpha: float) -> float:
        parts = split(family(alpha), BALANCED, 50, num_classes=10)
        return float(np.mean([len(held) for held in classes_of(parts, BALANCED)]))

    held = [classes_per_client(alpha) for alpha in (0.01, 0.1, 1.0, 100.0)]
    assert all(less < more for less, more in pairwise(held))
    assert held[0] < 3
    assert held[-1] == 10


def test_large_concentration_is_even() -> None:
    even = split(Dirichlet(1e6), BALANCED, 20, num_classes=10)
    assert np.ptp(sizes(even)) <= 20
    assert np.ptp(sizes(split(Quantity(1e6), BALANCED, 20, num_classes=10))) <= 5
    assert np.ptp(sizes(split(Quantity(0.1), BALANCED, 20, num_classes=10))) > 500


def test_balance_caps_clients_with_their_equal_part() -> None:
    capped = split(Dirichlet(0.1, balance=True), BALANCED, 20, num_classes=10)
    free = split(Dirichlet(0.1), BALANCED, 20, num_classes=10)
    # who is below 250 samples may get one more class, of 500, and no other
    assert sizes(capped).max() < 250 + 500
    assert sizes(capped).std() < sizes(free).std()


def test_repair_takes_from_the_largest_class_of_the_largest_client() -> None:
    """With so small an alpha each class has one holder, so that ten draws leave clients empty."""
    parts = split(Dirichlet(1e-6, min_size=5), BALANCED, 20, num_classes=10)
    poor = [part for part in parts if len(part) == 5]
    assert len(poor) >= 10
    assert all(len(np.unique(BALANCED[part])) == 1 for part in poor)
    assert_exact_cover(parts, BALANCED, 20)


def test_exhausted_classes_are_masked() -> None:
    """One class for each of 50 clients: the proportions cannot be met, but the loop must end."""
    labels = np.repeat(np.arange(10), [950] + [6] * 9)
    parts = split(DirichletClient(1e-6), labels, 50, num_classes=10)
    assert_exact_cover(parts, labels, 50)
    assert np.ptp(sizes(parts)) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_balance_if_all_open_shares_underflow(seed: int) -> None:
    """A class drawn for one client alone, which is full, goes to the others in equal parts."""
    parts = split(Dirichlet(1e-6, balance=True), BALANCED, 4, num_classes=10, seed=seed)
    assert_exact_cover(parts, BALANCED, 4)
    assert sizes(parts).max() < 1250 + 500
