"""What a bad disk makes of a checkpoint is noticed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lightfed.runs.checkpoint import load, shard_folder
from lightfed.utils.errors import UserError
from tests.promises.stopping.checkpoints import tags_of, together, value_of, write

SPOILS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut at 0.9": lambda content: content[: int(0.9 * len(content))],
    "cut by a byte": lambda content: content[:-1],
    "zeros within": lambda content: content[:512] + bytes(1024) + content[1536:],
    "another file": lambda content: b"epoch: 3\n" * 100,
}
PARTS = ("last.ckpt", "last.ckpt.shards/000000000002/rank1.pt")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a checkpoint full of 2 by three ranks."""
    path = tmp_path / "last.ckpt"
    write(path, 1.0, ranks=2)
    write(path, 2.0, ranks=3)
    return path


def spoil(file: Path, how: str = "cut at 0.9") -> None:
    file.write_bytes(SPOILS[how](file.read_bytes()))


@pytest.mark.parametrize("how", SPOILS)
@pytest.mark.parametrize("part", PARTS)
def test_a_corrupt_file_is_refused_by_name(part: str, how: str, path: Path) -> None:
    victim = path.parent / part
    spoil(victim, how)
    with pytest.raises(UserError, match="cannot be read") as caught:
        load(path)
    assert caught.value.key == "ckpt_path"
    assert str(victim) in caught.value.found
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_a_corrupt_checkpoint(path: Path) -> None:
    (path.parent / PARTS[1]).unlink()
    with pytest.raises(UserError, match=r"rank1\.pt cannot be read"):
        load(path)


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


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_ranks_refuse_what_one_finds_corrupt(rank: int, path: Path) -> None:
    """On every rank whose share may hold the corrupt file."""
    shard = next(shard_folder(path).glob(f"000000000002/rank{rank}.pt"))
    spoil(shard)
    for found in together(3, lambda ranks: load(path, ranks)):
        assert isinstance(found, UserError)
        assert str(shard) in found.found


def test_a_corrupt_checkpoint_is_replaced(path: Path) -> None:
    spoil(path)
    write(path, 3.0, ranks=2)
    assert (value_of(path), tags_of(path)) == (3.0, 1)
