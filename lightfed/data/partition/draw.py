"""Which samples each client owns, kept with where it came from; and every scheme under one name.

A run writes its partition once and reads it from then on, so that every restart works on the same
split, whatever its version of numpy draws.
"""

import hashlib
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from lightfed.data.datasets.dataset import Dataset, Samples
from lightfed.data.partition.dirichlet import Dirichlet, DirichletClient, Quantity
from lightfed.data.partition.matching import (
    Csr,
    class_counts,
    dealt_counts,
    draw_test,
    equal_shares,
    flatten,
    hold_out,
    matched_counts,
)
from lightfed.data.partition.partitioner import Partitioner
from lightfed.data.partition.schemes import Classes, Diversity, Iid, Natural, Shards
from lightfed.utils.atomic_io import write_atomically
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator

__all__ = [
    "Classes",
    "Dirichlet",
    "DirichletClient",
    "Diversity",
    "Iid",
    "Natural",
    "Partition",
    "Partitioner",
    "PersonalTest",
    "Quantity",
    "Shards",
    "draw_partition",
]

PersonalTest = Literal["match", "disjoint", "random", "split", "labels"]
Meta = dict[str, str | int | float | list[str]]

_ARRAYS = (
    "train_index",
    "train_offsets",
    "test_index",
    "test_offsets",
    "train_counts",
    "test_counts",
)


@dataclass(frozen=True, eq=False)
class Partition:
    """Which samples each client owns, in flat form, and where that came from.

    Attributes:
        train_index: (T,) int32 where it fits, else int64: samples of client 0, of client 1, ...,
            each ascending, as indices into the training set.
        train_offsets: (clients + 1,) int64: client k owns train_index[offsets[k] : offsets[k + 1]].
        test_index: (M,) like train_index, into the set that meta["test_source"] names. With
            "disjoint", "random" and "split" a client may own none where there are very few.
        test_offsets: (clients + 1,) int64.
        train_counts: (clients, classes) int32 samples of each class.
        test_counts: (clients, classes) int32.
        meta: everything that it depends on; what was drawn from equal meta is equal.
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
        """The samples that a client is tested on, a view."""
        return self.test_index[self.test_offsets[client] : self.test_offsets[client + 1]]

    def labels(self, client: int) -> np.ndarray:
        """The classes that a client trains on, ascending."""
        return np.flatnonzero(self.train_counts[client])

    def table(self, *, rows: int = 50) -> str:
        """Samples of each class and client as text; clients beyond `rows` are only counted."""
        classes = self.train_counts.shape[1]
        shown = range(classes) if classes <= 20 else range(0)
        lines = [
            f"{self.meta['scheme']} of {self.meta['dataset']}, seed {self.meta['seed']}: "
            f"{len(self.train_index)} training samples, {self.clients} clients",
            f"{'client':>8}{'train':>8}{'test':>8}{'classes':>9}  "
            + "".join(f"{label:>7}" for label in shown),
        ]
        for client in range(min(self.clients, rows)):
            counts = self.train_counts[client]
            lines.append(
                f"{client:>8}{counts.sum():>8}{len(self.test(client)):>8}{(counts > 0).sum():>9}  "
                + "".join(f"{counts[label]:>7}" for label in shown)
            )
        sizes = np.diff(self.train_offsets)
        if self.clients > rows:
            lines.append(f"{'...':>8}  {self.clients - rows} more clients")
        lines.append(f"sizes {sizes.min()} to {sizes.max()}, median {np.median(sizes):g}")
        return "\n".join(lines)

    @property
    def digest(self) -> str:
        """Names the split: equal if and only if every client owns the same samples."""
        state = hashlib.blake2b(digest_size=16)
        for name in _ARRAYS:
            array = getattr(self, name)
            state.update(f"{name} {array.dtype.str} {array.shape}".encode())
            state.update(array.tobytes())
        return state.hexdigest()

    def save(self, path: str | Path) -> None:
        """Write one npz file, which is there in full or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        meta = json.dumps(self.meta)
        write_atomically(path, lambda file: np.savez(file, meta=meta, digest=self.digest, **arrays))

    @classmethod
    def load(cls, path: str | Path) -> "Partition":
        """Read what `save` wrote.

        Raises:
            UserError: there is no such file, or it is not what was written.
        """
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in _ARRAYS}
                meta, digest = json.loads(str(stored["meta"])), str(stored["digest"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(str(path), f"not a partition ({reason})", "remove it") from error
        partition = cls(**arrays, meta=meta)
        if partition.digest != digest:
            raise UserError(str(path), "its content does not match its digest", "remove it")
        return partition


def _describe(
    dataset: Dataset,
    scheme: Partitioner,
    *,
    clients: int,
    seed: int,
    test: PersonalTest,
    train_fraction: float,
    train: Samples,
    test_samples: Samples,
) -> Meta:
    """Everything that a partition depends on."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in (train.y, test_samples.y, train.groups):
        state.update(b"none" if tensor is None else tensor.numpy().tobytes())
    return {
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
    }


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
    """Deal the training samples to clients and find what each client is tested on.

    Args:
        dataset: names the classes.
        scheme: deals the training samples.
        clients: how many clients there are.
        seed: names the draw, together with the kind of scheme.
        test: "match": from the test set, with the class proportions of the client's training
            samples; clients may share samples (DisPFL). "disjoint": likewise, but no sample twice
            (HeteroFL's test shards, nearly). "random": an equal share of the test set, whatever the
            client trains on; no sample twice (FlexiFed). "split": held out of the client's own
            training samples (pFedMoE). "labels": all test samples of the classes that the client
            trains on (FedBCD).
        train_fraction: with "split", the part that is trained on.
        train: the training set.
        test_samples: the test set.

    Raises:
        UserError: the scheme does not fit these samples, or an argument is out of range.
    """
    check_personal_test(test, train_fraction)
    if clients < 1:
        raise UserError("model.clients", f"{clients} clients", "give at least one client")
    name, num_classes = type(scheme).__name__, len(dataset.classes)
    labels, test_labels = train.y.numpy(), test_samples.y.numpy()
    parts = scheme.split(
        labels,
        clients=clients,
        num_classes=num_classes,
        rng=numpy_generator(seed, f"partition/{name}"),
        groups=None if train.groups is None else train.groups.numpy(),
    )
    owned = flatten(parts)
    if not np.diff(owned[1]).all():
        empty = int(np.flatnonzero(np.diff(owned[1]) == 0)[0])
        raise UserError("data.partition", f"{scheme!r} left client {empty} empty", "use another")
    rng = numpy_generator(seed, f"partition/test/{name}")
    if test == "split":
        owned, tested = hold_out(
            owned, labels, fraction=train_fraction, num_classes=num_classes, rng=rng
        )
        test_labels = labels
    train_counts = class_counts(owned, labels, num_classes)
    if test != "split":
        tested = _test_of(train_counts, test_labels, test, rng, shares=scheme.shares(clients))
    dtype = np.int32 if max(len(train), len(test_samples)) <= np.iinfo(np.int32).max else np.int64
    return Partition(
        train_index=owned[0].astype(dtype),
        train_offsets=owned[1],
        test_index=tested[0].astype(dtype),
        test_offsets=tested[1],
        train_counts=train_counts,
        test_counts=class_counts(tested, test_labels, num_classes),
        meta=_describe(
            dataset,
            scheme,
            clients=clients,
            seed=seed,
            test=test,
            train_fraction=train_fraction,
            train=train,
            test_samples=test_samples,
        ),
    )


def check_personal_test(test: str, train_fraction: float) -> None:
    """Refuse a way of testing that does not exist."""
    if test not in get_args(PersonalTest):
        known = ", ".join(get_args(PersonalTest))
        raise UserError("data.personal_test", f"{test!r}", f"choose one of {known}")
    if not 0.0 < train_fraction < 1.0:
        raise UserError(
            "data.train_fraction", f"{train_fraction}", "give a number between 0 and 1, as 0.8"
        )


def _test_of(
    held: np.ndarray,
    labels: np.ndarray,
    test: PersonalTest,
    rng: np.random.Generator,
    *,
    shares: int,
) -> Csr:
    """Samples of the common test set for each client."""
    if test == "random":
        return equal_shares(len(labels), shares=shares, clients=len(held), rng=rng)
    pool_sizes = np.bincount(labels, minlength=held.shape[1])
    if test == "match":
        counts = matched_counts(held, pool_sizes)
    elif test == "labels":
        counts = np.where(held > 0, pool_sizes, 0)
    else:
        counts = dealt_counts(held, pool_sizes, rng)
    return draw_test(counts, labels, rng, shared=test != "disjoint")
