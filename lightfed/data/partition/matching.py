"""The test samples of each client, and the flat form in which clients own samples.

The flat form ("CSR") is two arrays: the samples of all clients, one client after the other, and the
offset of each client. Client k owns index[offsets[k] : offsets[k + 1]].
"""

from typing import Any

import numpy as np

Csr = tuple[np.ndarray, np.ndarray]
_BLOCK = 8192  # clients that are counted at a time: 64-bit temporaries of all take gigabytes


def flatten(parts: list[np.ndarray], dtype: type[np.signedinteger[Any]] = np.int64) -> Csr:
    """Flat form of one array per client, of a type that holds all samples."""
    sizes = np.array([len(part) for part in parts])
    return np.concatenate(parts, dtype=dtype, casting="same_kind"), _offsets(sizes)


def class_counts(csr: Csr, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """(clients, classes) int32 number of samples per client and class."""
    index, offsets = csr
    counts = np.empty((len(offsets) - 1, num_classes), np.int32)
    for first in range(0, len(counts), _BLOCK):
        some, ends = counts[first : first + _BLOCK], offsets[first : first + _BLOCK + 1]
        own = index[ends[0] : ends[-1]], ends - ends[0]
        cells = _cells(own, labels, num_classes)
        some[:] = np.bincount(cells, minlength=some.size).reshape(some.shape)
    return counts


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


def dealt_counts(held: np.ndarray, pool_sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Test samples per client and class if no sample is used twice.

    Each class is dealt in proportion to the training samples. Every count is the exact value
    rounded down or up. The clients that lost most to rounding so far are rounded up first, so that
    the sizes of the test sets are proportional too. `held` are (clients, classes) training samples,
    `pool_sizes` (classes,) test samples; `rng` breaks ties. Returns (clients, classes) int64. A
    class without training samples is not dealt.
    """
    total = np.maximum(held.sum(axis=0, dtype=np.int64), 1)
    counts, remainder = np.divmod(held * pool_sizes.astype(np.int64), total)
    owed = np.zeros(len(held))
    for label in np.flatnonzero(held.any(axis=0)):
        owed += remainder[:, label] / total[label]
        rest = pool_sizes[label] - counts[:, label].sum()
        entitled = np.flatnonzero(remainder[:, label])
        ranking = np.lexsort((rng.random(len(entitled)), -owed[entitled]))
        raised = entitled[ranking[:rest]]
        counts[raised, label] += 1
        owed[raised] -= 1.0
    return counts


def equal_shares(samples: int, *, shares: int, clients: int, rng: np.random.Generator) -> Csr:
    """Cut samples at random into equal shares (within one); each client gets one."""
    owner = rng.permutation(samples) % shares
    offsets = _offsets(np.bincount(owner, minlength=shares)[:clients])
    return np.argsort(owner, kind="stable")[: offsets[-1]], offsets


def draw_test(
    counts: np.ndarray, labels: np.ndarray, rng: np.random.Generator, *, shared: bool
) -> Csr:
    """Draw the test samples of all clients.

    Each class is put in random order. A client's samples of it are consecutive in that order: from
    a random place, wrapping around at the end (shared), or from where those of the previous client
    end. `counts` (clients, classes) are at most the size of the class, `labels` (M,) the classes of
    the test set.
    """
    owners, members = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for label in np.flatnonzero(counts.any(axis=0)):
        pool = rng.permutation(np.flatnonzero(labels == label))
        wanted = counts[:, label]
        before = _offsets(wanted)[:-1]
        start = rng.integers(len(pool), size=len(wanted)) if shared else before
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
