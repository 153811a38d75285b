"""The rules of the schemes on random labels; impossible settings are refused with their key."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightfed.data.partition.dirichlet import Dirichlet, DirichletClient, Quantity
from lightfed.data.partition.partitioner import Partitioner
from lightfed.data.partition.schemes import Classes, Diversity, Iid, Natural, Shards
from lightfed.utils.counts import largest_remainder
from lightfed.utils.errors import UserError
from tests.data.rules import (
    BALANCED,
    assert_exact_cover,
    classes_of,
    concentrations,
    label_sets,
    sizes,
    split,
    split_or_refuse,
)


@settings(deadline=None, max_examples=25)
@given(label_sets(), st.integers(1, 12))
def test_iid(drawn: tuple[np.ndarray, int], clients: int) -> None:
    labels, num_classes = drawn
    parts = split_or_refuse(Iid(), labels, clients, num_classes, possible=clients <= len(labels))
    if parts:
        assert_exact_cover(parts, labels, clients)
        assert np.ptp(sizes(parts)) <= 1


@settings(deadline=None, max_examples=25)
@given(label_sets(), st.integers(1, 12), st.integers(1, 4))
def test_shards(drawn: tuple[np.ndarray, int], clients: int, per_client: int) -> None:
    labels, num_classes = drawn
    possible = clients * per_client <= len(labels)
    parts = split_or_refuse(Shards(per_client), labels, clients, num_classes, possible=possible)
    if parts:
        assert_exact_cover(parts, labels, clients)
        assert np.ptp(sizes(parts)) <= per_client
        # a shard of the sorted labels holds one class more than it crosses borders between classes
        borders = sum(len(held) - 1 for held in classes_of(parts, labels))
        assert borders <= clients * (per_client - 1) + len(np.unique(labels)) - 1


@settings(deadline=None, max_examples=25)
@given(label_sets(), st.integers(1, 12), st.integers(0, 8), st.integers(1, 3))
def test_parts_of_missing_clients(
    drawn: tuple[np.ndarray, int], clients: int, absent: int, per_client: int
) -> None:
    """The existing clients hold the same samples as if all clients existed."""
    labels, num_classes = drawn
    parts = clients + absent
    for scheme, whole, least in (
        (Iid(parts=parts), Iid(), parts),
        (Shards(per_client, parts=parts), Shards(per_client), parts * per_client),
    ):
        possible = least <= len(labels)
        found = split_or_refuse(scheme, labels, clients, num_classes, possible=possible)
        if found:
            everyone = split(whole, labels, parts, num_classes=num_classes)
            assert len(found) == clients
            assert all(map(np.array_equal, found, everyone))


@settings(deadline=None, max_examples=40)
@given(label_sets(), st.integers(1, 12), st.integers(1, 4), st.none() | concentrations)
def test_classes(
    drawn: tuple[np.ndarray, int], clients: int, per_client: int, alpha: float | None
) -> None:
    labels, num_classes = drawn
    present = np.bincount(labels, minlength=num_classes)
    present = present[present > 0]
    slots = clients * per_client
    possible = bool(
        clients <= len(labels)
        and per_client <= len(present) <= slots
        and -(-slots // len(present)) <= present.min()
    )
    scheme = Classes(per_client, alpha=alpha)
    parts = split_or_refuse(scheme, labels, clients, num_classes, possible=possible)
    if parts:
        assert_exact_cover(parts, labels, clients)
        held = classes_of(parts, labels)
        assert {len(classes) for classes in held} == {per_client}
        holders = np.bincount(np.concatenate(held), minlength=num_classes)
        assert np.ptp(holders[np.unique(labels)]) <= 1
        if alpha is None:
            for label in np.unique(labels):
                counts = [(labels[part] == label).sum() for part in parts]
                assert np.ptp([count for count in counts if count]) <= 1


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 5), st.floats(0.1, 1.0), st.floats(1.0, 3.0))
def test_uniform_shares_lie_within_their_bounds(
    seed: int, holders: int, low: float, times: float
) -> None:
    """A share of U(low, high) is at most high / (high + (holders - 1) low)."""
    high = low * times
    clients = 10 * holders // 2
    parts = split(Classes(2, uniform=(low, high)), BALANCED, clients, num_classes=10, seed=seed)
    assert_exact_cover(parts, BALANCED, clients)
    for label in range(10):
        counts = np.array([n for part in parts if (n := (BALANCED[part] == label).sum())])
        most = high / (high + (len(counts) - 1) * low)
        least = low / (low + (len(counts) - 1) * high)
        total = counts.sum()
        assert (counts <= most * total + 2).all()  # each within a sample, and one for every holder
        assert (counts >= least * total - 2).all()


def test_uniform_shares_are_spread_as_drawn() -> None:
    """Two holders, U(.4, .6): a share has mean .5 and is between .4 and .6, rarely near these."""
    labels = np.repeat(np.arange(10), 1000)
    shares = np.array(
        [
            (labels[part] == label).mean() * len(part) / 1000
            for seed in range(40)
            for part in split(Classes(2, uniform=(0.4, 0.6)), labels, 10, num_classes=10, seed=seed)
            for label in np.unique(labels[part])
        ]
    )
    assert shares.min() > 0.397
    assert shares.max() < 0.603
    # U1 / (U1 + U2) is 1/2 + (U1 - U2) / 2 to first order: a deviation of .1 / sqrt(6).
    assert shares.std() == pytest.approx(0.1 / 6**0.5, rel=0.1)


@settings(deadline=None, max_examples=30)
@given(label_sets(), st.integers(1, 12), st.integers(1, 3))
def test_heterofl_exactly(drawn: tuple[np.ndarray, int], clients: int, per_client: int) -> None:
    labels, num_classes = drawn
    slots = clients * per_client
    shards = slots // num_classes
    smallest = np.bincount(labels, minlength=num_classes).min()
    possible = bool(clients <= len(labels) and slots % num_classes == 0 and smallest >= shards >= 1)
    scheme = Classes(per_client, strict_paper=True)
    parts = split_or_refuse(scheme, labels, clients, num_classes, possible=possible)
    if not parts:
        return
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything)
    taken = np.zeros(num_classes, dtype=np.int64)
    for part in parts:
        held, counts = np.unique(labels[part], return_counts=True)
        assert 1 <= len(held) <= per_client
        taken[held] += 1
        for label, count in zip(held, counts, strict=True):
            whole = (labels == label).sum()
            assert count in (whole // shards, whole // shards + 1)
    assert (taken <= shards).all()
    if all(len(held) == per_client for held in classes_of(parts, labels)):
        assert len(everything) == len(labels)


@settings(deadline=None, max_examples=25)
@given(label_sets(), st.integers(1, 12), st.integers(1, 4), st.integers(1, 40))
def test_diversity(drawn: tuple[np.ndarray, int], clients: int, classes: int, samples: int) -> None:
    labels, num_classes = drawn
    present = np.bincount(labels, minlength=num_classes)
    present = np.sort(present[present > 0])
    possible = classes <= len(present) and samples <= present[:classes].sum()
    scheme = Diversity(classes, samples)
    parts = split_or_refuse(scheme, labels, clients, num_classes, possible=bool(possible))
    if parts:
        assert len(parts) == clients
        assert set(sizes(parts)) == {samples}
        assert all((np.diff(part) > 0).all() for part in parts)
        assert max(len(held) for held in classes_of(parts, labels)) <= classes


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 15), st.integers(1, 15), st.integers(0, 99))
def test_natural(owners: int, clients: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.concatenate([np.arange(owners), rng.integers(owners, size=50)])) * 3
    labels = np.zeros(len(groups), dtype=np.int64)
    if clients > owners:
        with pytest.raises(UserError, match=f"{clients} clients, but .* {owners} natural owners"):
            Natural().split(labels, clients=clients, num_classes=1, rng=rng, groups=groups)
        return
    parts = Natural().split(labels, clients=clients, num_classes=1, rng=rng, groups=groups)
    assert_exact_cover(parts, labels, clients)
    whose = [np.unique(groups[part]) for part in parts]
    assert sum(map(len, whose)) == owners  # no owner has two clients
    assert np.ptp([len(names) for names in whose]) <= 1
    if owners == clients:
        assert [names.item() for names in whose] == np.unique(groups).tolist()


@pytest.mark.parametrize(
    "scheme",
    [
        Iid(),
        Iid(parts=40),
        Quantity(0.5),
        Shards(2),
        Dirichlet(0.1),
        Dirichlet(0.3, balance=True),
        DirichletClient(0.3),
        Classes(2),
        Classes(2, alpha=0.5),
        Classes(2, uniform=(0.4, 0.6)),
        Classes(2, strict_paper=True),
        Diversity(3, 100),
    ],
    ids=repr,
)
def test_the_seed_alone_decides(scheme: Partitioner) -> None:
    first, again = (split(scheme, BALANCED, 20, num_classes=10, seed=4) for _ in range(2))
    other = split(scheme, BALANCED, 20, num_classes=10, seed=5)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(0, 10_000))
def test_largest_remainder_is_exact_and_close(shares: list[float], total: int) -> None:
    weights = np.array(shares) + 1e-3
    counts = largest_remainder(weights, total)
    assert counts.sum() == total
    assert (np.abs(counts - weights / weights.sum() * total) < 1 + 1e-9).all()


def test_errors_quote_the_numbers() -> None:
    labels = np.tile(np.arange(10), 144)[:1437]

    def refusal(scheme: Partitioner, clients: int) -> str:
        with pytest.raises(UserError) as error:
            split(scheme, labels, clients, num_classes=10)
        return str(error.value)

    assert refusal(Dirichlet(0.5, min_size=100), 20) == (
        "data.partition.init_args.min_size: 20 clients x min_size 100 needs 2000 samples, "
        "the training set has 1437; lower it to 71 or use fewer clients"
    )
    assert refusal(Iid(), 2000) == (
        "data.partition: 2000 clients need a sample each, the training set has 1437; "
        "lower the number of clients (model.clients)"
    )
    assert "per_client: 3 clients x 2 cover 6 of 10 classes; raise it to 4" in refusal(
        Classes(2), 3
    )
    assert "11 classes of a client, the training set has 10" in refusal(Classes(11), 3)
    assert "need 150 samples of each of 10 classes, the smallest has 143" in refusal(
        Classes(2), 750
    )
    assert "per_client: 4 clients x 500 shards need 2000" in refusal(Shards(500), 4)
    assert "per_client: 6 clients x 300 shards need 1800" in refusal(Shards(300, parts=6), 2)
    for scheme in (Iid(parts=20), Shards(2, parts=20)):
        assert refusal(scheme, 24) == (
            "data.partition.init_args.parts: 20 parts for 24 clients; "
            "give at least 24, or leave it out"
        )
    assert set(sizes(split(Iid(parts=1437), labels, 8, num_classes=10))) == {1}
    assert refusal(Iid(parts=2000), 8) == (
        "data.partition.init_args.parts: 2000 parts of 1437 samples; give at most 1437"
    )
    assert "not a multiple of the 10 classes" in refusal(Classes(2, strict_paper=True), 7)
    assert "samples: 300 samples, but 2 classes may hold as few as 286" in refusal(
        Diversity(2, 300), 3
    )
    assert "no natural owners" in refusal(Natural(), 3)


@pytest.mark.parametrize(
    ("key", "make"),
    [
        ("alpha", lambda: Dirichlet(0.0)),
        ("alpha", lambda: DirichletClient(-1.0)),
        ("alpha", lambda: Classes(2, alpha=float("nan"))),
        ("beta", lambda: Quantity(float("inf"))),
        ("per_client", lambda: Shards(0)),
        ("per_client", lambda: Classes(0)),
        ("classes", lambda: Diversity(0, 1)),
        ("samples", lambda: Diversity(1, 0)),
        ("strict_paper", lambda: Classes(2, alpha=1.0, strict_paper=True)),
        ("strict_paper", lambda: Classes(2, uniform=(0.4, 0.6), strict_paper=True)),
        ("uniform", lambda: Classes(2, uniform=(0.4, 0.6), alpha=1.0)),
        ("uniform", lambda: Classes(2, uniform=(0.6, 0.4))),
        ("uniform", lambda: Classes(2, uniform=(0.0, 0.4))),
        ("uniform", lambda: Classes(2, uniform=(0.4, float("nan")))),
        ("min_size", lambda: split(Dirichlet(1.0, min_size=0), BALANCED, 2, num_classes=10)),
    ],
)
def test_a_bad_argument_is_named(key: str, make: Callable[[], object]) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert error.value.key == f"data.partition.init_args.{key}"


def test_schemes_have_a_repr() -> None:
    assert repr(Iid()) == "Iid()"
    assert repr(Iid(parts=20)) == "Iid(parts=20)"
    assert repr(Dirichlet(0.5)) == "Dirichlet(alpha=0.5)"
    assert repr(Dirichlet(0.5, min_size=2, balance=True)) == (
        "Dirichlet(alpha=0.5, min_size=2, balance=True)"
    )
    assert repr(Classes(2, alpha=0.3)) == "Classes(per_client=2, alpha=0.3)"
    assert repr(Classes(2, uniform=(0.4, 0.6))) == "Classes(per_client=2, uniform=(0.4, 0.6))"
    assert repr(Diversity(3, 500)) == "Diversity(classes=3, samples=500)"
