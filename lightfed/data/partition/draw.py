"""The partition of a run: which samples each client owns, and how it was drawn."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lightfed.data.dataset import Dataset, Samples
from lightfed.data.partition.schemes import Partitioner
from lightfed.utils.atomic_io import write_atomically
from lightfed.utils.errors import require
from lightfed.utils.rng import numpy_generator

Csr = tuple[np.ndarray, np.ndarray]
"""Samples of all clients, one client after the other, and the offset of each: client k owns
samples[offsets[k] : offsets[k + 1]]."""
PersonalTest = Literal["match", "random", "split", "labels", "all"]
Meta = dict[str, str | int | float | list[str]]


@dataclass(frozen=True, eq=False)
class Partition:
    """Which samples each client owns, in flat form, and how that was drawn.

    Attributes:
        train_index: (T,) int32: samples of client 0, of client 1, ..., each ascending, as indices
            into the training set.
        train_offsets: (clients + 1,) int64: client k owns train_index[offsets[k] : offsets[k + 1]].
        test_index: (M,) like train_index, into the set that meta["test_source"] names. With
            "random" and "split", a client may own none if there are very few.
        test_offsets: (clients + 1,) int64.
        train_counts: (clients, classes) int32 samples of each class.
        test_counts: (clients, classes) int32.
        meta: everything it depends on; equal meta means equal draws.
    """

    train_index: np.ndarray
    train_offsets: np.ndarray
    test_index: np.ndarray
    test_offsets: np.ndarray
    train_counts: np.ndarray
    test_counts: np.ndarray
    meta: Meta

    @property
    def clients(self) -> int:
        return len(self.train_offsets) - 1

    def train(self, client: int) -> np.ndarray:
        """The training samples of a client, a view."""
        return self.train_index[self.train_offsets[client] : self.train_offsets[client + 1]]

    def test(self, client: int) -> np.ndarray:
        """The test samples of a client, a view."""
        return self.test_index[self.test_offsets[client] : self.test_offsets[client + 1]]

    def labels(self, client: int) -> np.ndarray:
        """The classes that a client trains on, ascending."""
        return np.flatnonzero(self.train_counts[client])

    def table(self, *, rows: int = 50, groups: Sequence[str] = ()) -> str:
        """Sample counts per class and client as text; clients after `rows` are only counted.

        `groups` say what each client holds, if they are shown.
        """
        import pandas as pd

        samples, different = len(self.train_index), len(np.unique(self.train_index))
        repeated = f" ({different} different)" if different < samples else ""
        counts = self.train_counts[:rows]
        columns = [counts.sum(1), np.diff(self.test_offsets)[:rows], (counts > 0).sum(1)]
        table = pd.DataFrame(dict(zip(("train", "test", "classes"), columns, strict=True)))
        if counts.shape[1] <= 20:
            table = table.join(pd.DataFrame(counts))
        if groups:
            table.insert(0, "group", groups[:rows])
        lines = [
            f"{self.meta['scheme']} of {self.meta['dataset']}, seed {self.meta['seed']}: "
            f"{samples} training samples{repeated}, {self.clients} clients",
            table.rename_axis("client").reset_index().to_string(index=False),
        ]
        if self.clients > rows:
            lines.append(f"... {self.clients - rows} more clients")
        sizes = np.diff(self.train_offsets)
        lines.append(f"sizes {sizes.min()} to {sizes.max()}, median {np.median(sizes):g}")
        return "\n".join(lines)

    @property
    def _arrays(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "meta"}

    @cached_property
    def digest(self) -> str:
        """Identifies the split: equal if and only if every client owns the same samples."""
        state = hashlib.blake2b(digest_size=16)
        for name, array in self._arrays.items():
            state.update(f"{name} {array.dtype.str} {array.shape}".encode())
            state.update(array.ravel())
        return state.hexdigest()

    def save(self, path: str | Path) -> None:
        """Write an npz file, atomically."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"meta": json.dumps(self.meta), "digest": self.digest, **self._arrays}
        write_atomically(path, lambda file: np.savez_compressed(file, **content))


def draw_partition(
    dataset: Dataset,
    scheme: Partitioner,
    *,
    clients: int,
    seed: int,
    test: PersonalTest = "match",
    train_fraction: float = 0.8,
    train: Samples,
    test_samples: Samples,
) -> Partition:
    """Deal the training samples to clients and choose the test samples of each client.

    `test` says where the test samples of a client come from, see `FederatedDataModule`: "match" is
    DisPFL's rule, "random" FlexiFed's, "split" pFedMoE's, and "labels" FedBCD's. `train_fraction`
    is for "split". `seed` names the draw, together with the class of the scheme. `train` and
    `test_samples` are the splits of the data set.

    Raises:
        UserError: the scheme does not fit these samples, or an argument is out of range.
    """
    require(clients >= 1, "model.clients", f"{clients} clients", "give at least one client")
    name, num_classes = type(scheme).__name__, max(1, len(dataset.classes))
    found = f"{name} deals classes, and the samples have none"
    fix = "choose Iid or Quantity; or name a column of classes: label of Hub, by of FromTorch"
    fits = bool(dataset.classes) or not scheme.needs_classes
    require(fits, "data.partition", found, fix)
    # A regression has no classes: all samples are of one.
    labels, test_labels = (
        np.zeros(len(s), np.int64) if s.y.is_floating_point() else s.y.numpy()
        for s in (train, test_samples)
    )
    parts = scheme.split(
        labels,
        clients=clients,
        num_classes=num_classes,
        rng=numpy_generator(seed, f"partition/{name}"),
        groups=None if train.groups is None else train.groups.numpy(),
    )
    whole = all(len(part) and np.asarray(part).dtype.kind in "iu" for part in parts)
    fix = f"make {clients} of samples 0 to {len(labels) - 1}, whole numbers, and none empty"
    found = f"{len(parts)} parts by {scheme!r}"
    require(len(parts) == clients and whole, "data.partition", found, fix)
    owned = flatten(parts)
    del parts  # of a million clients: more than all else
    for end in (int(owned[0].min()), int(owned[0].max())):
        require(0 <= end < len(labels), "data.partition", f"sample {end} by {scheme!r}", fix)
    rng = numpy_generator(seed, f"partition/test/{name}")
    if test == "split":
        again = len(owned[0]) - len(np.unique(owned[0]))
        found = f"split, but {scheme!r} deals {again} samples to clients again"
        fix = "choose match or labels, so that no client is tested on what others train on"
        require(not again, "data.personal_test", found, fix)
        owned, tested = hold_out(
            owned, labels, fraction=train_fraction, num_classes=num_classes, rng=rng
        )
        test_labels = labels
    train_counts = class_counts(owned, labels, num_classes)
    pool_sizes = np.bincount(test_labels, minlength=num_classes)
    if test == "random":
        shares = scheme.shares(clients)
        tested = equal_shares(len(test_labels), shares=shares, clients=clients, rng=rng)
    elif test == "match":
        tested = draw_test(matched_counts(train_counts, pool_sizes), test_labels, rng)
    elif test == "all":
        tested = draw_test(np.tile(pool_sizes, (clients, 1)), test_labels, rng)
    elif test == "labels":
        tested = draw_test(np.where(train_counts > 0, pool_sizes, 0), test_labels, rng)
    state = hashlib.blake2b(digest_size=16)
    for tensor in (train.y, test_samples.y, train.groups):
        state.update(b"none" if tensor is None else tensor.numpy().tobytes())
    return Partition(
        train_index=owned[0],
        train_offsets=owned[1],
        test_index=tested[0].astype(np.int32, copy=False),
        test_offsets=tested[1],
        train_counts=train_counts,
        test_counts=class_counts(tested, test_labels, num_classes),
        meta={
            "scheme": repr(scheme),
            "seed": seed,
            "clients": clients,
            "dataset": dataset.name,
            "classes": list(dataset.classes),
            "train_samples": len(train),
            "test_samples": len(test_samples),
            "labels_digest": state.hexdigest(),
            "test": test,
            "test_source": "train" if test == "split" else "test",
            "train_fraction": train_fraction if test == "split" else 1.0,
        },
    )


def flatten(parts: list[np.ndarray]) -> Csr:
    """Flat form of one array per client; the samples are int32."""
    sizes = np.array([len(part) for part in parts])
    return np.concatenate(parts, dtype=np.int32, casting="same_kind"), _offsets(sizes)


def class_counts(csr: Csr, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """(clients, classes) int32 number of samples per client and class."""
    clients = len(csr[1]) - 1
    cells = np.bincount(_cells(csr, labels, num_classes), minlength=clients * num_classes)
    return cells.reshape(clients, num_classes).astype(np.int32)


def matched_counts(held: np.ndarray, pool_sizes: np.ndarray) -> np.ndarray:
    """Test samples per client and class if clients may share them.

    The rule of DisPFL's published code: a client's share of the test set is ceil(M / clients). Of
    each class it takes ceil(share * fraction of that class among its training samples). `held` are
    (clients, classes) training samples, `pool_sizes` (classes,) test samples, M in total. Returns
    (clients, classes) int64.
    """
    held = held.astype(np.int64)
    share = -(-int(pool_sizes.sum()) // len(held))
    sizes = held.sum(axis=1, keepdims=True)
    # Integers, because ceil(0.1 * 100) can be 11 in floats.
    return np.minimum((held * share + sizes - 1) // sizes, pool_sizes)


def equal_shares(samples: int, *, shares: int, clients: int, rng: np.random.Generator) -> Csr:
    """Cut samples at random into equal shares (within one); each client gets one."""
    owner = rng.permutation(samples) % shares
    offsets = _offsets(np.bincount(owner, minlength=shares)[:clients])
    return np.argsort(owner, kind="stable")[: offsets[-1]], offsets


def draw_test(counts: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> Csr:
    """Draw the test samples of all clients, which may share them.

    Each class is put in random order. A client's samples of it are consecutive in that order, from
    a random place, wrapping around at the end. `counts` (clients, classes) are at most the size of
    the class, `labels` (M,) the classes of the test set.
    """
    owners, members = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for label in np.flatnonzero(counts.any(axis=0)):
        pool = rng.permutation(np.flatnonzero(labels == label))
        wanted = counts[:, label]
        before = _offsets(wanted)[:-1]
        start = rng.integers(len(pool), size=len(wanted))
        step = np.arange(wanted.sum()) - np.repeat(before, wanted)
        members.append(pool[(np.repeat(start, wanted) + step) % len(pool)])
        owners.append(np.repeat(np.arange(len(wanted)), wanted))
    owner, member = np.concatenate(owners), np.concatenate(members)
    return member[np.lexsort((member, owner))], _offsets(counts.sum(axis=1, dtype=np.int64))


def hold_out(
    csr: Csr, labels: np.ndarray, *, fraction: float, num_classes: int, rng: np.random.Generator
) -> tuple[Csr, Csr]:
    """Divide the samples of each client into a training and a test part, class by class.

    A client keeps at least one training sample and, if it owns two samples, one test sample.
    `fraction` is the part of a client's samples used for training. `rng` draws the samples, and the
    classes that are rounded up.
    """
    index, offsets = csr
    sizes = np.diff(offsets)
    owned = class_counts(csr, labels, num_classes)
    kept = np.floor(owned * fraction).astype(np.int64)
    total = np.clip(np.rint(sizes * fraction), 1, np.maximum(sizes - 1, 1)).astype(np.int64)
    # Round up the classes with the largest remainders; the jitter only breaks ties.
    remainder = owned * fraction - kept + rng.random(owned.shape) * 1e-6
    remainder[owned == 0] = -1.0
    rank = np.argsort(np.argsort(-remainder, axis=1), axis=1)
    kept += rank < (total - kept.sum(axis=1))[:, None]
    cell = _cells(csr, labels, num_classes)
    order = np.lexsort((rng.random(len(index)), cell))
    first = _offsets(owned.ravel())[cell[order]]
    trains = np.empty(len(index), dtype=bool)
    trains[order] = np.arange(len(index)) - first < kept.ravel()[cell[order]]
    train_offsets = _offsets(kept.sum(axis=1))
    return (index[trains], train_offsets), (index[~trains], offsets - train_offsets)


def _offsets(sizes: np.ndarray) -> np.ndarray:
    """(n + 1,) the start of each of n consecutive pieces, and the end of the last."""
    return np.concatenate(([0], np.cumsum(sizes)))


def _cells(csr: Csr, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """(samples,) client * num_classes + class of each sample."""
    index, offsets = csr
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)) * num_classes + labels[index]
