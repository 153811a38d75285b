"""A checkpoint is the old one or the new one, never a mixture, whenever its writer dies."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightfed.comm.collectives import Ranks
from lightfed.core import checkpoint
from lightfed.core.checkpoint import CLIENTS, load, remove, save, shard_folder
from lightfed.utils.errors import UserError
from tests.small import CPU


class Crash(BaseException):
    """The process dies; nothing of the program runs on."""


class Rank(Ranks):
    """One of several ranks that take turns: a broadcast is what rank 0 would have said."""

    def __init__(self, rank: int, world: int, said: list[Any]) -> None:
        super().__init__(CPU)
        self.rank, self.world = rank, world
        self._said = list(said)

    def broadcast(self, obj: Any) -> Any:
        return self._said.pop(0)

    def barrier(self) -> None:
        """The test calls rank 0 last, so all others are through."""


def write(path: Path, value: float, *, ranks: int = 1, clients: int | None = 6) -> None:
    """A checkpoint as `ranks` processes write it; client k's row is full of `value` + k."""
    for rank in reversed(range(ranks)):
        content: dict[str, Any] = {"state_dict": {"w": torch.full((3,), value)}}
        if clients is not None:
            content[CLIENTS] = {
                k: [torch.full((4,), value + k), torch.tensor([k])]
                for k in range(rank, clients, ranks)
            }
        tag = f"{int(value):012x}"
        save(content, path, Rank(rank, ranks, [str(path), tag]))


def value_of(path: Path, *, clients: int = 6) -> float:
    """The value that was written, if the checkpoint is whole and all of one writing."""
    found = load(path)
    rows = {k: row for shard in found[CLIENTS] for k, row in shard.items()}
    value = float(found["state_dict"]["w"][0])
    assert sorted(rows) == list(range(clients))
    for client, (floats, integers) in rows.items():
        assert floats.tolist() == [value + client] * 4
        assert integers.tolist() == [client]
    return value


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8])
def test_any_number_of_ranks_writes_what_one_reads(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "new" / "last.ckpt"
    write(path, 5.0, ranks=ranks)
    assert len(load(path)[CLIENTS]) == ranks
    assert value_of(path) == 5.0


def test_stateless_runs_write_no_shards(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 5.0, ranks=2, clients=None)
    assert load(path)[CLIENTS] == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt"]


def test_a_rank_without_clients_writes_an_empty_shard(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 5.0, ranks=4, clients=2)
    assert value_of(path, clients=2) == 5.0


def test_a_new_checkpoint_replaces_the_old_one_and_its_shards(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1.0, ranks=3)
    write(path, 2.0, ranks=2)
    assert value_of(path) == 2.0
    assert len(list(shard_folder(path).iterdir())) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "last.ckpt.shards"]


def crash_on(step: Callable[..., bool], function: Callable[..., Any]) -> Callable[..., Any]:
    def crashing(*args: Any, **kwargs: Any) -> Any:
        if step(*args):
            raise Crash
        return function(*args, **kwargs)

    return crashing


def is_main(source: Any, target: Any = None) -> bool:
    return Path(target if target is not None else source).name == "last.ckpt"


CRASHES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "writing a shard": (torch, "save", lambda content, file: "rank1" in file.name),
    "naming a shard": (os, "replace", lambda source, target: "rank0" in Path(target).name),
    "writing the main file": (
        torch,
        "save",
        lambda content, file: "last.ckpt." in Path(file.name).name,
    ),
    "naming the main file": (os, "replace", is_main),
}


@pytest.mark.parametrize(("module", "name", "step"), CRASHES.values(), ids=CRASHES)
def test_a_crash_before_the_new_main_file_leaves_the_old_checkpoint(
    module: Any,
    name: str,
    step: Callable[..., bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1.0, ranks=2)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, crash_on(step, getattr(module, name)))
        with pytest.raises(Crash):
            write(path, 2.0, ranks=2)
    assert value_of(path) == 1.0
    write(path, 3.0, ranks=2)
    assert value_of(path) == 3.0
    # What the dead writer left is gone.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "last.ckpt.shards"]
    assert len(list(shard_folder(path).iterdir())) == 1


def test_a_crash_after_the_new_main_file_leaves_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1.0, ranks=2)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", crash_on(lambda *_: True, shutil.rmtree))
        with pytest.raises(Crash):
            write(path, 2.0, ranks=2)
    assert value_of(path) == 2.0


def test_the_first_checkpoint_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    monkeypatch.setattr(os, "replace", crash_on(is_main, os.replace))
    with pytest.raises(Crash):
        write(path, 1.0)
    with pytest.raises(UserError, match="no file"):
        load(path)


def test_what_was_mapped_survives_the_next_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1.0)
    rows = load(path)[CLIENTS][0]
    write(path, 2.0)
    assert rows[3][0].tolist() == [4.0] * 4


def refused(path: Path, found: str) -> None:
    with pytest.raises(UserError, match=found) as caught:
        load(path)
    assert caught.value.key == "ckpt_path"
    assert "\n" not in str(caught.value)


def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    refused(path, "no file")
    path.mkdir()
    refused(path, "no file")
    path = tmp_path / "text.ckpt"
    path.write_text("epoch: 3\n" * 100)
    refused(path, "cannot be read")
    path.write_bytes(b"")
    refused(path, "cannot be read")


@pytest.mark.parametrize("content", [{"state_dict": {"w": torch.zeros(2)}}, torch.zeros(2), [1, 2]])
def test_checkpoints_of_other_programs_are_refused(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "other.ckpt"
    torch.save(content, path)
    refused(path, "was not written by lightfed")


def test_checkpoints_with_code_in_them_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "code.ckpt"
    torch.save({checkpoint.SHARDS: {"tag": "x", "ranks": 0}, "x": Path("/")}, path)
    refused(path, "cannot be read")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("part", ["main", "shard"])
def test_truncated_files_are_refused(part: str, share: float, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1.0, ranks=2)
    victim = path if part == "main" else next(shard_folder(path).glob("*/rank1.pt"))
    content = victim.read_bytes()
    victim.write_bytes(content[: int(share * len(content))])
    refused(path, "cannot be read")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1.0, ranks=2)
    next(shard_folder(path).glob("*/rank1.pt")).unlink()
    refused(path, r"rank1\.pt cannot be read")


def test_a_link_stands_for_the_checkpoint_it_points_to(tmp_path: Path) -> None:
    path, link = tmp_path / "epoch=1.ckpt", tmp_path / "last.ckpt"
    write(path, 1.0, ranks=2)
    link.symlink_to(path.name)
    assert value_of(link) == 1.0
    write(link, 2.0, ranks=2)  # a checkpoint that takes the link's place, not its target's
    assert (value_of(link), value_of(path)) == (2.0, 1.0)


def test_removing_a_link_leaves_its_target(tmp_path: Path) -> None:
    path, link = tmp_path / "epoch=1.ckpt", tmp_path / "last.ckpt"
    write(path, 1.0)
    link.symlink_to(path.name)
    remove(link)
    assert value_of(path) == 1.0
    remove(path)
    assert list(tmp_path.iterdir()) == []
    remove(path)  # nothing there is no error


def test_what_is_no_state_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    content = {"hyper_parameters": {"path": tmp_path}, "hparams_name": "kwargs", "epoch": 3}
    save(content, path, Ranks(CPU))
    found = load(path)
    assert found["epoch"] == 3
    assert "hyper_parameters" not in found
    assert "hparams_name" not in found
