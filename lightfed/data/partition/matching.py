"""Which samples each client is tested on, and the flat form in which clients own samples.

The flat form ("CSR") is two arrays: the samples of all clients one after another, and where each
client begins; client k owns index[offsets[k] : offsets[k + 1]].
"""

import numpy as np

Csr = tuple[np.ndarray, np.ndarray]


def flatten(parts: list[np.ndarray]) -> Csr:
    """The lists of all clients in flat form."""
    sizes = np.fromiter((len(part) for part in parts), dtype=np.int64, count=len(parts))
    return np.concatenate(parts), np.concatenate(([0], np.cumsum(sizes)))


def class_counts(csr: Csr, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """(clients, classes) int32: how many samples of each class each client owns."""
    index, offsets = csr
    clients = len(offsets) - 1
    cell = np.repeat(np.arange(clients), np.diff(offsets)) * num_classes + labels[index]
    counts = np.bincount(cell, minlength=clients * num_classes)
    return counts.reshape(clients, num_classes).astype(np.int32)


def matched_counts(held: np.ndarray, pool_sizes: np.ndarray) -> np.ndarray:
    """How many test samples of each class a client is tested on, if clients may share them.

    The rule of DisPFL's published code: a client's share of the test set is ceil(M / clients), and
    of each class it takes ceil(share * part of that class among its training samples).

    Args:
        held: (clients, classes) training samples.
        pool_sizes: (classes,) test samples, M in all.

    Returns:
        (clients, classes) int64.
    """
    held = held.astype(np.int64)
    share = -(-int(pool_sizes.sum()) // len(held))
    sizes = held.sum(axis=1, keepdims=True)
    # whole numbers: in floats ceil(0.1 * 100) can be 11
    return np.minimum((held * share + sizes - 1) // sizes, pool_sizes)


def dealt_counts(held: np.ndarray, pool_sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """How many test samples of each class a client is tested on, if no sample is used twice.

    Each class is dealt out in proportion to what the clients train on. Every count is the exact
    value rounded down or up; rounded up is who was rounded down most so far, so that the size of
    a client's test set stays in proportion too.

    Args:
        held: (clients, classes) training samples.
        pool_sizes: (classes,) test samples.
        rng: breaks ties.

    Returns:
        (clients, classes) int64. A class that nobody trains on is dealt to nobody.
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
    """The first shares of so many samples, cut into equal ones (within one sample) at random.

    Args:
        samples: M.
        shares: into how many they are cut.
        clients: who get a share each; not more than there are.
        rng: draws who gets what.
    """
    owner = rng.permutation(samples) % shares
    sizes = np.bincount(owner, minlength=shares)[:clients]
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    return np.argsort(owner, kind="stable")[: offsets[-1]], offsets


def draw_test(
    counts: np.ndarray, labels: np.ndarray, rng: np.random.Generator, *, shared: bool
) -> Csr:
    """Pick test samples for all clients at once.

    A class is put in random order. A client's samples of it are a run of that order, which begins
    anywhere and goes round at the end (shared), or where the run of the client before ended.

    Args:
        counts: (clients, classes) how many samples; not above the size of the class.
        labels: (M,) the classes of the test set.
        rng: draws the orders and the beginnings.
        shared: whether clients may have samples in common.
    """
    owners, members = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for label in np.flatnonzero(counts.any(axis=0)):
        pool = rng.permutation(np.flatnonzero(labels == label))
        wanted = counts[:, label]
        ends = np.cumsum(wanted)
        start = rng.integers(len(pool), size=len(wanted)) if shared else ends - wanted
        step = np.arange(ends[-1]) - np.repeat(ends - wanted, wanted)
        members.append(pool[(np.repeat(start, wanted) + step) % len(pool)])
        owners.append(np.repeat(np.arange(len(wanted)), wanted))
    owner, member = np.concatenate(owners), np.concatenate(members)
    offsets = np.concatenate(([0], np.cumsum(counts.sum(axis=1, dtype=np.int64))))
    return member[np.lexsort((member, owner))], offsets


def hold_out(
    csr: Csr, labels: np.ndarray, *, fraction: float, num_classes: int, rng: np.random.Generator
) -> tuple[Csr, Csr]:
    """Divide what each client owns into a training and a test part, class by class.

    A client keeps at least one sample to train on and, if it owns two, one to be tested on.

    Args:
        csr: what clients own.
        labels: the classes of those samples.
        fraction: part of a client's samples that it trains on.
        num_classes: labels lie in 0 .. num_classes - 1.
        rng: chooses the samples, and the classes that are rounded up.
    """
    index, offsets = csr
    sizes = np.diff(offsets)
    owned = class_counts(csr, labels, num_classes)
    kept = np.floor(owned * fraction).astype(np.int64)
    total = np.clip(np.rint(sizes * fraction), 1, np.maximum(sizes - 1, 1)).astype(np.int64)
    # raise the classes with the largest remainders; the jitter only decides between equal ones
    remainder = owned * fraction - kept + rng.random(owned.shape) * 1e-6
    remainder[owned == 0] = -1.0
    rank = np.argsort(np.argsort(-remainder, axis=1), axis=1)
    kept += rank < (total - kept.sum(axis=1))[:, None]
    cell = np.repeat(np.arange(len(sizes)), sizes) * num_classes + labels[index]
    order = np.lexsort((rng.random(len(index)), cell))
    first = np.concatenate(([0], np.cumsum(owned.ravel())))[cell[order]]
    trains = np.empty(len(index), dtype=bool)
    trains[order] = np.arange(len(index)) - first < kept.ravel()[cell[order]]
    kept_sizes = kept.sum(axis=1)
    train_offsets = np.concatenate(([0], np.cumsum(kept_sizes)))
    return (index[trains], train_offsets), (index[~trains], offsets - train_offsets)
