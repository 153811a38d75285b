"""What a bad disk makes of a checkpoint is noticed, and the one before it is used."""

import logging
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from typing_extensions import override

from lightfed.algorithms.standalone import Standalone
from lightfed.distributed.collectives import Ranks
from lightfed.runs import checkpoint
from lightfed.runs.checkpoint import load, load_newest, previous_of, shard_folder
from lightfed.utils import atomic_io as archive
from lightfed.utils.errors import UserError
from tests.engine.spy import data, federation, state_of
from tests.promises.stopping.checkpoints import tags_of, together, value_in, value_of, write
from tests.small import CPU, fit

SPOILS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut at 0.3": lambda content: content[: int(0.3 * len(content))],
    "cut at 0.9": lambda content: content[: int(0.9 * len(content))],
    "cut by a byte": lambda content: content[:-1],
    "zeros at the end": lambda content: content[:-512] + bytes(512),
    "zeros within": lambda content: content[:512] + bytes(1024) + content[1536:],
    "another file": lambda content: b"epoch: 3\n" * 100,
}
PARTS = ("last.ckpt", "last.ckpt.shards/000000000002/rank1.pt")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a checkpoint full of 2 by three ranks; the one before it is full of 1."""
    path = tmp_path / "last.ckpt"
    write(path, 1.0, ranks=2)
    write(path, 2.0, ranks=3)
    return path


def spoil(file: Path, how: str = "cut at 0.9") -> None:
    file.write_bytes(SPOILS[how](file.read_bytes()))


@pytest.mark.parametrize("how", SPOILS)
@pytest.mark.parametrize("part", PARTS)
def test_a_corrupt_file_is_refused_by_name_and_the_one_before_used(
    part: str, how: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = path.parent / part
    spoil(victim, how)
    with pytest.raises(UserError, match="cannot be read") as caught:
        load(path)
    assert caught.value.key == "ckpt_path"
    assert str(victim) in caught.value.found
    assert "\n" not in str(caught.value)
    found, source = load_newest(path, Ranks(CPU))
    assert (value_in(found), source) == (1.0, previous_of(path))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == f"{caught.value.found}; resuming from {source} instead"


def test_a_missing_shard_is_a_corrupt_checkpoint(path: Path) -> None:
    (path.parent / PARTS[1]).unlink()
    with pytest.raises(UserError, match=r"rank1\.pt cannot be read"):
        load(path)
    assert value_in(load_newest(path, Ranks(CPU))[0]) == 1.0


@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_bit_is_refused_or_does_no_harm(part: str, path: Path) -> None:
    """All over the file; of a record's content every one is refused, in a tensor above all."""
    victim = path.parent / part
    whole = victim.read_bytes()
    refused = 0
    for place in range(0, len(whole), 13):
        victim.write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        )
        try:
            assert value_of(path) == 2.0
        except UserError:
            refused += 1
    assert refused > len(whole) / 13 / 4  # what is not refused is padding, and dates
    victim.write_bytes(whole)
    assert value_of(path) == 2.0


def test_without_one_before_a_corrupt_checkpoint_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1.0)
    spoil(path)
    with pytest.raises(UserError, match=r"last\.ckpt cannot be read"):
        load_newest(path, Ranks(CPU))


def test_where_both_are_corrupt_the_error_names_both(path: Path) -> None:
    spoil(path)
    spoil(previous_of(path), "empty")
    with pytest.raises(UserError, match=r"last\.ckpt cannot .*, and .*previous\.ckpt cannot") as e:
        load_newest(path, Ranks(CPU))
    assert e.value.key == "ckpt_path"
    assert "\n" not in str(e.value)


def test_a_whole_checkpoint_is_read_without_a_word(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found, source = load_newest(path, Ranks(CPU))
    assert (value_in(found), source) == (2.0, path)
    assert caplog.records == []


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_come_to_the_same_checkpoint_and_say_so_once(
    rank: int, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On every rank whose share may hold the corrupt file."""
    shard = next(shard_folder(path).glob(f"000000000002/rank{rank}.pt"))
    spoil(shard)
    for found in together(3, lambda ranks: load(path, ranks)):
        assert isinstance(found, UserError)
        assert str(shard) in found.found
    for newest in together(3, lambda ranks: load_newest(path, ranks)):
        assert isinstance(newest, tuple)
        assert (value_in(newest[0]), newest[1]) == (1.0, previous_of(path))
    assert len(caplog.records) == 1


def test_a_file_that_one_rank_cannot_read_is_used_by_none(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = count()

    def read(file: Path) -> Any:
        if file == path and next(readers) == 1:
            raise UserError("ckpt_path", f"{file} cannot be read (stale)", "wait")
        return archive.read(file)

    monkeypatch.setattr(checkpoint, "read", read)
    newest = together(3, lambda ranks: load_newest(path, ranks)[1])
    assert newest == [previous_of(path)] * 3


def test_a_checkpoint_that_cannot_be_read_takes_nobodys_place(path: Path) -> None:
    spoil(path)
    write(path, 3.0, ranks=2)
    assert (value_of(path), value_of(previous_of(path))) == (3.0, 1.0)
    assert tags_of(path) == 2


class Stop(Callback):
    """Ends a run when it has so many rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.rounds:
            raise KeyError("stopped")


def last_of(folder: Path) -> Path:
    return folder / "run" / "checkpoints" / "last.ckpt"


def spoil_newest(folder: Path) -> None:
    """A tensor of one client, which only its checksum can tell."""
    tag = load(last_of(folder))[checkpoint.SHARDS]["tag"]
    shard = shard_folder(last_of(folder)) / tag / "rank0.pt"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize("more", [1, 2])
def test_a_run_goes_on_from_the_checkpoint_before_a_corrupt_one(
    more: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, again = (federation(algorithm=Standalone()) for _ in range(2))
    fit(whole, data(), tmp_path / "whole", rounds=5)
    fit(federation(algorithm=Standalone()), data(), tmp_path, rounds=3)
    good = load(previous_of(last_of(tmp_path)))[checkpoint.SHARDS]
    spoil_newest(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):  # a path is meant as it is written
        fit(federation(algorithm=Standalone()), data(), tmp_path, ckpt_path=last_of(tmp_path))
    with pytest.raises(KeyError):
        fit(
            federation(algorithm=Standalone()), data(), tmp_path, rounds=5, ckpt_path="last",
            callbacks=[Stop(2 + more)],
        )  # fmt: skip
    assert "instead" in caplog.text
    # The one that the run came from has not made way for the corrupt one, but for the next.
    assert (load(previous_of(last_of(tmp_path)))[checkpoint.SHARDS] == good) == (more == 1)
    fit(again, data(), tmp_path, rounds=5, ckpt_path="last")
    assert state_of(again) == state_of(whole)


def test_last_is_found_where_only_the_one_before_is_left(tmp_path: Path) -> None:
    whole, again = federation(), federation()
    fit(whole, data(), tmp_path / "whole", rounds=3)
    fit(federation(), data(), tmp_path, rounds=2)
    last_of(tmp_path).unlink()
    fit(again, data(), tmp_path, rounds=3, ckpt_path="last")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "whole"]
    assert state_of(again) == state_of(whole)
