"""The partition of a run: which samples each client owns, and how that was drawn."""

import hashlib
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from lightfed.data.dataset import Dataset, Samples
from lightfed.data.partition.schemes import Natural, Partitioner
from lightfed.data.partition.sorting import distinct, stable_order
from lightfed.data.partition.unseen import Unseen, unseen_clients
from lightfed.utils.atomic_io import write_atomically
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator

Csr = tuple[np.ndarray, np.ndarray]
"""Samples of all clients, one client after the other, and the offset of each: client k owns
samples[offsets[k] : offsets[k + 1]]."""
PersonalTest = Literal["auto", "match", "random", "split", "labels", "all", "owner"]
Meta = dict[str, str | int | float | list[str]]

# A table of counts by class is shown for at most this many classes.
_MOST_COLUMNS = 20

# Of zlib, for the file of a partition. The usual level, 6, takes ten times as long for a file of
# about the same size: a second and a half for three million samples.
_COMPRESSION = 1


@dataclass(frozen=True, eq=False)
class Partition:
    """Which samples each client owns, in flat form, and how that was drawn.

    Attributes:
        train_index: The samples of client 0, of client 1, and so on, each ascending, as indices
            into the training set. (T,) int32.
        train_offsets: Client k owns train_index[train_offsets[k] : train_offsets[k + 1]].
            (clients + 1,) int64.
        test_index: The same for test samples, as indices into the set that meta["test_source"]
            names. (M,) int32. With "random" and "split", a client may own none if there are very
            few, and with "owner" if its owners have none.
        test_offsets: The offsets into `test_index`. (clients + 1,) int64.
        train_counts: The training samples of each client and class. (clients, classes) int32.
        test_counts: The test samples of each client and class. (clients, classes) int32.
        meta: Everything that the partition depends on. Equal meta means equal draws.
        validation_index: The samples that clients keep for choices, and do not train on, in the
            form of `train_index`. (V,) int32, empty without validation.
        validation_offsets: The offsets into `validation_index`. (clients + 1,) int64; empty
            without validation.
        unseen: The clients that never train, ascending. (U,) int32, empty by default.
    """

    train_index: np.ndarray
    train_offsets: np.ndarray
    test_index: np.ndarray
    test_offsets: np.ndarray
    train_counts: np.ndarray
    test_counts: np.ndarray
    meta: Meta
    validation_index: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    validation_offsets: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    unseen: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.train_offsets) - 1

    def train(self, client: int) -> np.ndarray:
        """Return the training samples of a client, as a view."""
        return self.train_index[self.train_offsets[client] : self.train_offsets[client + 1]]

    def test(self, client: int) -> np.ndarray:
        """Return the test samples of a client, as a view."""
        return self.test_index[self.test_offsets[client] : self.test_offsets[client + 1]]

    @property
    def has_validation(self) -> bool:
        """Whether clients keep validation samples."""
        return len(self.validation_offsets) > 0

    def validation(self, client: int) -> np.ndarray:
        """Return the validation samples of a client, as a view."""
        start, end = self.validation_offsets[client : client + 2]
        return self.validation_index[start:end]

    @cached_property
    def seen(self) -> list[int]:
        """The clients that can train, ascending."""
        return np.setdiff1d(np.arange(self.clients), self.unseen).tolist()

    def labels(self, client: int) -> np.ndarray:
        """Return the classes that a client trains on, ascending."""
        return np.flatnonzero(self.train_counts[client])

    def table(self, *, rows: int = 50, groups: Sequence[str] = ()) -> str:
        """Return the sample counts of each client and class as text.

        Args:
            rows: The number of clients to show. Further ones are only counted.
            groups: The name of each client's group, for a column of its own; empty for no column.
        """
        # pandas takes half a second to import, and most runs print no table.
        import pandas as pd

        samples = len(self.train_index)
        title = (
            f"{self.meta['scheme']} of {self.meta['dataset']}, seed {self.meta['seed']}: "
            f"{samples} training samples"
        )
        different = len(distinct(self.train_index, total=int(self.train_index.max()) + 1))
        if different < samples:
            title += f" ({different} different)"
        title += f", {self.clients} clients"
        if len(self.unseen):
            title += f", of which {len(self.unseen)} never train"

        counts = self.train_counts[:rows]
        table = pd.DataFrame(
            {
                "train": counts.sum(1),
                "test": np.diff(self.test_offsets)[:rows],
                "classes": (counts > 0).sum(1),
            }
        )
        if self.has_validation:
            table.insert(1, "validation", np.diff(self.validation_offsets)[:rows])
        if len(self.unseen):
            is_unseen = np.isin(np.arange(len(table)), self.unseen)
            table.insert(0, "unseen", np.where(is_unseen, "unseen", ""))
        if counts.shape[1] <= _MOST_COLUMNS:
            table = table.join(pd.DataFrame(counts))
        if groups:
            table.insert(0, "group", groups[:rows])
        lines = [title, table.rename_axis("client").reset_index().to_string(index=False)]

        if self.clients > rows:
            lines.append(f"... {self.clients - rows} more clients")
        sizes = np.diff(self.train_offsets)
        lines.append(f"sizes {sizes.min()} to {sizes.max()}, median {np.median(sizes):g}")
        return "\n".join(lines)

    def numbers(self, *, groups: Sequence[str] = ()) -> dict[str, Any]:
        """Return the sample counts of each client and class, as values for JSON.

        Args:
            groups: The name of each client's group; empty if all have the same model.
        """
        clients = []
        for client in range(self.clients):
            clients.append(
                {
                    "client": client,
                    "group": groups[client] if groups else None,
                    "train": len(self.train(client)),
                    "validation": len(self.validation(client)) if self.has_validation else 0,
                    "test": len(self.test(client)),
                    "train_per_class": self.train_counts[client].tolist(),
                    "test_per_class": self.test_counts[client].tolist(),
                }
            )

        numbers = {
            "scheme": self.meta["scheme"],
            "data": self.meta["dataset"],
            "seed": self.meta["seed"],
            "digest": self.digest,
            "clients": clients,
        }
        if len(self.unseen):
            numbers["unseen"] = self.unseen.tolist()
        return numbers

    @property
    def _arrays(self) -> dict[str, Any]:
        """All fields but `meta`, by name; without validation or unseen clients, none of theirs."""
        arrays = {}
        for each in fields(self):
            is_unused = each.name.startswith("validation") and not self.has_validation
            is_unused |= each.name == "unseen" and not len(self.unseen)
            if each.name != "meta" and not is_unused:
                arrays[each.name] = getattr(self, each.name)
        return arrays

    @cached_property
    def digest(self) -> str:
        """Identifies the split: equal if and only if every client owns the same samples."""
        state = hashlib.blake2b(digest_size=16)
        for name, array in self._arrays.items():
            state.update(f"{name} {array.dtype.str} {array.shape}".encode())
            state.update(array.ravel())
        return state.hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the partition to an npz file, atomically. Its folder is made if it is missing."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"meta": json.dumps(self.meta), "digest": self.digest, **self._arrays}
        write_atomically(path, lambda file: _write_arrays(file, content))


def _write_arrays(file: IO[bytes], arrays: dict[str, Any]) -> None:
    """Write what `np.savez_compressed` writes, which has no argument for the level."""
    with zipfile.ZipFile(
        file, "w", compression=zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION
    ) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)


def draw_partition(
    dataset: Dataset,
    scheme: Partitioner,
    *,
    clients: int,
    seed: int,
    test: PersonalTest = "auto",
    train_fraction: float = 0.8,
    validation: float = 0.0,
    unseen: Unseen = 0.0,
    train: Samples,
    test_samples: Samples,
) -> Partition:
    """Deal the training samples to clients, and choose the test samples of each client.

    Args:
        dataset: The data set.
        scheme: How training samples are dealt.
        clients: The number of clients.
        seed: Names the draw, together with the class of the scheme.
        test: Where the test samples of a client come from, see `FederatedDataModule`. "match" is
            the rule of DisPFL, "random" that of FlexiFed, "split" that of pFedMoE, "labels" that of
            FedBCD, and "owner" that of LEAF.
        train_fraction: The part of a client's samples that it trains on with "split".
        validation: The part of its remaining training samples that a client keeps for validation.
            The test samples do not depend on it.
        unseen: The clients that never train: their share, or their numbers or owners. No sample of
            any client depends on it.
        train: The training split of the data set.
        test_samples: Its test split.

    Raises:
        UserError: If the scheme does not fit these samples, or an argument is out of range.
    """
    _check_arguments(dataset, scheme, clients)
    name = type(scheme).__name__
    num_classes = max(1, len(dataset.classes))
    labels = _classes_of(train)

    # All parts are drawn, those of missing clients too, so that the clients of the run have what
    # they would have among all: its samples to train on, to choose by, and to be tested on.
    shares = scheme.shares(clients)
    owned = _deal(scheme, train, labels, clients=shares, num_classes=num_classes, seed=seed)

    by_owner: Csr | None = None
    if test == "auto":
        by_owner = _own_test_of_all(owned, scheme, train, test_samples)
        test = "match" if by_owner is None else "owner"
    elif test == "owner":
        by_owner = _own_test(owned, scheme, train, test_samples)

    test_rng = numpy_generator(seed, f"partition/test/{name}")
    if test == "split":
        _check_no_sample_twice(owned, scheme, total=len(labels))
        test_labels = labels
        owned, tested = hold_out(
            owned, labels, fraction=train_fraction, num_classes=num_classes, rng=test_rng
        )
        train_counts = class_counts(owned, labels, num_classes)
    else:
        test_labels = _classes_of(test_samples)
        train_counts = class_counts(owned, labels, num_classes)
        tested = by_owner or _choose_test(test, train_counts, test_labels, rng=test_rng)

    meta: Meta = {
        "scheme": repr(scheme),
        "seed": seed,
        "clients": clients,
        "dataset": dataset.name,
        "classes": list(dataset.classes),
        "train_samples": len(train),
        "test_samples": len(test_samples),
        "labels_digest": _digest_of_labels(train, test_samples, test),
        "test": test,
        "test_source": "train" if test == "split" else "test",
        "train_fraction": train_fraction if test == "split" else 1.0,
    }

    kept_for_validation: dict[str, np.ndarray] = {}
    if validation:
        _check_no_sample_twice(owned, scheme, total=len(labels), key="data.validation")
        owned, kept = hold_out(
            owned,
            labels,
            fraction=1.0 - validation,
            num_classes=num_classes,
            rng=numpy_generator(seed, f"partition/validation/{name}"),
        )
        if len(kept[0]) == 0:
            raise UserError(
                key="data.validation",
                found=f"{validation}, and no client has more than one training sample",
                fix="set it to 0, or give clients more samples",
            )
        train_counts = class_counts(owned, labels, num_classes)
        kept = _first(kept, clients)
        kept_for_validation = {"validation_index": kept[0], "validation_offsets": kept[1]}
        meta["validation"] = validation

    owned = _first(owned, clients)
    tested = _first(tested, clients)

    never_train = unseen_clients(
        unseen,
        clients=clients,
        seed=seed,
        owners_of_clients=None
        if isinstance(unseen, int | float)
        else _owners_of_clients(owned, train),
        names=train.owners,
    )
    if len(never_train):
        meta["unseen"] = len(never_train)

    return Partition(
        train_index=owned[0],
        train_offsets=owned[1],
        test_index=tested[0].astype(np.int32, copy=False),
        test_offsets=tested[1],
        train_counts=train_counts[:clients],
        test_counts=class_counts(tested, test_labels, num_classes),
        meta=meta,
        unseen=never_train,
        **kept_for_validation,
    )


def _owners_of_clients(owned: Csr, train: Samples) -> list[np.ndarray] | None:
    """Return the numbers of the owners of each client's samples, if the data set names owners."""
    if train.groups is None or train.owners is None:
        return None
    index, offsets = owned
    owner_of_sample = train.groups.numpy()[index]
    return [np.unique(owner_of_sample[start:end]) for start, end in pairwise(offsets)]


def _check_arguments(dataset: Dataset, scheme: Partitioner, clients: int) -> None:
    """Refuse no clients, and a scheme that deals classes which the samples do not have."""
    if clients < 1:
        raise UserError(
            key="model.clients", found=f"{clients} clients", fix="give at least one client"
        )
    if scheme.needs_classes and not dataset.classes:
        raise UserError(
            key="data.partition",
            found=f"{type(scheme).__name__} splits by classes, but the samples have none",
            fix=(
                "choose Iid or Quantity; or name a column of classes: label of Hub, by of FromTorch"
            ),
        )


def _classes_of(samples: Samples) -> np.ndarray:
    """Return the class of each sample, (N,). In a regression all samples are of one class."""
    if samples.y.is_floating_point():
        return np.zeros(len(samples), np.int64)
    return samples.y.numpy()


def _deal(
    scheme: Partitioner,
    train: Samples,
    labels: np.ndarray,
    *,
    clients: int,
    num_classes: int,
    seed: int,
) -> Csr:
    """Let a scheme deal the training samples, and check what it returns: it may be a user's own."""
    parts = scheme.split(
        labels,
        clients=clients,
        num_classes=num_classes,
        rng=numpy_generator(seed, f"partition/{type(scheme).__name__}"),
        groups=None if train.groups is None else train.groups.numpy(),
    )

    fix = f"make {clients} of samples 0 to {len(labels) - 1}, whole numbers, and none empty"
    are_indices = all(len(part) and np.asarray(part).dtype.kind in "iu" for part in parts)
    if len(parts) != clients or not are_indices:
        raise UserError(key="data.partition", found=f"{len(parts)} parts by {scheme!r}", fix=fix)

    owned = flatten(parts)
    for sample in (int(owned[0].min()), int(owned[0].max())):
        if not 0 <= sample < len(labels):
            raise UserError(key="data.partition", found=f"sample {sample} by {scheme!r}", fix=fix)

    # Only the flat form is returned: an array for each of a million clients is more than all else.
    return owned


def _check_no_sample_twice(
    owned: Csr, scheme: Partitioner, *, total: int, key: str = "data.personal_test"
) -> None:
    """Refuse to split clients' samples if one client could be tested on what another trains on.

    Args:
        owned: The samples of each client.
        scheme: How they were dealt.
        total: The number of samples of the data set.
        key: The setting that asks for the split: `data.personal_test` or `data.validation`.
    """
    samples = owned[0]
    repeated = len(samples) - len(distinct(samples, total=total))
    if not repeated:
        return

    found = f"{scheme!r} gives {repeated} samples to several clients"
    if key == "data.personal_test":
        fix = "choose match or labels, so that no client is tested on what others train on"
        raise UserError(key, f"split, but {found}", fix)
    fix = "give 0, or a partition that deals every sample once"
    raise UserError(key, f"not 0, and {found}", fix)


def _own_test(owned: Csr, scheme: Partitioner, train: Samples, test: Samples) -> Csr:
    """Return for each client the test samples of the owners whose training samples it has.

    Raises:
        UserError: Samples have no owners, or those of one owner are at several clients.
    """
    for split, samples in (("training", train), ("test", test)):
        if samples.groups is None:
            raise UserError(
                key="data.personal_test",
                found=f"owner, but the {split} samples have no owners",
                fix="name their column, such as group of Hub; or choose match",
            )
    assert train.groups is not None
    assert test.groups is not None

    index, offsets = owned
    clients = len(offsets) - 1
    client_of_sample = np.repeat(np.arange(clients), np.diff(offsets))
    owner_of_sample = train.groups.numpy()[index]
    owners, first = np.unique(owner_of_sample, return_index=True)
    client_of_owner = client_of_sample[first]

    strays = client_of_owner[np.searchsorted(owners, owner_of_sample)] != client_of_sample
    if strays.any():
        raise UserError(
            key="data.personal_test",
            found=f"owner, but {scheme!r} gives samples of one owner to several clients",
            fix="set data.partition to Natural, or choose match",
        )

    tested_owner = test.groups.numpy()
    place = np.minimum(np.searchsorted(owners, tested_owner), len(owners) - 1)
    # The test samples of owners that no client trains on belong to no client: -1.
    client = np.where(owners[place] == tested_owner, client_of_owner[place], -1)
    order = stable_order(client)
    bounds = np.searchsorted(client[order], np.arange(clients + 1))
    return order[bounds[0] :], bounds - bounds[0]


def _own_test_of_all(owned: Csr, scheme: Partitioner, train: Samples, test: Samples) -> Csr | None:
    """Return `_own_test` if clients are owners, and each of them has test samples; else None."""
    have_owners = train.groups is not None and test.groups is not None
    if not isinstance(scheme, Natural) or not have_owners:
        return None
    tested = _own_test(owned, scheme, train, test)
    has_all = bool((np.diff(tested[1]) > 0).all())
    return tested if has_all else None


def _choose_test(
    test: PersonalTest,
    train_counts: np.ndarray,
    test_labels: np.ndarray,
    *,
    rng: np.random.Generator,
) -> Csr:
    """Choose each client's samples from the test set.

    Args:
        test: The rule: random, match, labels or all.
        train_counts: The training samples of each client and class, (clients, classes).
        test_labels: The class of each test sample, (M,).
        rng: Draws the samples.
    """
    clients = len(train_counts)
    if test == "random":
        return equal_shares(len(test_labels), clients=clients, rng=rng)

    pool_sizes = np.bincount(test_labels, minlength=train_counts.shape[1])
    if test == "match":
        counts = matched_counts(train_counts, pool_sizes)
    elif test == "labels":
        counts = np.where(train_counts > 0, pool_sizes, 0)
    else:
        assert test == "all"
        counts = np.tile(pool_sizes, (clients, 1))
    return draw_test(counts, test_labels, rng)


def _digest_of_labels(train: Samples, test: Samples, rule: PersonalTest) -> str:
    """Return a digest of what draws depend on: the labels of both splits, and natural owners."""
    state = hashlib.blake2b(digest_size=16)
    tensors = [train.y, test.y, train.groups]
    if rule == "owner":
        tensors.append(test.groups)
    for tensor in tensors:
        state.update(b"none" if tensor is None else tensor.numpy().tobytes())
    return state.hexdigest()


def flatten(parts: list[np.ndarray]) -> Csr:
    """Return the flat form of one array of samples for each client. The samples become int32."""
    sizes = np.array([len(part) for part in parts])
    samples = np.concatenate(parts, dtype=np.int32, casting="same_kind")
    return samples, _offsets(sizes)


def _first(csr: Csr, clients: int) -> Csr:
    """Return the samples of the first clients alone."""
    index, offsets = csr
    return index[: offsets[clients]], offsets[: clients + 1]


def class_counts(csr: Csr, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the number of samples of each client and class, (clients, classes) int32."""
    clients = len(csr[1]) - 1
    cells = _cells(csr, labels, num_classes)
    counts = np.bincount(cells, minlength=clients * num_classes)
    return counts.reshape(clients, num_classes).astype(np.int32)


def matched_counts(held: np.ndarray, pool_sizes: np.ndarray) -> np.ndarray:
    """Return how many test samples of each class a client gets, if clients may share them.

    The rule of DisPFL's published code: a client's share of the test set is ceil(M / clients). Of
    each class it takes ceil(share * fraction of that class among its training samples).

    Args:
        held: The training samples of each client and class, (clients, classes).
        pool_sizes: The test samples of each class, (classes,), M in total.

    Returns:
        (clients, classes) int64, at most `pool_sizes`.
    """
    held = held.astype(np.int64)
    share = -(-int(pool_sizes.sum()) // len(held))
    sizes = held.sum(axis=1, keepdims=True)
    # In whole numbers, because ceil(0.1 * 100) can be 11 in floats.
    wanted = (held * share + sizes - 1) // sizes
    return np.minimum(wanted, pool_sizes)


def equal_shares(samples: int, *, clients: int, rng: np.random.Generator) -> Csr:
    """Cut samples at random into equal shares (within one), one for each client."""
    owner = rng.permutation(samples) % clients
    return stable_order(owner), _offsets(np.bincount(owner, minlength=clients))


def draw_test(counts: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> Csr:
    """Draw the test samples of all clients, which may share them.

    Each class is put in random order. A client's samples of it are consecutive in that order, from
    a random place, wrapping around at the end.

    Args:
        counts: How many samples each client gets of each class, (clients, classes). At most the
            size of the class.
        labels: The class of each test sample, (M,).
        rng: Draws the orders and the places.
    """
    owners = [np.empty(0, dtype=np.int64)]
    members = [np.empty(0, dtype=np.int64)]
    for label in np.flatnonzero(counts.any(axis=0)):
        pool = rng.permutation(np.flatnonzero(labels == label))
        wanted = counts[:, label]
        start = rng.integers(len(pool), size=len(wanted))

        # The number of each sample among its client's: 0, 1, ..., 0, 1, ...
        first = np.repeat(_offsets(wanted)[:-1], wanted)
        step = np.arange(wanted.sum()) - first
        members.append(pool[(np.repeat(start, wanted) + step) % len(pool)])
        owners.append(np.repeat(np.arange(len(wanted)), wanted))

    owner = np.concatenate(owners)
    member = np.concatenate(members)
    by_owner_then_member = np.lexsort((member, owner))
    return member[by_owner_then_member], _offsets(counts.sum(axis=1, dtype=np.int64))


def hold_out(
    csr: Csr, labels: np.ndarray, *, fraction: float, num_classes: int, rng: np.random.Generator
) -> tuple[Csr, Csr]:
    """Divide the samples of each client into a training and a test part, class by class.

    A client keeps at least one training sample and, if it owns two samples, one test sample.

    Args:
        csr: The samples of each client.
        labels: The class of each sample of the data set, (N,).
        fraction: The part of a client's samples that is used for training.
        num_classes: The number of classes.
        rng: Draws the samples, and the classes that are rounded up.

    Returns:
        The training part and the test part.
    """
    index, offsets = csr
    sizes = np.diff(offsets)
    owned = class_counts(csr, labels, num_classes)

    # How many samples of each class a client trains on: first rounded down.
    kept = np.floor(owned * fraction).astype(np.int64)
    total = np.clip(np.rint(sizes * fraction), 1, np.maximum(sizes - 1, 1)).astype(np.int64)
    # Then the classes with the largest remainders are rounded up. The jitter only breaks ties.
    remainder = owned * fraction - kept + rng.random(owned.shape) * 1e-6
    remainder[owned == 0] = -1.0
    rank = np.argsort(np.argsort(-remainder, axis=1), axis=1)
    kept += rank < (total - kept.sum(axis=1))[:, None]

    # Put the samples of each client and class in random order; the first of them train.
    cell = _cells(csr, labels, num_classes)
    order = np.lexsort((rng.random(len(index)), cell))
    start_of_cell = _offsets(owned.ravel())[cell[order]]
    number_in_cell = np.arange(len(index)) - start_of_cell
    trains = np.empty(len(index), dtype=bool)
    trains[order] = number_in_cell < kept.ravel()[cell[order]]

    train_offsets = _offsets(kept.sum(axis=1))
    return (index[trains], train_offsets), (index[~trains], offsets - train_offsets)


def _offsets(sizes: np.ndarray) -> np.ndarray:
    """Return the start of each of n consecutive pieces, and the end of the last, (n + 1,)."""
    return np.concatenate(([0], np.cumsum(sizes)))


def _cells(csr: Csr, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return client * num_classes + class for each sample of all clients, (samples,)."""
    index, offsets = csr
    first_cell = np.arange(len(offsets) - 1) * num_classes
    cells = np.repeat(first_cell, np.diff(offsets))
    # In place: many clients have tens of millions of samples together.
    cells += labels[index]
    return cells
