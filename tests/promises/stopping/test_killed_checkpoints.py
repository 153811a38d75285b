"""A checkpoint is the old one or the new one, never a mixture, whenever its writer dies."""

import io
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightfed.runs.checkpoint import BEFORE, load
from lightfed.utils.errors import UserError
from tests.promises.stopping.checkpoints import names_in, tags_of, value_of, write

DIED = 9
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link")


def dies(work: Callable[[], None], prepare: Callable[[], None]) -> bool:
    """Whether a process dies of what `prepare` has prepared before it is through with `work`."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            prepare()
            work()
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, DIED)
    return status == DIED


def die_at(number: int, folder: Path) -> None:
    """Make the `number`-th access to the files of a folder the last thing a process wants."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in CHANGES or (event == "open" and str(arguments[0]).startswith(str(folder))):
            seen += 1
            if seen == number:
                os._exit(DIED)

    sys.addaudithook(hook)  # of a process that ends soon: there is no way to remove it


def die_in_write(number: int) -> None:
    """Make the `number`-th file that torch saves half a file, and the death of the process."""
    whole, seen = torch.save, 0

    def torn(content: Any, file: Any) -> None:
        nonlocal seen
        seen += 1
        if seen != number:
            whole(content, file)
            return
        memory = io.BytesIO()
        whole(content, memory)
        file.write(memory.getvalue()[: len(memory.getvalue()) // 2])
        file.flush()
        os._exit(DIED)

    torch.save = torn


def state_after(folder: Path) -> float:
    """The value that a run goes on from; what else must hold whenever the writer has died."""
    path = folder / "last.ckpt"
    value = value_of(path)
    write(path, 9.0, ranks=2)
    assert value_of(path) == 9.0
    # What the dead writer left is gone.
    assert names_in(folder) == ["last.ckpt", "last.ckpt.shards"]
    assert tags_of(path) == 1
    return value


def kept_after(folder: Path) -> None:
    """There is a whole checkpoint before the last one, whenever the writer has died."""
    before = folder / BEFORE
    value = value_of(before)
    assert value in (1.0, 2.0)
    write(folder / "last.ckpt", 9.0, ranks=2, keeps=True)
    assert value_of(folder / "last.ckpt") == 9.0
    assert value_of(before) in (2.0, 5.0), "the one that was the last"
    assert names_in(folder) == [BEFORE, "last.ckpt", "last.ckpt.shards"]
    assert tags_of(folder / "last.ckpt") == 2


def test_the_one_before_is_whole_at_whatever_access_the_writer_dies(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        write(tmp_path / "start" / "last.ckpt", value, ranks=3, keeps=True)
    assert value_of(tmp_path / "start" / BEFORE) == 1.0
    number = 0
    while True:
        number += 1
        folder = tmp_path / f"death{number}"
        shutil.copytree(tmp_path / "start", folder)
        if not dies(
            lambda folder=folder: write(folder / "last.ckpt", 5.0, ranks=2, keeps=True),
            lambda number=number, folder=folder: die_at(number, folder),
        ):
            break
        assert value_of(folder / "last.ckpt") in (2.0, 5.0)
        kept_after(folder)
    assert number > 12
    assert (value_of(folder / "last.ckpt"), value_of(folder / BEFORE)) == (5.0, 2.0)


def test_at_whatever_access_to_a_file_the_writer_dies(tmp_path: Path) -> None:
    """Of two ranks; a checkpoint full of 2 is there, in the place of one full of 1."""
    for value in (1.0, 2.0):
        write(tmp_path / "start" / "last.ckpt", value, ranks=3)
    found: list[float] = []
    while True:
        number = len(found) + 1
        folder = tmp_path / f"death{number}"
        shutil.copytree(tmp_path / "start", folder)
        if not dies(
            lambda folder=folder: write(folder / "last.ckpt", 5.0, ranks=2),
            lambda number=number, folder=folder: die_at(number, folder),
        ):
            break
        found.append(state_after(folder))
    assert found == sorted(found)  # the old one, and from some access on the new one
    assert found.count(2.0) >= 12
    assert found.count(5.0) >= 1


@pytest.mark.parametrize("number", [1, 2, 3])
def test_in_whatever_file_the_writer_dies(number: int, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1.0, ranks=3)
    write(path, 2.0, ranks=3)
    assert dies(lambda: write(path, 5.0, ranks=2), lambda: die_in_write(number))
    assert state_after(tmp_path) == 2.0


def test_the_first_checkpoint_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for number in (1, 2, 3):
        assert dies(lambda: write(path, 5.0, ranks=2), lambda n=number: die_in_write(n))
        with pytest.raises(UserError, match="no file"):
            load(path)
    write(path, 1.0)
    assert names_in(tmp_path) == ["last.ckpt", "last.ckpt.shards"]
    assert tags_of(path) == 1
