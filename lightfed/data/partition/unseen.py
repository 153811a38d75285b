"""The clients that never train: drawn as a share of all, or named by number or by their owner."""

from collections.abc import Sequence

import numpy as np

from lightfed.utils.counts import rounded_up
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator

KEY = "data.unseen"

Unseen = float | Sequence[int | str]

# Owners that an error lists, of those that a data set knows.
_LISTED = 5


def check_unseen(given: Unseen) -> None:
    """Refuse what is neither a share nor a list of numbers and names."""
    if isinstance(given, int | float):
        if not 0.0 <= given < 1.0:
            raise UserError(
                key=KEY,
                found=f"{given}",
                fix="give a share from 0 to less than 1, such as 0.2, or a list of clients",
            )
        return

    fix = "give a share, or a list of client numbers or of owners' names"
    if isinstance(given, str):
        raise UserError(KEY, repr(given), fix)

    known: set[int | str] = set()
    for item in given:
        # True and False are whole numbers to Python.
        if isinstance(item, bool) or not isinstance(item, int | str):
            raise UserError(KEY, repr(item), fix)
        if item in known:
            raise UserError(KEY, f"{item!r} twice", "name every client once")
        known.add(item)


def unseen_clients(
    given: Unseen,
    *,
    clients: int,
    seed: int,
    owners_of_clients: Sequence[np.ndarray] | None,
    names: Sequence[str] | None,
) -> np.ndarray:
    """Return the clients that never train, ascending.

    A share is rounded up to a number of clients, which are drawn by (seed, "unseen"). So they
    depend neither on the partition nor on the ranks.

    Args:
        given: The share of the clients; or their numbers, or the names of their owners.
        clients: The number of clients.
        seed: Seed of the run.
        owners_of_clients: The numbers of the owners of each client's samples; None if the data set
            has no owners. It is only read for names.
        names: The names of owners, by their numbers; None if the data set does not know them.

    Returns:
        (U,) int32.

    Raises:
        UserError: No client would be left to train, or one that is named does not exist.
    """
    if isinstance(given, int | float):
        count = rounded_up(given * clients)
        chosen = []
        if 0 < count < clients:
            rng = numpy_generator(seed, "unseen")
            chosen = rng.choice(clients, count, replace=False, shuffle=False).tolist()
    else:
        chosen = []
        for item in given:
            if isinstance(item, str):
                chosen.append(_client_of(item, owners_of_clients, names))
            elif 0 <= item < clients:
                chosen.append(item)
            else:
                raise UserError(KEY, f"client {item} of {clients}", f"give 0 to {clients - 1}")
        count = len(chosen)
        if len(set(chosen)) < count:
            raise UserError(KEY, f"{given}, which has a client twice", "name every client once")

    if count >= clients:
        found = f"{given}, which leaves none of {clients} clients to train"
        raise UserError(KEY, found, "leave some of them seen")
    return np.array(sorted(chosen), dtype=np.int32)


def _client_of(
    name: str,
    owners_of_clients: Sequence[np.ndarray] | None,
    names: Sequence[str] | None,
) -> int:
    """Return the client that has the samples of an owner, and no others.

    Raises:
        UserError: The owner is unknown, or a client has the samples of several owners.
    """
    if owners_of_clients is None or names is None:
        found = f"{name!r}, and the data set knows no names of owners"
        raise UserError(KEY, found, "give a share, or the numbers of clients")
    if name not in names:
        listed = ", ".join(names[:_LISTED])
        more = ", ..." if len(names) > _LISTED else ""
        raise UserError(KEY, f"unknown owner {name!r}", f"its owners are {listed}{more}")

    number = list(names).index(name)
    holders = [client for client, owners in enumerate(owners_of_clients) if number in owners]
    if not holders:
        raise UserError(KEY, f"owner {name!r}, who has no training samples", "name another one")
    if len(holders) > 1 or len(owners_of_clients[holders[0]]) > 1:
        found = f"owner {name!r}, and clients have samples of several owners"
        raise UserError(KEY, found, "use Natural with a client for each owner, or give numbers")
    return holders[0]
