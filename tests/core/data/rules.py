"""Random labels, and the rules of every scheme."""

import numpy as np
import pytest
from hypothesis import strategies as st

from lightfed.data.partition.schemes import Partitioner
from lightfed.utils.errors import UserError

BALANCED = np.tile(np.arange(10), 500)
Parts = list[np.ndarray]
concentrations = st.sampled_from([1e-6, 0.01, 0.1, 0.5, 1.0, 100.0, 1e6])


@st.composite
def label_sets(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Labels in random order, some classes rare or absent, and the number of classes."""
    num_classes = draw(st.integers(1, 7))
    sizes = draw(st.lists(st.integers(0, 40), min_size=num_classes, max_size=num_classes))
    labels = np.repeat(np.arange(num_classes), sizes)
    return np.random.default_rng(draw(st.integers(0, 99))).permutation(labels), num_classes


def split(
    scheme: Partitioner,
    labels: np.ndarray,
    clients: int,
    *,
    num_classes: int,
    seed: int = 0,
    groups: np.ndarray | None = None,
) -> Parts:
    rng = np.random.default_rng(seed)
    return scheme.split(labels, clients=clients, num_classes=num_classes, rng=rng, groups=groups)


def split_or_refuse(
    scheme: Partitioner, labels: np.ndarray, clients: int, num_classes: int, *, possible: bool
) -> Parts | None:
    """The split if it is possible; asserts that the scheme agrees."""
    if possible:
        return split(scheme, labels, clients, num_classes=num_classes)
    with pytest.raises(UserError, match=r"^data\.partition"):
        split(scheme, labels, clients, num_classes=num_classes)
    return None


def assert_exact_cover(parts: Parts, labels: np.ndarray, clients: int) -> None:
    assert len(parts) == clients
    assert min(map(len, parts)) >= 1
    assert all((np.diff(part) > 0).all() for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


def sizes(parts: Parts) -> np.ndarray:
    return np.array([len(part) for part in parts])


def classes_of(parts: Parts, labels: np.ndarray) -> list[np.ndarray]:
    return [np.unique(labels[part]) for part in parts]
