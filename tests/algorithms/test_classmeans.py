"""Means by class, on a client and on the server."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lightfed.algorithms.class_means import ClassMeans, ClassSums, mean_of_clients
from tests.core.models.client_cases import random
from tests.small import GOLDEN


def empty_sums(classes: int, size: int) -> ClassSums:
    """Return the sums before the first vector."""
    return ClassSums(torch.zeros(classes, size).double(), torch.zeros(classes).double())


@settings(deadline=None, max_examples=20)
@given(y=st.lists(st.integers(0, 4), max_size=20), batch=st.integers(1, 7))
def test_sums_over_batches_give_the_mean_of_all_samples(y: list[int], batch: int) -> None:
    labels = torch.tensor(y, dtype=torch.int64)
    values = random(len(y), 3)
    sums = empty_sums(5, 3)
    for batch_labels, batch_values in zip(labels.split(batch), values.split(batch), strict=True):
        sums.add(batch_labels, batch_values)

    means = sums.means()
    assert means.values.dtype == torch.float32
    assert means.bytes == len(set(y)) * (4 * 3 + 8)
    for label in range(5):
        assert means.seen[label] == (label in y)
        if label in y:
            torch.testing.assert_close(means.values[label], values[labels == label].mean(0))
        else:
            assert not means.values[label].any()


def test_sums_are_exact_under_autocast() -> None:
    values = 1 + 1e-3 * random(64, 3)
    sums = empty_sums(1, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums.add(torch.zeros(64, dtype=torch.int64), values)
    torch.testing.assert_close(sums.means().values[0], values.mean(0), rtol=1e-6, atol=0)


def test_the_server_takes_the_unweighted_mean_of_those_that_have_a_class() -> None:
    vectors = load_file(GOLDEN / "baselines/htfllib.safetensors")
    packages = []
    for client in range(3):
        package = ClassMeans(torch.zeros(4, 5), torch.zeros(4, dtype=torch.bool))
        for label in range(4):
            vector = vectors.get(f"proto_agg/in/{client}/{label}")
            if vector is not None:
                package.values[label] = vector
                package.seen[label] = True
        packages.append(package)

    mean = mean_of_clients(packages)
    assert mean.seen.tolist() == [True, True, True, False]
    for label in range(3):
        recorded = vectors[f"proto_agg/out/{label}"]
        torch.testing.assert_close(mean.values[label], recorded, rtol=0, atol=1e-6)
    assert not mean.values[3].any()


def test_what_a_client_has_not_seen_does_not_leak() -> None:
    one = ClassMeans(torch.tensor([[1.0], [torch.nan]]), torch.tensor([True, False]))
    other = ClassMeans(torch.tensor([[4.0], [7.0]]), torch.tensor([True, True]))
    mean = mean_of_clients([one, other])
    assert mean.values.tolist() == [[2.5], [7.0]]
