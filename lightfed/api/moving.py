"""Moves clients with all that they keep from rank to rank, between two rounds.

A client on its way is what a checkpoint would hold of it. It goes through host memory.
"""

import io
from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from lightfed.api import client_states
from lightfed.api.clients import Clients
from lightfed.api.fleet import Fleet

_AT_ONCE = 2**28  # bytes of rows on their way at a time, in each direction


def move_for(fleet: Fleet, t: int) -> None:
    """Move rows that round t is expected to train, if that pays; called by every rank."""
    if fleet.algorithm.stateful and not fleet.ranks.alone:
        move(fleet, fleet.pays_to_move(fleet.algorithm.expected_sessions(fleet, t)))


def move(fleet: Clients, pairs: Sequence[tuple[int, int]]) -> None:
    """Let clients change places; called by every rank.

    The pairs are disjoint, of clients of one group with different homes, between two rounds.
    """
    done, parts = 0, []
    for pair in pairs:
        parts.append(done // _AT_ONCE)
        done += fleet.state(pair[0]).row_bytes
    for _, part in groupby(zip(parts, pairs, strict=True), lambda item: item[0]):
        _move(fleet, [pair for _, pair in part])


def _move(fleet: Clients, pairs: Sequence[tuple[int, int]]) -> None:
    ranks = fleet.ranks
    to = {a: fleet.home(b) for a, b in [*pairs, *((b, a) for a, b in pairs)]}
    leaving = fleet.mine(sorted(to))
    for client in leaving:
        fleet.row(client)  # on disk it begins only now if the client took no part before
    states = client_states.by_client(client_states.saved(fleet, {*leaving}))
    parts = [_packed({k: states[k] for k in leaving if to[k] == r}) for r in range(ranks.world)]
    sizes = ranks.gather([[len(part) for part in parts]])
    for client in leaving:
        for kept in fleet.kept.values():
            kept.restore(client, None)
    fleet.change_places(pairs)
    for part in ranks.swap(parts, [size[ranks.rank] for size in sizes]):
        for client, state in _unpacked(part).items():
            client_states.restore(fleet, client, state)


def _packed(states: Mapping[int, Mapping[str, Tensor]]) -> Tensor:
    """(n,) uint8; empty without clients."""
    if not states:
        return torch.empty(0, dtype=torch.uint8)
    file = io.BytesIO()
    # A view would be saved with the whole matrix behind it.
    torch.save({k: {n: x.clone() for n, x in own.items()} for k, own in states.items()}, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _unpacked(package: Tensor) -> dict[int, dict[str, Tensor]]:
    """What `_packed` was given."""
    if not len(package):
        return {}
    file = io.BytesIO(package.numpy().data)
    states: dict[int, dict[str, Tensor]] = torch.load(file, weights_only=True)
    return states
