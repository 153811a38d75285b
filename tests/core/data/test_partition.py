"""Which samples a client trains on and is tested on, by every rule, and what a file keeps of it."""

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from lightfed.data.dataset import Dataset, Samples, Split, Transform
from lightfed.data.digests import Contents
from lightfed.data.partition.draw import Partition, PersonalTest, draw_partition
from lightfed.data.partition.schemes import (
    Classes,
    Dirichlet,
    DirichletClient,
    Diversity,
    Iid,
    Natural,
    Partitioner,
    Shards,
)
from lightfed.engine.setup import check_built
from lightfed.utils.errors import UserError

MODES: list[PersonalTest] = ["match", "random", "split", "labels", "all"]


class Letters(Dataset):
    """1,000 training and 200 test samples of five classes; nine writers."""

    classes = tuple("abcde")
    input_shape = (1,)

    @property
    def transform(self) -> Transform:
        return Transform((0.0,), (1.0,))

    def load(self, split: Split) -> Samples:
        count = 1000 if split == "train" else 200
        y = torch.arange(count) % 5
        return Samples(x=torch.zeros(count, 1), y=y, groups=torch.arange(count) % 9)


TRAIN = Letters().load("train")
TEST = Letters().load("test")


def draw(
    scheme: Partitioner,
    *,
    clients: int = 20,
    seed: int = 0,
    test: PersonalTest = "match",
    train_fraction: float = 0.8,
    validation: float = 0.0,
    train: Samples = TRAIN,
    test_samples: Samples = TEST,
) -> Partition:
    return draw_partition(
        Letters(),
        scheme,
        clients=clients,
        seed=seed,
        test=test,
        train_fraction=train_fraction,
        validation=validation,
        train=train,
        test_samples=test_samples,
    )


def label_distance(partition: Partition, shift: int = 0) -> float:
    """Return the mean L1 distance of clients' proportions of classes in training and test.

    With a `shift` a client's test samples are compared with the training samples of another one.
    """
    train_sizes = partition.train_counts.sum(1, keepdims=True)
    test_sizes = np.maximum(partition.test_counts.sum(1, keepdims=True), 1)
    train = partition.train_counts / train_sizes
    test = partition.test_counts / test_sizes
    return float(np.abs(np.roll(train, shift, axis=0) - test).sum(1).mean())


@pytest.mark.parametrize("test", MODES)
def test_the_arrays_agree_with_each_other(test: PersonalTest) -> None:
    partition = draw(Dirichlet(0.3), test=test)
    source = TRAIN if partition.meta["test_source"] == "train" else TEST
    assert partition.clients == 20
    assert partition.train_index.dtype == partition.test_index.dtype == np.int32
    assert partition.train_offsets.dtype == partition.test_offsets.dtype == np.int64
    assert partition.train_counts.dtype == partition.test_counts.dtype == np.int32
    assert partition.train_offsets[-1] == len(partition.train_index)
    assert partition.test_offsets[-1] == len(partition.test_index)

    for client in range(20):
        train = partition.train(client)
        assert np.shares_memory(train, partition.train_index)
        assert (np.diff(train) > 0).all()
        train_counts = np.bincount(TRAIN.y[torch.from_numpy(train)], minlength=5)
        np.testing.assert_array_equal(partition.train_counts[client], train_counts)
        np.testing.assert_array_equal(partition.labels(client), np.flatnonzero(train_counts))

        tested = partition.test(client)
        assert np.shares_memory(tested, partition.test_index)
        assert (np.diff(tested) > 0).all()
        test_counts = np.bincount(source.y[torch.from_numpy(tested)], minlength=5)
        np.testing.assert_array_equal(partition.test_counts[client], test_counts)


def test_matched_test_sets_have_the_proportions_of_the_training_sets() -> None:
    partition = draw(DirichletClient(0.3), test="match")
    sizes = np.diff(partition.test_offsets)
    assert ((sizes >= 10) & (sizes <= 10 + 4)).all()  # 200 / 20, each class rounded up
    assert label_distance(partition) < 0.25
    assert label_distance(partition, shift=1) > 0.6
    assert len(np.unique(partition.test_index)) < len(partition.test_index)


def test_random_test_sets_are_equal_shares() -> None:
    partition = draw(Classes(1), test="random", clients=15)
    np.testing.assert_array_equal(np.sort(partition.test_index), np.arange(200))
    assert set(np.diff(partition.test_offsets)) == {13, 14}
    assert (partition.test_counts > 0).all(axis=1).sum() > 10  # of five classes, not of one
    assert not np.array_equal(partition.test(0), np.arange(0, 200, 15))


def of_owners(train: list[int], test: list[int] | None) -> dict[str, Samples]:
    """Samples of one class with these owners."""

    def samples(owners: list[int] | None, count: int) -> Samples:
        groups = None if owners is None else torch.tensor(owners)
        return Samples(torch.zeros(count, 1), torch.zeros(count, dtype=torch.int64), groups)

    count = 7 if test is None else len(test)
    return {"train": samples(train, len(train)), "test_samples": samples(test, count)}


RULES: list[PersonalTest] = ["owner", "auto"]


@pytest.mark.parametrize("test", RULES)
def test_an_owner_is_tested_on_its_own_samples(test: PersonalTest) -> None:
    given = of_owners([4, 9, 4, 2, 9, 4], [9, 2, 2, 4, 9, 4, 9])
    partition = draw(Natural(), clients=3, test=test, **given)
    assert partition.meta["test"] == "owner"
    # The owners 2, 4 and 9.
    assert [partition.train(client).tolist() for client in range(3)] == [[3], [0, 2, 5], [1, 4]]
    assert [partition.test(client).tolist() for client in range(3)] == [[1, 2], [3, 5], [0, 4, 6]]
    assert partition.test_counts[:, 0].tolist() == [2, 2, 3]


def test_a_client_of_several_owners_is_tested_on_those_of_all() -> None:
    rng = np.random.default_rng(0)
    train, test = rng.integers(0, 12, 300), rng.integers(0, 14, 100)
    partition = draw(Natural(), clients=5, test="owner", **of_owners(train.tolist(), test.tolist()))
    tested = set()
    for client in range(5):
        owners = np.unique(train[partition.train(client)])
        expected = np.flatnonzero(np.isin(test, owners))
        np.testing.assert_array_equal(partition.test(client), expected)
        tested |= set(expected.tolist())
    # Owners 12 and 13 train nowhere, and are tested nowhere.
    assert tested == set(np.flatnonzero(test < 12).tolist())


def test_a_client_whose_owner_has_no_test_samples_has_none() -> None:
    given = of_owners([0, 1, 2], [2, 0, 3])
    partition = draw(Natural(), clients=3, test="owner", **given)
    assert [partition.test(client).tolist() for client in range(3)] == [[1], [], [0]]
    # By itself nobody is left without a test.
    assert draw(Natural(), clients=3, test="auto", **given).meta["test"] == "match"


def test_samples_without_owners_are_matched_unless_owners_are_asked_for() -> None:
    given = of_owners([0, 1, 2], None)
    assert draw(Natural(), clients=3, test="auto", **given).meta["test"] == "match"
    with pytest.raises(UserError, match="the test samples have no owners"):
        draw(Natural(), clients=3, test="owner", **given)


def test_owners_that_are_spread_over_clients_are_refused() -> None:
    given = of_owners([0, 1] * 10, [0, 1])
    with pytest.raises(UserError, match=r"data\.personal_test: .*Iid.*one owner to several"):
        draw(Iid(), clients=2, test="owner", **given)
    assert draw(Iid(), clients=2, test="auto", **given).meta["test"] == "match"


def test_a_partition_by_owners_depends_on_those_of_test_samples() -> None:
    digests = set()
    for owners in ([0, 1, 2], [0, 2, 1]):
        given = of_owners([0, 1, 2], owners)
        digests.add(draw(Natural(), clients=3, **given, test="owner").meta["labels_digest"])
    assert len(digests) == 2


@pytest.mark.parametrize("scheme", [Iid(parts=20), Shards(2, parts=20)], ids=repr)
def test_a_client_of_twenty_shares_is_tested_on_a_twentieth(scheme: Partitioner) -> None:
    partition = draw(scheme, clients=8, test="random")
    assert set(np.diff(partition.train_offsets)) == {50}
    assert set(np.diff(partition.test_offsets)) == {10}
    assert len(np.unique(partition.test_index)) == 80
    assert partition.meta["scheme"] == repr(scheme)


@pytest.mark.parametrize("validation", [0.0, 0.2])
@pytest.mark.parametrize("test", MODES)
def test_four_of_twenty_clients_have_what_they_have_among_twenty(
    test: PersonalTest, validation: float
) -> None:
    twenty = draw(Dirichlet(0.3), test=test, validation=validation)
    four = draw(Dirichlet(0.3, parts=20), clients=4, test=test, validation=validation)
    assert four.clients == 4
    assert four.has_validation == bool(validation)
    np.testing.assert_array_equal(four.train_counts, twenty.train_counts[:4])
    np.testing.assert_array_equal(four.test_counts, twenty.test_counts[:4])
    for client in range(4):
        np.testing.assert_array_equal(four.train(client), twenty.train(client))
        np.testing.assert_array_equal(four.test(client), twenty.test(client))
        if validation:
            np.testing.assert_array_equal(four.validation(client), twenty.validation(client))


class EveryTenth(Partitioner):
    """A user's own scheme, which deals to ten clients even if some of them are missing."""

    @override
    def split(self, labels: np.ndarray, *, clients: int, **_: Any) -> list[np.ndarray]:
        return [np.arange(client, len(labels), clients) for client in range(clients)]

    @override
    def shares(self, clients: int) -> int:
        return 10


def test_a_scheme_of_a_user_can_leave_clients_out_too() -> None:
    partition = draw(EveryTenth(), clients=3)
    assert partition.clients == 3
    for client in range(3):
        np.testing.assert_array_equal(partition.train(client), np.arange(client, 1000, 10))


def test_a_split_test_set_comes_from_the_client_itself() -> None:
    whole = draw(Dirichlet(0.3))
    partition = draw(Dirichlet(0.3), test="split")
    assert partition.meta["test_source"] == "train"
    assert whole.meta["test_source"] == "test"

    for client in range(20):
        both = np.concatenate((partition.train(client), partition.test(client)))
        np.testing.assert_array_equal(np.sort(both), whole.train(client))

    # Each class is divided in the proportion, within one sample, and so is the whole exactly.
    owned = partition.train_counts + partition.test_counts
    assert np.abs(partition.train_counts - 0.8 * owned).max() <= 1
    sizes = owned.sum(1)
    train_sizes = np.rint(0.8 * sizes).clip(1, np.maximum(sizes - 1, 1))
    np.testing.assert_array_equal(partition.train_counts.sum(1), train_sizes)


@pytest.mark.parametrize("test", ["labels", "all"])
def test_test_sets_are_all_samples_of_a_clients_classes_or_of_all(test: PersonalTest) -> None:
    partition = draw(Diversity(2, 30), test=test)
    for client in range(20):
        classes = partition.labels(client) if test == "labels" else np.arange(5)
        expected = np.flatnonzero(np.isin(TEST.y, classes))
        np.testing.assert_array_equal(partition.test(client), expected)


@pytest.mark.parametrize("test", MODES)
def test_more_clients_than_test_samples(test: PersonalTest) -> None:
    few = Samples(x=TEST.x[:7], y=TEST.y[:7])
    partition = draw(Iid(), clients=400, test=test, test_samples=few)
    sizes = np.diff(partition.test_offsets)
    if test in ("match", "labels"):
        assert sizes.min() >= 1
    if test == "random":
        assert sizes.sum() == 7


def test_a_class_without_test_samples_is_left_out() -> None:
    """A client may have no test samples; that is not an error."""
    only_a = Samples(x=TEST.x[TEST.y == 0], y=TEST.y[TEST.y == 0])
    for test in ("match", "labels"):
        partition = draw(Classes(1), clients=5, test=test, test_samples=only_a)
        assert (np.diff(partition.test_offsets) > 0).sum() == 1
    no_class_of_ours = Samples(x=TEST.x[:0], y=TEST.y[:0])
    assert len(draw(Iid(), test_samples=no_class_of_ours).test_index) == 0


def test_the_kind_of_test_does_not_change_training_samples() -> None:
    match = draw(Dirichlet(0.3))
    other = draw(Dirichlet(0.3), test="random")
    np.testing.assert_array_equal(match.train_index, other.train_index)
    assert match.digest != other.digest


def test_a_file_has_all_of_it(tmp_path: Path) -> None:
    partition = draw(Dirichlet(0.3, min_size=5), test="split", train_fraction=0.75)
    path = tmp_path / "run" / "partition.npz"
    partition.save(path)
    with np.load(path, allow_pickle=False) as stored:
        content = dict(stored)
    assert str(content["digest"]) == partition.digest
    assert json.loads(str(content["meta"])) == partition.meta
    assert partition.meta["scheme"] == "Dirichlet(alpha=0.3, min_size=5)"
    assert partition.meta["dataset"] == "Letters"
    assert partition.meta["classes"] == list("abcde")
    assert partition.meta["train_fraction"] == 0.75
    for name in ("train_index", "train_offsets", "test_index", "test_offsets"):
        np.testing.assert_array_equal(content[name], getattr(partition, name))
    assert [entry.name for entry in path.parent.iterdir()] == ["partition.npz"]


def test_a_file_is_small_although_little_time_is_spent_on_it(tmp_path: Path) -> None:
    partition = draw(Shards(2))
    partition.save(tmp_path / "partition.npz")
    with zipfile.ZipFile(tmp_path / "partition.npz") as archive:
        entries = archive.infolist()
    assert {entry.compress_type for entry in entries} == {zipfile.ZIP_DEFLATED}

    # At this size the fastest level is within a fifth of the usual one.
    usual = io.BytesIO()
    np.savez_compressed(usual, **partition._arrays)
    arrays = [entry for entry in entries if entry.filename[:-4] in partition._arrays]
    assert sum(entry.compress_size for entry in arrays) < 1.2 * len(usual.getvalue())


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"clients": 19},
        {"test": "random"},
        {"test": "split"},
        {"test_samples": replace(TEST, y=TEST.y.flip(0))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_description_covers_all_arguments(change: dict[str, object]) -> None:
    assert draw(Iid()).meta == draw(Iid()).meta
    assert draw(Iid()).digest == draw(Iid()).digest
    assert draw(Iid(), **change).meta != draw(Iid()).meta  # type: ignore[arg-type]


def test_the_fraction_matters_only_to_a_split() -> None:
    assert draw(Iid(), train_fraction=0.7).meta == draw(Iid()).meta
    split = [draw(Iid(), test="split", train_fraction=part).meta for part in (0.7, 0.8)]
    assert split[0] != split[1]


def test_the_digest_identifies_the_split() -> None:
    partition = draw(Iid())
    swapped = partition.train_index.copy()
    swapped[[0, -1]] = swapped[[-1, 0]]
    assert replace(partition, train_index=swapped).digest != partition.digest
    assert replace(partition, meta={}).digest == partition.digest


def test_no_client_is_tested_on_what_is_trained_on() -> None:
    """A part of its own is no test set if another client, or the same, has it again."""

    class Twice(Iid):
        def split(self, labels: np.ndarray, **_: object) -> list[np.ndarray]:
            return [np.arange(10), np.array([10, 11, 12, 12])]

    with pytest.raises(UserError, match=r"personal_test: split, but Diversity.* several clients"):
        draw(Diversity(2, 100), test="split")
    with pytest.raises(UserError, match=r"Twice\(\) gives 1 samples to several clients;"):
        draw(Twice(), clients=2, test="split")
    assert draw(Twice(), clients=2).train(1).tolist() == [10, 11, 12, 12]
    assert "14 training samples (13 different), 2 clients" in draw(Twice(), clients=2).table()


def test_the_table_shows_counts_and_what_it_leaves_out() -> None:
    partition = draw(Classes(2), clients=20)
    lines = partition.table(rows=4).splitlines()
    assert lines[0] == "Classes(per_client=2) of Letters, seed 0: 1000 training samples, 20 clients"
    assert lines[1].split() == ["client", "train", "test", "classes", "0", "1", "2", "3", "4"]
    first = [int(cell) for cell in lines[2].split()]
    assert first == [0, 50, len(partition.test(0)), 2, *partition.train_counts[0]]
    assert "16 more clients" in lines[6]
    assert lines[-1] == "sizes 50 to 50, median 50"
    assert "more clients" not in partition.table()
    groups = partition.table(rows=4, groups=["a"] * 3 + ["b"] * 17).splitlines()
    assert [line.split()[1] for line in groups[1:6]] == ["group", "a", "a", "a", "b"]


class Own(Partitioner):
    """A scheme of a user's, with parts that may be wrong."""

    def __init__(self, *parts: list[float]) -> None:
        self.parts = parts

    @override
    def split(self, labels: np.ndarray, **_: Any) -> list[np.ndarray]:
        return [np.array(part) for part in self.parts]


WRONG = [
    ([0, 1],), ([0], [1000]), ([0], [-1]), ([0], [1], [2]), ([0], [1.0]), ([0], []), (),
]  # fmt: skip


@pytest.mark.parametrize("parts", WRONG)
def test_parts_that_are_not_of_these_samples_and_clients_are_refused(parts: Any) -> None:
    assert draw(Own([0], [999, 1]), clients=2).train(1).tolist() == [999, 1]
    with pytest.raises(UserError, match=r"^data\.partition: .*; make 2 of samples 0 to 999"):
        draw(Own(*parts), clients=2)


@pytest.mark.parametrize("key", ["dataset", "partition"])
def test_ranks_with_other_samples_or_another_partition_are_refused(key: str) -> None:
    def gather(own: list[Any]) -> list[Any]:
        ((samples, digest),) = own
        return [*own, (("other", b""), digest) if key == "dataset" else (samples, "other")]

    fleet: Any = SimpleNamespace(ranks=SimpleNamespace(gather=gather))
    partition = SimpleNamespace(digest="own", meta={"labels_digest": "own"})
    contents = Contents("own", "own")
    data: Any = SimpleNamespace(pool="train", partition_=partition, contents=contents)
    with pytest.raises(UserError, match=rf"^data\.{key}: not the same on all ranks"):
        check_built((), fleet, data)
