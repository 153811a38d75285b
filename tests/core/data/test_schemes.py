"""The rules of the schemes on random labels; impossible settings are refused with their key."""

from collections.abc import Callable
from inspect import isabstract, isclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightfed.data.partition import schemes
from lightfed.data.partition.schemes import (
    Classes,
    Dirichlet,
    DirichletClient,
    Diversity,
    Iid,
    Natural,
    Partitioner,
    Quantity,
    Shards,
)
from lightfed.utils.counts import largest_remainder
from lightfed.utils.errors import UserError
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


@settings(max_examples=25)
@given(
    label_sets(), st.integers(1, 12), st.just(Iid()) | st.builds(DirichletClient, concentrations)
)
def test_equal_clients(drawn: tuple[np.ndarray, int], clients: int, scheme: Partitioner) -> None:
    labels, num_classes = drawn
    parts = split_or_refuse(scheme, labels, clients, num_classes, possible=clients <= len(labels))
    if parts:
        assert_exact_cover(parts, labels, clients)
        assert np.ptp(sizes(parts)) <= 1


@settings(max_examples=25)
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


@settings(max_examples=25)
@given(label_sets(), st.integers(1, 12), st.integers(0, 8), st.integers(1, 3))
def test_parts_of_missing_clients(
    drawn: tuple[np.ndarray, int], clients: int, absent: int, per_client: int
) -> None:
    """The existing clients hold the same samples as if all clients existed."""
    labels, num_classes = drawn
    parts = clients + absent
    for scheme, scheme_of_all, fewest_samples in (
        (Iid(parts=parts), Iid(), parts),
        (Shards(per_client, parts=parts), Shards(per_client), parts * per_client),
    ):
        possible = fewest_samples <= len(labels)
        existing = split_or_refuse(scheme, labels, clients, num_classes, possible=possible)
        if existing:
            everyone = split(scheme_of_all, labels, parts, num_classes=num_classes)
            assert len(existing) == clients
            for samples, expected in zip(existing, everyone[:clients], strict=True):
                assert np.array_equal(samples, expected)


def test_every_scheme_deals_to_the_first_of_twenty_clients_what_they_have_among_twenty() -> None:
    owners = np.arange(len(BALANCED)) % 30
    dealt_schemes = set()
    for scheme, scheme_of_all in (
        (Iid(parts=20), Iid()),
        (Quantity(0.5, min_size=3, parts=20), Quantity(0.5, min_size=3)),
        (Shards(2, parts=20), Shards(2)),
        (Dirichlet(0.1, parts=20), Dirichlet(0.1)),
        (Dirichlet(0.3, balance=True, parts=20), Dirichlet(0.3, balance=True)),
        (DirichletClient(0.3, parts=20), DirichletClient(0.3)),
        (Classes(2, parts=20), Classes(2)),
        (Classes(2, strict_paper=True, parts=20), Classes(2, strict_paper=True)),
        (Diversity(3, 100, parts=20), Diversity(3, 100)),
        (Natural(parts=20), Natural()),
    ):
        everyone = split(scheme_of_all, BALANCED, 20, num_classes=10, groups=owners)
        four = split(scheme, BALANCED, 4, num_classes=10, groups=owners)
        assert [part.tolist() for part in four] == [part.tolist() for part in everyone[:4]]
        assert repr(scheme).endswith("parts=20)")
        dealt_schemes.add(type(scheme))

    shipped = {kind for kind in map(schemes.__dict__.get, schemes.__dict__) if is_scheme(kind)}
    assert dealt_schemes == shipped


def is_scheme(kind: object) -> bool:
    return isclass(kind) and issubclass(kind, Partitioner) and not isabstract(kind)


@settings(max_examples=40)
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
    if not parts:
        return

    assert_exact_cover(parts, labels, clients)
    classes_of_clients = classes_of(parts, labels)
    assert {len(classes) for classes in classes_of_clients} == {per_client}

    # The classes have equally many holders.
    num_holders = np.bincount(np.concatenate(classes_of_clients), minlength=num_classes)
    assert np.ptp(num_holders[np.unique(labels)]) <= 1

    # The holders of a class have equally many samples of it.
    if alpha is None:
        for label in np.unique(labels):
            counts = [(labels[part] == label).sum() for part in parts]
            assert np.ptp([count for count in counts if count]) <= 1


@settings(max_examples=30)
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

    dealt = np.concatenate(parts)
    assert len(np.unique(dealt)) == len(dealt)

    # A client has one shard of each of its classes.
    shards_taken = np.zeros(num_classes, dtype=np.int64)
    for part in parts:
        classes, counts = np.unique(labels[part], return_counts=True)
        assert 1 <= len(classes) <= per_client
        shards_taken[classes] += 1
        for label, count in zip(classes, counts, strict=True):
            class_size = (labels == label).sum()
            assert count in (class_size // shards, class_size // shards + 1)
    assert (shards_taken <= shards).all()

    # A shard is left only if a client has drawn its class twice.
    if all(len(classes) == per_client for classes in classes_of(parts, labels)):
        assert len(dealt) == len(labels)


@settings(max_examples=25)
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


@settings(max_examples=25)
@given(st.integers(1, 15), st.integers(1, 15), st.integers(0, 99))
def test_natural(owners: int, clients: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.concatenate([np.arange(owners), rng.integers(owners, size=50)])) * 3
    labels = np.zeros(len(groups), dtype=np.int64)
    if clients > owners:
        with pytest.raises(UserError, match=f"{clients} clients, but .* {owners} owners"):
            Natural().split(labels, clients=clients, num_classes=1, rng=rng, groups=groups)
        return

    parts = Natural().split(labels, clients=clients, num_classes=1, rng=rng, groups=groups)

    assert_exact_cover(parts, labels, clients)
    owners_of_clients = [np.unique(groups[part]) for part in parts]
    assert sum(len(names) for names in owners_of_clients) == owners  # none is at two clients
    assert np.ptp([len(names) for names in owners_of_clients]) <= 1
    if owners == clients:
        assert [names.item() for names in owners_of_clients] == np.unique(groups).tolist()


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
        Classes(2, strict_paper=True),
        Diversity(3, 100),
    ],
    ids=repr,
)
def test_the_seed_alone_decides(scheme: Partitioner) -> None:
    def draw(seed: int) -> list[list[int]]:
        parts = split(scheme, BALANCED, 20, num_classes=10, seed=seed)
        return [part.tolist() for part in parts]

    assert draw(4) == draw(4)
    assert draw(4) != draw(5)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(0, 10_000))
def test_largest_remainder_is_exact_and_close(shares: list[float], total: int) -> None:
    weights = np.array(shares) + 1e-3
    counts = largest_remainder(weights, total)
    assert counts.sum() == total
    assert (np.abs(counts - weights / weights.sum() * total) < 1 + 1e-9).all()


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
        ("min_size", lambda: split(Dirichlet(1.0, min_size=0), BALANCED, 2, num_classes=10)),
    ],
)
def test_a_bad_argument_is_named(key: str, make: Callable[[], object]) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert error.value.key == f"data.partition.init_args.{key}"


@pytest.mark.parametrize(
    ("scheme", "clients", "key"),
    [
        (Dirichlet(0.5, min_size=100), 20, "partition.init_args.min_size"),
        (Iid(), 2000, "partition"),
        (Iid(parts=20), 24, "partition.init_args.parts"),
        (Iid(parts=2000), 8, "partition.init_args.parts"),
        (Shards(500), 4, "partition.init_args.per_client"),
        (Shards(300, parts=6), 2, "partition.init_args.per_client"),
        (Dirichlet(0.5, parts=3), 4, "partition.init_args.parts"),
        (Diversity(2, 100, parts=3), 4, "partition.init_args.parts"),
        (DirichletClient(0.5, parts=2000), 4, "partition.init_args.parts"),
        (Classes(2), 3, "partition.init_args.per_client"),
        (Classes(11), 3, "partition.init_args.per_client"),
        (Classes(2), 750, "partition.init_args.per_client"),
        (Classes(2, strict_paper=True), 7, "partition.init_args.per_client"),
        (Diversity(2, 300), 3, "partition.init_args.samples"),
        (Natural(), 3, "partition"),
    ],
    ids=repr,
)
def test_what_1437_samples_cannot_give_is_refused(
    scheme: Partitioner, clients: int, key: str
) -> None:
    with pytest.raises(UserError) as error:
        split(scheme, np.tile(np.arange(10), 144)[:1437], clients, num_classes=10)
    assert error.value.key == f"data.{key}"


def test_the_repr_of_a_scheme_leaves_out_defaults() -> None:
    assert repr(Iid()) == "Iid()"
    assert repr(Dirichlet(0.5, min_size=2)) == "Dirichlet(alpha=0.5, min_size=2)"
