"""Clients that move from rank to rank with all that they keep."""

from collections.abc import Callable
from threading import Lock

import pytest
import torch
from torch import Tensor

from lightfed.api import client_rows
from lightfed.api.fleet import Fleet
from lightfed.distributed.collectives import Ranks
from lightfed.distributed.placement import Rates
from lightfed.state.client_state import by_client
from lightfed.testing.worker import random_pairs
from tests.distributed.threads import on_ranks
from tests.state.test_client_states import METHODS, SIZES, everything, fill, fleet

LONG = {0: [1e3], 1: [1e3]}  # seconds a sample


def joined(parts: list[dict[int, list[Tensor]]]) -> dict[int, list[Tensor]]:
    assert sorted(k for part in parts for k in part) == list(range(len(SIZES)))  # each has one home
    return {k: tensors for part in parts for k, tensors in part.items()}


@pytest.mark.parametrize("at_once", [2**28, 1])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", METHODS)
def test_clients_keep_their_rows_and_all_else(
    name: str, world: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_rows, "_AT_ONCE", at_once)

    def work(ranks: Ranks) -> list[dict[int, list[Tensor]]]:
        fed = fleet(ranks, name)
        fill(fed)
        found = [everything(fed)]
        for t in range(3):
            fed.open_round()
            pairs = random_pairs(fed, t)
            assert pairs
            fed.client_rows.move(pairs)
            assert fed.places.moved == 2 * len(pairs)
            found.append(everything(fed))
            for kept in fed.kept.values():
                assert set(kept) <= set(fed.mine(range(fed.clients)))
            for state in fed.groups:  # rows still are one matrix
                assert list(state.store.slots.values()) == list(range(len(state.store.slots)))
        assert ranks.wire_bytes > 0
        return found

    first, *later = (joined([*parts]) for parts in zip(*on_ranks(world, work), strict=True))
    for found in later:
        for client, tensors in first.items():
            assert len(tensors) == len(found[client])
            assert all(map(torch.equal, tensors, found[client]))


def test_rows_in_files_that_have_not_begun_move_too() -> None:
    used, alone = {1, 4}, Lock()

    def work(ranks: Ranks) -> dict[int, tuple[float, bool]]:
        with alone:  # initial models are drawn from torch's generator, which these ranks share
            fed = fleet(ranks, "disk")
        for client in fed.mine(sorted(used)):
            fed.row(client).floats.fill_(client)
        for t in range(3):
            fed.open_round()
            fed.client_rows.move(random_pairs(fed, t))
        initial = {k: fed.state(k).initial.floats for k in range(fed.clients)}
        rows = {k: fed.row(k).floats for k in fed.mine(range(fed.clients))}
        return {k: (float(row[0]), torch.equal(row, initial[k])) for k, row in rows.items()}

    found = {k: value for part in on_ranks(2, work) for k, value in part.items()}
    assert sorted(found) == list(range(len(SIZES)))
    for client, (value, is_initial) in found.items():
        assert is_initial == (client not in used)
        assert client not in used or value == client


def moved_for(fed: Fleet, sessions: list[int]) -> tuple[int, list[int]]:
    """Number of rows moved for a round of some clients, and the homes of all."""
    fed.algorithm.expected_sessions = lambda *_: dict.fromkeys(sessions)  # type: ignore[method-assign]
    fed.move_for(0)
    return fed.places.moved, [fed.places.owner[client] for client in range(fed.clients)]


def test_participants_that_are_on_one_rank_are_shared_out() -> None:
    def work(ranks: Ranks) -> tuple[int, list[int], list[int]]:
        fed = fleet(ranks)
        fed.places.rates = Rates(LONG)
        before = [fed.places.owner[client] for client in range(fed.clients)]
        crowd = [client for client in range(fed.clients) if before[client] == 0]
        return *moved_for(fed, crowd), before

    (moved, after, before), other = on_ranks(2, work)
    assert other == (moved, after, before)
    assert moved > 0
    changed = [k for k in range(len(SIZES)) if before[k] != after[k]]
    assert len(changed) == moved
    assert sorted(before) == sorted(after)


@pytest.mark.parametrize(
    "change",
    [
        # The other group is not measured.
        lambda fed: setattr(fed.places, "rates", Rates({0: [1e3]})),
        lambda fed: setattr(fed.algorithm, "stateful", False),
    ],
)
def test_nothing_moves_without_measured_seconds_or_kept_rows(
    change: Callable[[Fleet], None],
) -> None:
    def work(ranks: Ranks) -> int:
        fed = fleet(ranks)
        fed.places.rates = Rates(LONG)
        change(fed)
        return moved_for(fed, [k for k in range(fed.clients) if fed.places.owner[k] == 0])[0]

    assert on_ranks(2, work) == [0, 0]


def test_a_package_holds_the_clients_alone() -> None:
    (states,) = on_ranks(1, lambda ranks: by_client(fleet(ranks).states() or {}))
    package = client_rows._packed({2: states[2]})
    assert package.nbytes < 2 * sum(x.nbytes for x in states[2].values()) + 4096
    assert client_rows._unpacked(package)[2].keys() == states[2].keys()
