"""A checkpoint that cannot be written leaves the old one, and every rank with the same line."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightfed.distributed.collectives import Ranks
from lightfed.runs import checkpoint
from lightfed.runs.checkpoint import CLIENTS, save
from lightfed.utils import atomic_io as archive
from lightfed.utils.errors import DiskError
from tests.promises.stopping.checkpoints import (
    content_of,
    names_in,
    tags_of,
    together,
    value_of,
    write,
)
from tests.small import CPU


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes; what does fails in the kernel."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failing(error: int, matches: Callable[[Path], bool]) -> Callable[..., None]:
    """write_atomically on a disk that refuses some files."""

    def write(path: Path, content: Callable[[Any], object]) -> None:
        if matches(path):
            raise OSError(error, os.strerror(error), str(path))
        archive.write_atomically(path, content)

    return write


def write_on(world: int, path: Path, value: float = 3.0) -> list[DiskError]:
    """What every rank raises."""
    errors = together(world, lambda ranks: save(content_of(value, ranks.rank, world), path, ranks))
    assert all(isinstance(error, DiskError) for error in errors), errors
    return [error for error in errors if isinstance(error, DiskError)]


CASES: dict[str, tuple[int, Callable[[Path], bool]]] = {
    "rank 0's shard": (0, lambda path: path.name == "rank0.pt"),
    "rank 2's shard": (2, lambda path: path.name == "rank2.pt"),
    "the main file": (0, lambda path: path.name.startswith("last.ckpt")),
}


@pytest.mark.parametrize(("rank", "matches"), CASES.values(), ids=CASES)
def test_a_rank_that_cannot_write_is_named_by_all(
    rank: int, matches: Callable[[Path], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1.0, ranks=2)
    write(path, 2.0, ranks=2)
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_atomically", failing(errno.ENOSPC, matches))
        patch.setattr("socket.gethostname", lambda: "n7")
        errors = write_on(3, path)
    assert {str(error) for error in errors} == {
        f"trainer.default_root_dir: checkpoint {path} cannot be written (No space left on device) "
        f"on rank {rank} (n7); free space and run the same command again; {path} is complete"
    }
    assert contents(tmp_path) == before
    write(path, 3.0, ranks=3)
    assert value_of(path) == 3.0


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def test_the_first_checkpoint_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    for _, matches in CASES.values():
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "write_atomically", failing(errno.EDQUOT, matches))
            errors = write_on(3, path)
        assert all(e.fix == "free space and run the same command again" for e in errors)
        assert names_in(tmp_path) == []


def test_what_more_space_would_not_mend_is_not_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "write_atomically", failing(errno.EIO, lambda path: True))
    (error,) = write_on(1, tmp_path / "last.ckpt")
    assert "(Input/output error)" in error.found
    assert error.fix == "repair the file system and run the same command again"


def test_a_folder_that_cannot_be_made_is_reported_by_all(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    errors = write_on(2, tmp_path / "run" / "last.ckpt")
    assert len({str(error) for error in errors}) == 1
    assert "cannot be written" in errors[0].found


@pytest.mark.parametrize("size", [0, 5_000, 70_000, 150_000])
@pytest.mark.parametrize("stateful", [False, True])
def test_a_file_system_that_is_full_at_any_byte(stateful: bool, size: int, tmp_path: Path) -> None:
    """torch's own writer meets the kernel's refusal, in a shard or in the main file."""
    path = tmp_path / "last.ckpt"
    content: dict[str, Any] = {"state_dict": {"w": torch.zeros(40_000)}}  # 160 kB
    rows = {CLIENTS: {k: [torch.zeros(20_000)] for k in range(2)}} if stateful else {}  # as much
    save(dict(content | rows), path, Ranks(CPU))
    before = contents(tmp_path)
    with room_for(size), pytest.raises(DiskError, match=r"\(File too large\) on rank 0") as caught:
        save(dict(content | rows), path, Ranks(CPU))
    assert caught.value.fix == f"free space and run the same command again; {path} is complete"
    assert contents(tmp_path) == before


def test_a_failure_after_the_new_name_leaves_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1.0)
    flush = archive.flush_folder

    def broken(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, "Input/output error")
        flush(folder)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "flush_folder", broken)
        (error,) = write_on(1, path, 2.0)
    assert error.fix.endswith(f"{path} is complete")
    assert value_of(path) == 2.0


def test_a_new_name_that_is_refused_leaves_the_old_checkpoint_under_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1.0)
    rename = os.replace

    def broken(source: Path, target: Path) -> None:
        if target == path:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", broken)
        (error,) = write_on(1, path)
    assert error.fix.endswith(f"{path} is complete")
    assert value_of(path) == 1.0
    assert names_in(tmp_path) == ["last.ckpt", "last.ckpt.shards"]
    assert tags_of(path) == 1


def test_leftovers_that_stay_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    (tmp_path / "last.ckpt.x.part").mkdir()  # unlink refuses a folder
    for value in (1.0, 2.0, 3.0):
        write(path, value)
    assert value_of(path) == 3.0
    assert tags_of(path) == 1


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), KeyError("x"), KeyboardInterrupt()]
)
def test_what_cannot_be_written_leaves_no_part(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("old")

    def write(file: Any) -> None:
        file.write(b"new")
        raise error

    with pytest.raises(type(error)):
        archive.write_atomically(path, write)
    assert names_in(tmp_path) == ["metrics.csv"]
    assert path.read_text() == "old"
