"""The partition of a run: which samples each client owns, and how it was drawn.

A run writes its partition once and reads it afterwards, so that restarts use the same one even if
another version of numpy would draw differently.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from lightfed.data.datasets.dataset import Dataset, Samples
from lightfed.data.partition import matching
from lightfed.data.partition.compact import compact, expand, write
from lightfed.data.partition.partitioner import Partitioner
from lightfed.utils.atomic_io import write_atomically
from lightfed.utils.errors import UserError, reason, require
from lightfed.utils.rng import numpy_generator

PersonalTest = Literal["match", "disjoint", "random", "split", "labels"]
Meta = dict[str, str | int | float | list[str]]


@dataclass(frozen=True, eq=False)
class Partition:
    """Which samples each client owns, in flat form, and how that was drawn.

    Attributes:
        train_index: (T,) int32 if it fits, else int64: samples of client 0, of client 1, ..., each
            ascending, as indices into the training set.
        train_offsets: (clients + 1,) int64: client k owns train_index[offsets[k] : offsets[k + 1]].
        test_index: (M,) like train_index, into the set that meta["test_source"] names. With
            "disjoint", "random" and "split", a client may own none if there are very few.
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

    def table(self, *, rows: int = 50) -> str:
        """Sample counts per class and client as text; clients after `rows` are only counted."""
        classes = self.train_counts.shape[1]
        shown = range(classes if classes <= 20 else 0)
        columns = ["train", "test", "classes"]
        samples, different = len(self.train_index), len(np.unique(self.train_index))
        repeated = f" ({different} different)" if different < samples else ""
        lines = [
            f"{self.meta['scheme']} of {self.meta['dataset']}, seed {self.meta['seed']}: "
            f"{samples} training samples{repeated}, {self.clients} clients",
            _row("client", columns, shown),
        ]
        for client in range(min(self.clients, rows)):
            counts = self.train_counts[client]
            sums = [counts.sum(), len(self.test(client)), (counts > 0).sum()]
            lines.append(_row(client, sums, counts[: len(shown)]))
        if self.clients > rows:
            lines.append(f"{'...':>8}  {self.clients - rows} more clients")
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
        content: dict[str, Any] = {"meta": json.dumps(self.meta), "digest": self.digest}
        write_atomically(path, lambda file: write(file, compact(self._arrays) | content))

    @classmethod
    def load(cls, path: str | Path) -> "Partition":
        """Read a file that `save` wrote.

        Raises:
            UserError: there is no such file, or its content has changed.
        """
        try:
            with np.load(path, allow_pickle=False) as stored:
                content = dict(stored)
            digest, meta = str(content.pop("digest")), json.loads(str(content.pop("meta")))
            partition = cls(**expand(content), meta=meta)
        except Exception as error:  # a damaged archive can raise anything
            raise UserError(str(path), f"not a partition ({reason(error)})", "remove it") from error
        matches = partition.digest == digest
        require(matches, str(path), "its content does not match its digest", "remove it")
        return partition


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

    Args:
        dataset: provides the names of the classes.
        scheme: deals the training samples.
        clients: number of clients.
        seed: names the draw, together with the class of the scheme.
        test: where the test samples of a client come from, see `FederatedDataModule`: "match" is
            DisPFL's rule, "disjoint" nearly that of HeteroFL, "random" FlexiFed's, "split"
            pFedMoE's, and "labels" FedBCD's.
        train_fraction: with "split", the part used for training.
        train: the training set.
        test_samples: the test set.

    Raises:
        UserError: the scheme does not fit these samples, or an argument is out of range.
    """
    check_personal_test(test, train_fraction)
    require(clients >= 1, "model.clients", f"{clients} clients", "give at least one client")
    name, num_classes = type(scheme).__name__, len(dataset.classes)
    labels, test_labels = train.y.numpy(), test_samples.y.numpy()
    dtype = np.int32 if max(len(train), len(test_samples)) <= np.iinfo(np.int32).max else np.int64
    parts = scheme.split(
        labels,
        clients=clients,
        num_classes=num_classes,
        rng=numpy_generator(seed, f"partition/{name}"),
        groups=None if train.groups is None else train.groups.numpy(),
    )
    sizes = np.array([len(part) for part in parts])  # an empty part may be of any type
    found = f"{scheme!r} left client {sizes.argmin() if len(sizes) else 0} empty"
    require(len(sizes) > 0 and sizes.min() > 0, "data.partition", found, "use another")
    types = {str(np.asarray(part).dtype) for part in parts}
    found = f"{len(sizes)} parts of {', '.join(sorted(types))} by {scheme!r}"
    fix = f"make {clients} of samples 0 to {len(labels) - 1}, whole numbers"
    whole = all(np.issubdtype(name, np.integer) for name in types)
    require(len(sizes) == clients and whole, "data.partition", found, fix)
    owned = matching.flatten(parts, dtype)
    del parts  # of a million clients: more than all else
    for end in (int(owned[0].min()), int(owned[0].max())):
        require(0 <= end < len(labels), "data.partition", f"sample {end} by {scheme!r}", fix)
    rng = numpy_generator(seed, f"partition/test/{name}")
    if test == "split":
        _check_dealt_once(owned, scheme)
        owned, tested = matching.hold_out(
            owned, labels, fraction=train_fraction, num_classes=num_classes, rng=rng
        )
        test_labels = labels
    train_counts = matching.class_counts(owned, labels, num_classes)
    if test != "split":
        tested = _test_of(train_counts, test_labels, test, rng, shares=scheme.shares(clients))
    state = hashlib.blake2b(digest_size=16)
    for tensor in (train.y, test_samples.y, train.groups):
        state.update(b"none" if tensor is None else tensor.numpy().tobytes())
    return Partition(
        train_index=owned[0],
        train_offsets=owned[1],
        test_index=tested[0].astype(dtype, copy=False),
        test_offsets=tested[1],
        train_counts=train_counts,
        test_counts=matching.class_counts(tested, test_labels, num_classes),
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


def _check_dealt_once(owned: matching.Csr, scheme: Partitioner) -> None:
    """Reject samples dealt twice: a client would be tested on what it or another trains on."""
    index, offsets = owned
    order = np.argsort(index, kind="stable")
    again = np.flatnonzero(np.diff(index[order]) == 0)
    if not len(again):
        return
    places = order[again[0] : again[0] + 2]
    one, other = (np.searchsorted(offsets, places, side="right") - 1).tolist()
    found = f"split, but {scheme!r} deals sample {index[places[0]]} to clients {one} and {other}"
    fix = "choose match or labels, so that no client is tested on what others train on"
    raise UserError("data.personal_test", found, fix)


def check_personal_test(test: str, train_fraction: float) -> None:
    """Refuse an unknown kind of personal test, and a fraction out of range."""
    known = get_args(PersonalTest)
    require(test in known, "data.personal_test", repr(test), f"choose one of {', '.join(known)}")
    fix = "give a number between 0 and 1, as 0.8"
    require(0.0 < train_fraction < 1.0, "data.train_fraction", train_fraction, fix)


def _test_of(
    held: np.ndarray,
    labels: np.ndarray,
    test: PersonalTest,
    rng: np.random.Generator,
    *,
    shares: int,
) -> matching.Csr:
    """The samples of each client from the common test set."""
    if test == "random":
        return matching.equal_shares(len(labels), shares=shares, clients=len(held), rng=rng)
    pool_sizes = np.bincount(labels, minlength=held.shape[1])
    if test == "match":
        counts = matching.matched_counts(held, pool_sizes)
    elif test == "labels":
        counts = np.where(held > 0, pool_sizes, 0)
    else:
        counts = matching.dealt_counts(held, pool_sizes, rng)
    return matching.draw_test(counts, labels, rng, shared=test != "disjoint")


def _row(client: object, sums: Iterable[object], counts: Iterable[object]) -> str:
    train, test, classes = sums
    cells = "".join(f"{count:>7}" for count in counts)
    return f"{client:>8}{train:>8}{test:>8}{classes:>9}  {cells}"
