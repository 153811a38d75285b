"""Checkpoints that write only the clients that have changed."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightfed.distributed.collectives import Ranks
from lightfed.runs.checkpoint import CLIENTS, SHARDS, load, previous_of, shard_folder
from lightfed.runs.saving import save
from lightfed.state import chain
from lightfed.state.chain import Chains, Saved
from lightfed.state.client_state import by_client
from lightfed.utils.errors import UserError
from tests.promises.stopping.checkpoints import tags_of, together

CLIENTS_IN_ALL = 6
State = dict[int, dict[str, Tensor]]


def shard_of(state: State, mine: list[int]) -> Saved:
    """A rank's clients; each name's tensors as one matrix."""
    names = sorted({name for k in mine for name in state[k]})
    found: Saved = {}
    for name in names:
        having = [k for k in mine if name in state[k]]
        values = torch.stack([state[k][name] for k in having])
        found[name] = [{"clients": torch.tensor(having), "values": values}]
    return found


def saved(
    path: Path, state: State, chains: list[Chains], away: Collection[int] = frozenset()
) -> None:
    """Save a state on as many ranks as there are chains; some clients are on the next rank."""

    def work(ranks: Ranks) -> None:
        mine = [k for k in sorted(state) if (k + (k in away)) % ranks.world == ranks.rank]
        content: dict[str, Any] = {CLIENTS: shard_of(state, mine)}
        save(content, path, ranks, chains=chains[ranks.rank])

    assert together(len(chains), work) == [None] * len(chains)


def loaded(path: Path) -> State:
    found: State = {}
    for shard in load(path)[CLIENTS]:
        found |= by_client(shard)
    return found


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        one[k].keys() == other[k].keys()
        and all(torch.equal(one[k][name], other[k][name]) for name in one[k])
        for k in one
    )


def initial() -> State:
    return {
        k: {"floats": torch.full((5,), float(k)), "integers": torch.tensor([k])}
        for k in range(CLIENTS_IN_ALL)
    }


def changed(state: State, clients: set[int], value: float) -> State:
    new = {k: dict(tensors) for k, tensors in state.items()}
    for k in clients:
        new[k]["floats"] = torch.full((5,), value)
        if new[k].pop("kept", None) is None:  # what an algorithm keeps comes and goes
            new[k]["kept"] = torch.tensor(value, dtype=torch.bfloat16)
    return new


some = st.sets(st.integers(0, CLIENTS_IN_ALL - 1), max_size=3)
rounds = st.lists(st.tuples(some, some), max_size=8)  # clients that have changed, and are away


@settings(max_examples=25, deadline=None)
@given(rounds=rounds, ranks=st.integers(1, 2))
def test_the_newest_and_the_one_before_are_complete_and_share_no_file(
    rounds: list[tuple[set[int], set[int]]],
    ranks: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("chain") / "last.ckpt"
    chains, states = [Chains() for _ in range(ranks)], [initial()]
    saved(path, states[0], chains)
    for t, (clients, away) in enumerate(rounds):
        states.append(changed(states[-1], clients, 10.0 + t))
        saved(path, states[-1], chains, away)
        assert same(loaded(path), states[-1])
        assert same(loaded(previous_of(path)), states[-2])
        newest, before = (set(load(p)[SHARDS]["tags"]) for p in (path, previous_of(path)))
        assert newest.isdisjoint(before)
        assert tags_of(path) == len(newest | before)


def test_only_changed_clients_are_written(tmp_path: Path) -> None:
    path, chains = tmp_path / "last.ckpt", [Chains()]
    state = initial()
    for value in (10.0, 11.0, 12.0):
        saved(path, state, chains)
        state = changed(state, {2}, value)
    shards = load(path)[CLIENTS]
    assert [sorted(by_client(shard)) for shard in shards] == [[*range(CLIENTS_IN_ALL)], [2]]


def test_clients_that_have_changed_or_come_are_written(tmp_path: Path) -> None:
    path, chains = tmp_path / "last.ckpt", [Chains(), Chains()]
    state = initial()
    for away in ({0, 1}, {0, 1}, set[int]()):  # in the end 0 and 1 come back; 2 changes
        saved(path, state, chains, away)
        state = changed(state, {2}, 10.0)
    shards = [sorted(by_client(shard)) for shard in load(path)[CLIENTS]]
    assert shards == [[1, 2, 4], [0, 3, 5], [0, 2], [1]]
    assert loaded(path)[0]["floats"].eq(0).all()


def test_clients_whose_rows_begin_later_are_written_then(tmp_path: Path) -> None:
    path, chains, state = tmp_path / "last.ckpt", [Chains()], initial()
    for clients in ([1, 4], [1, 4], [1, 2, 4], [1, 2, 4]):
        saved(path, {k: state[k] for k in clients}, chains)
    assert [sorted(by_client(shard)) for shard in load(path)[CLIENTS]] == [[1, 4], [2]]


def test_a_rank_without_clients_does_not_end_the_chain(tmp_path: Path) -> None:
    path, chains = tmp_path / "last.ckpt", [Chains(), Chains()]
    state = {k: tensors for k, tensors in initial().items() if k % 2 == 0}
    for value in (10.0, 11.0, 12.0):
        saved(path, state, chains)
        state = changed(state, {2}, value)
    assert len(load(path)[SHARDS]["tags"]) == 2


def test_a_chain_ends_when_most_clients_have_changed(tmp_path: Path) -> None:
    path, chains = tmp_path / "last.ckpt", [Chains()]
    for value in (1.0, 2.0, 3.0, 4.0):
        saved(path, changed(initial(), set(range(CLIENTS_IN_ALL)), value), chains)
        assert len(load(path)[SHARDS]["tags"]) == 1
    assert tags_of(path) == 2


def test_a_chain_ends_at_its_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "LONGEST", 2)
    path, chains, lengths = tmp_path / "last.ckpt", [Chains()], []
    for _ in range(6):
        saved(path, initial(), chains)
        lengths.append(len(load(path)[SHARDS]["tags"]))
    assert lengths == [1, 1, 2, 2, 1, 1]


def test_missing_shards_are_written_again(tmp_path: Path) -> None:
    path, chains = tmp_path / "last.ckpt", [Chains()]
    for _ in range(2):
        saved(path, initial(), chains)
    for folder in shard_folder(path).iterdir():
        folder.rename(tmp_path / folder.name)
    with pytest.raises(UserError, match="cannot be read"):
        load(path)
    saved(path, initial(), chains)
    assert same(loaded(path), initial())


def test_another_file_has_chains_of_its_own(tmp_path: Path) -> None:
    chains = [Chains()]
    for name in ("a.ckpt", "a.ckpt", "b.ckpt", "a.ckpt"):
        saved(tmp_path / name, initial(), chains)
        assert same(loaded(tmp_path / name), initial())
