"""Checkpoints of one known value, and the ranks that write and read them."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from typing_extensions import override

from lightfed.distributed.collectives import Ranks
from lightfed.runs.checkpoint import CLIENTS, load, save, shard_folder
from tests.small import CPU

T = TypeVar("T")


class Turn(Ranks):
    """One of several ranks that take turns, rank 0 last, so that all others are through."""

    def __init__(self, rank: int, world: int, said: list[Any]) -> None:
        super().__init__(CPU)
        self.rank, self.world = rank, world
        self._said = list(said)

    @override
    def broadcast(self, obj: Any) -> Any:
        """What rank 0 would have said."""
        return self._said.pop(0)

    @override
    def gather(self, objects: list[Any]) -> list[Any]:
        return objects


class Meeting(Ranks):
    """One of several ranks that are threads; those that never come are missed after a while."""

    def __init__(self, rank: int, barrier: threading.Barrier, box: list[Any]) -> None:
        super().__init__(CPU)
        self.rank, self.world = rank, barrier.parties
        self._barrier, self._box = barrier, box

    @override
    def gather(self, objects: list[Any]) -> list[Any]:
        self._box[self.rank] = objects
        self._barrier.wait(timeout=20)
        every = [item for part in self._box for item in part]
        self._barrier.wait(timeout=20)
        return every

    @override
    def broadcast(self, obj: Any) -> Any:
        return self.gather([obj])[0]

    @override
    def any(self, flag: bool) -> bool:
        return any(self.gather([flag]))


def together(world: int, work: Callable[[Ranks], T]) -> list[T | Exception]:
    """What `work` returns or raises on each of so many ranks at once."""
    barrier, box = threading.Barrier(world), [None] * world
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = work(Meeting(rank, barrier, box))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def content_of(value: float, rank: int, ranks: int, clients: int | None = 6) -> dict[str, Any]:
    """What a rank dumps; client k's row is full of `value` + k."""
    content: dict[str, Any] = {"state_dict": {"w": torch.full((3,), value)}}
    if clients is not None:
        content[CLIENTS] = {
            k: [torch.full((4,), value + k), torch.tensor([k])] for k in range(rank, clients, ranks)
        }
    return content


def write(
    path: Path, value: float, *, ranks: int = 1, clients: int | None = 6, keeps: bool = False
) -> None:
    """A checkpoint as `ranks` processes write it."""
    for rank in reversed(range(ranks)):
        turn = Turn(rank, ranks, [(str(path), f"{int(value):012x}")])
        save(content_of(value, rank, ranks, clients), path, turn, keeps=keeps)


def value_of(path: Path, *, clients: int = 6) -> float:
    """The value that was written, if the checkpoint is whole and all of one writing."""
    return value_in(load(path), clients=clients)


def value_in(found: dict[str, Any], *, clients: int = 6) -> float:
    rows = {k: row for shard in found[CLIENTS] for k, row in shard.items()}
    value = float(found["state_dict"]["w"][0])
    assert found["state_dict"]["w"].tolist() == [value] * 3
    assert sorted(rows) == list(range(clients))
    for client, (floats, integers) in rows.items():
        assert floats.tolist() == [value + client] * 4
        assert integers.tolist() == [client]
    return value


def names_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def tags_of(path: Path) -> int:
    """How many checkpoints have shards."""
    return len(list(shard_folder(path).iterdir()))
