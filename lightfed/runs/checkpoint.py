"""Checkpoints: one main file and one shard of client rows per rank, committed by `os.replace`.

    last.ckpt                      server state, counters, callbacks: tensors and primitives only
    last.ckpt.shards/<tag>/rank0.pt   states of the stateful clients of rank 0
    before-last.ckpt               the one before, in case the disk loses a block of the last one
    sessions.ckpt                  the journal: finished sessions of an interrupted round, as shards

A reader sees the old checkpoint or the new one, never a mixture. First, the shards of a new tag and
the main file that names the tag are written and flushed under temporary names. Then the new main
file takes the place of the old one. At last, the shards of other tags are removed, except those of
the checkpoint before the last one.

`runs/federation_state.py` says what is in a checkpoint.
"""

import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from os.path import isfile
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from lightning.pytorch.utilities import rank_zero_only

from lightfed.distributed.collectives import Ranks
from lightfed.local.finished import Suspended
from lightfed.runs import run_lock
from lightfed.state.client_state import Saved
from lightfed.utils.atomic_io import Damaged, check, flush_folder, read, write_atomically
from lightfed.utils.errors import DiskError, UserError, repair
from lightfed.utils.memory import free_memory

# Key in the main file: the tag of the shards, their number, and the format.
SHARDS = "lightfed_shards"

# Format of the content. Count up when other versions of lightfed cannot read it.
FORMAT = 4

# Key in a checkpoint that Lightning has dumped: the rows of this rank's clients.
CLIENTS = "lightfed_clients"

LAST = "last.ckpt"
BEFORE = "before-last.ckpt"  # beside the last one
JOURNAL = "sessions.ckpt"

# Ends of keys that are no state: config.yaml has their values.
_NOT_STATE = ("hyper_parameters", "hparams_name")

log = logging.getLogger(__name__)


def load(path: str | Path, ranks: Ranks | None = None) -> dict[str, Any]:
    """Read a checkpoint with all its shards, and verify all checksums.

    Any number of ranks can have written it.

    Args:
        path: The main file.
        ranks: The ranks that read it together, if any. All of them call this. Each verifies a
            share of the shards, and all return, or raise the same error.

    Returns:
        The content of the main file, and under `CLIENTS` a list of the shards, with memory-mapped
        tensors.

    Raises:
        UserError: It does not exist, is not complete, or another version of lightfed wrote it.
    """
    if ranks is None:
        return _load(path, verified=slice(None))

    checkpoint: dict[str, Any] = {}
    failures: list[UserError] = []
    try:
        checkpoint = _load(path, verified=slice(ranks.rank, None, ranks.world))
    except UserError as error:
        failures.append(error)

    # Every rank must reach this collective. A rank that raised before it would leave the others
    # waiting forever.
    for failure in ranks.gather(failures):
        raise failure
    return checkpoint


def _load(path: str | Path, *, verified: slice) -> dict[str, Any]:
    """Read a checkpoint; verify the checksums of the main file and of some of the shards."""
    # ModelCheckpoint(save_last="link") makes links. The shards are beside the file itself.
    main = main_file(path).resolve()
    check(main)
    checkpoint = read(main)

    shards = checkpoint.get(SHARDS) if isinstance(checkpoint, dict) else None
    if not isinstance(shards, dict):
        raise UserError(
            key="ckpt_path",
            found=f"{main} was not written by lightfed",
            fix="give one of a lightfed run",
        )

    its_format = shards.get("format")
    if its_format != FORMAT:
        raise UserError(
            key="ckpt_path",
            found=f"{main} has format {its_format}; this version of lightfed reads format {FORMAT}",
            fix="resume with the version that wrote it, which environment.json names",
        )

    paths = _shard_paths(main, shards)
    for shard in paths[verified]:
        check(shard)
    checkpoint[CLIENTS] = [read(shard) for shard in paths]
    return checkpoint


def _shard_paths(main: Path, shards: Mapping[str, Any]) -> list[Path]:
    """Return the paths of the shards that a main file names.

    Args:
        main: The main file.
        shards: What it says about its shards.

    Raises:
        UserError: What it says cannot be true.
        Damaged: A shard is missing.
    """
    tag = shards.get("tag")
    count = shards.get("ranks")

    # The tag becomes a part of a path, so it must not lead out of the folder.
    is_tag = isinstance(tag, str) and re.fullmatch(r"\w+", tag) is not None
    is_count = isinstance(count, int) and count >= 0
    if not (is_tag and is_count):
        raise UserError(
            key="ckpt_path",
            found=f"{main} names its shards by {tag!r} and {count!r}",
            fix="give another checkpoint",
        )
    assert isinstance(tag, str)
    assert isinstance(count, int)

    # Count the files before making a list of paths: a damaged file can claim any number of them.
    existing = sum(1 for _ in _shard_path(main, tag, 0).parent.glob("rank*.pt"))
    if count > existing:
        first_missing = next(
            path
            for path in (_shard_path(main, tag, rank) for rank in range(existing + 1))
            if not path.is_file()
        )
        raise Damaged(
            key="ckpt_path",
            found=f"{first_missing} cannot be read (no such file; {count} are named)",
            fix="give another checkpoint",
        )
    return [_shard_path(main, tag, rank) for rank in range(count)]


def load_or_before(path: Path, ranks: Ranks) -> tuple[dict[str, Any], bool]:
    """Read a checkpoint; if last.ckpt is damaged, read the one before it and warn.

    Every rank calls it.

    Args:
        path: The main file.
        ranks: The ranks that read it.

    Returns:
        The content, and whether it is that of the checkpoint before.

    Raises:
        UserError: The same as for `load`.
    """
    try:
        return load(path, ranks), False
    except Damaged as damaged:
        before = path.with_name(BEFORE)
        if path.name != LAST or not ranks.any(before.is_file()):
            raise

        try:
            content = load(before, ranks)
        except UserError:
            # The user has asked for the last one, so its error is the one to report.
            raise damaged from None

        rounds = content.get("global_step", "an unknown number of")
        _warn(f"{damaged.found}: {before.name} is loaded instead, after {rounds} rounds")
        return content, True


@rank_zero_only
def _warn(message: str) -> None:
    log.warning("%s", message)


def main_file(path: str | Path) -> Path:
    """Return the main file of a checkpoint.

    Raises:
        UserError: It does not exist.
    """
    main = Path(path).expanduser()
    # The method of a path would raise an OSError for some, such as those that are too long.
    if not isfile(main):
        fix = "give the path of a .ckpt file, or `last`"
        raise UserError("ckpt_path", found=f"no file {main}", fix=fix)
    return main


def shard_folder(main: Path) -> Path:
    """Return the folder of the shards of a main file.

    The last checkpoint and the one before it share a folder, in which each has its own tag.
    """
    name = LAST if main.name == BEFORE else main.name
    return main.with_name(name + ".shards")


def tag_of(main: Path) -> str:
    """Return the tag of the shards of a main file; "" if it cannot be read."""
    # To read a named pipe would wait for a writer.
    if not isfile(main):
        return ""
    try:
        return str(read(main)[SHARDS]["tag"])
    except (UserError, LookupError, TypeError):
        return ""


def remove(path: str | Path) -> None:
    """Remove a checkpoint and its shards; with the last one, also the one before it."""
    main = Path(path)
    main.unlink(missing_ok=True)
    if main.name == LAST:
        main.with_name(BEFORE).unlink(missing_ok=True)
    shutil.rmtree(shard_folder(main), ignore_errors=True)


def _shard_path(main: Path, tag: str, rank: int) -> Path:
    return shard_folder(main) / tag / f"rank{rank}.pt"


def _temporary_path(main: Path, tag: str) -> Path:
    """Return the path of a main file before it takes its place."""
    return main.with_name(f"{main.name}.{tag}.part")


class _Failure(NamedTuple):
    """An error that has kept one rank from writing."""

    rank: int
    host: str
    error: OSError | run_lock.TakenOver


class Writing:
    """A checkpoint that is to be written; every rank makes one.

    Args:
        checkpoint: The content, as dumped by Lightning. In a run with stateful clients, it has the
            rows of this rank's clients under `CLIENTS`.
        path: The main file; that of rank 0 is used.
        ranks: The ranks that write it.
        keeps: Whether the checkpoint that it replaces stays beside it, as `BEFORE`.
    """

    def __init__(
        self, checkpoint: dict[str, Any], path: str | Path, ranks: Ranks, *, keeps: bool = False
    ) -> None:
        main, tag = ranks.broadcast((str(path), uuid4().hex[:12]))
        self._main = Path(main)
        self._tag = tag
        self._keeps = keeps
        self._rows: Saved | None = checkpoint.pop(CLIENTS, None)

        # Only tensors and primitives can be loaded safely, without running code of the file.
        self._content: dict[str, Any] = {}
        for key, value in checkpoint.items():
            if not key.endswith(_NOT_STATE):
                self._content[key] = value

    def detach(self, ranks: Ranks) -> bool:
        """Copy all that training goes on to change, so that `write` can run in a thread.

        Returns:
            Whether it is copied. False, on every rank, if the copy would take more than half of
            the free memory on any of them.
        """
        rows = self._rows or {}  # empty on every rank, or on none
        views = []
        for blocks in rows.values():
            views += [block for block in blocks if block["values"]._is_view()]

        # The free memory is that of the machine, which all ranks may share.
        size = sum(block["values"].nbytes for block in views)
        if rows and ranks.any(2 * size * ranks.world > free_memory()):
            return False

        for block in views:
            block["values"] = block["values"].clone()
        self._content = deepcopy(self._content)
        return True

    def write(self, ranks: Ranks) -> None:
        """Write the checkpoint; every rank does so at the same time.

        If it fails, new files are removed, and the old ones are unchanged.

        Args:
            ranks: The ranks that write; in a thread, the ranks of that thread.

        Raises:
            DiskError: A rank could not write; raised on every rank.
            TakenOver: The run continues in another process.
        """
        shard_count = 0
        if self._rows is not None:
            shard_count = ranks.world
            shard = _shard_path(self._main, self._tag, ranks.rank)
            self._on_all_ranks(lambda: _write(self._rows, shard), ranks)

        # The main file names the shards, so it comes after all of them are complete.
        self._content[SHARDS] = {"tag": self._tag, "ranks": shard_count, "format": FORMAT}
        self._on_all_ranks(lambda: self._commit() if ranks.rank == 0 else None, ranks)

    def _on_all_ranks(self, step: Callable[[], None], ranks: Ranks) -> None:
        """Run a step of writing on every rank; if it fails on one, it fails on all."""
        failures: list[_Failure] = []
        try:
            step()
        except (OSError, run_lock.TakenOver) as error:
            failures.append(_Failure(ranks.rank, socket.gethostname(), error))

        # Every rank must reach this collective, or the others would wait for it forever.
        failures = ranks.gather(failures)
        if not failures:
            return

        # If the failure came after the commit, the new files are those of the checkpoint.
        if ranks.rank == 0 and self._tag != tag_of(self._main):
            self._remove_new()

        failure = failures[0]
        if isinstance(failure.error, run_lock.TakenOver):
            raise failure.error

        # From rank 0: nodes may differ in what they see of the folder.
        raise ranks.broadcast(_disk_error(self._main, failure)) from failure.error

    def _commit(self) -> None:
        """Write the main file and replace the old one."""
        main = self._main
        temporary = _temporary_path(main, self._tag)
        if self._rows is not None:
            # The folder of the tag is an entry of this one.
            flush_folder(shard_folder(main))
        _write(self._content, temporary)

        # As late as possible: nothing may be replaced in a folder that another process owns.
        run_lock.check(main)
        if self._keeps:
            self._keep_old()
        os.replace(temporary, main)
        flush_folder(main.parent)

        # What cannot be removed now is removed with the next checkpoint.
        with suppress(OSError):
            self._remove_others()

    def _keep_old(self) -> None:
        """Give the old main file a second name, so that there is a whole one at every moment."""
        main = self._main
        if not main.is_file() or main.is_symlink():
            return

        before = main.with_name(BEFORE)
        temporary = _temporary_path(before, self._tag)
        try:
            os.link(main, temporary)
        except OSError:
            # The file system has no links.
            shutil.copyfile(main, temporary)
        os.replace(temporary, before)

    def _remove_others(self) -> None:
        """Remove shards of other tags, and what a killed writer left beside the checkpoint."""
        main = self._main
        before = main.with_name(BEFORE)

        kept_tags = {self._tag}
        if main.name == LAST:
            kept_tags.add(tag_of(before))
        for folder in shard_folder(main).glob("*"):
            if folder.name not in kept_tags:
                shutil.rmtree(folder, ignore_errors=True)

        for name in (main, before):
            for leftover in main.parent.glob(_temporary_path(name, "*").name):
                leftover.unlink(missing_ok=True)

    def _remove_new(self) -> None:
        """Remove what this checkpoint has written."""
        folder = shard_folder(self._main)
        shutil.rmtree(folder / self._tag, ignore_errors=True)
        with suppress(OSError):  # it does not exist
            _temporary_path(self._main, self._tag).unlink()
        with suppress(OSError):  # it holds other shards
            folder.rmdir()


def save(
    checkpoint: dict[str, Any], path: str | Path, ranks: Ranks, *, keeps: bool = False
) -> None:
    """Write a checkpoint; every rank calls it, with the arguments and errors of `Writing`."""
    Writing(checkpoint, path, ranks, keeps=keeps).write(ranks)


def _write(content: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: torch.save(content, file))


def _disk_error(main: Path, failure: _Failure) -> DiskError:
    assert isinstance(failure.error, OSError), "a run that is taken over is another error"
    why = failure.error.strerror or failure.error
    fix = f"{repair(failure.error)} and run the same command again"
    if isfile(main):
        fix += f"; {main} is complete"
    return DiskError(
        key="trainer.default_root_dir",
        found=f"checkpoint {main} cannot be written ({why}) on rank {failure.rank} "
        f"({failure.host})",
        fix=fix,
    )


def save_journal(
    suspended: Suspended, path: Path, ranks: Ranks, *, t: int, identity: Mapping[str, Any]
) -> None:
    """Save the finished sessions of a round that is suspended, so that none is trained twice.

    A session is atomic and its draws have names. So a round that starts again from its checkpoint
    has the same sessions. Every rank calls it.

    Args:
        suspended: The finished sessions of this rank.
        path: The main file of the journal.
        ranks: The ranks that write it.
        t: The number of the round.
        identity: Properties that a run that resumes from the journal must share.

    Raises:
        DiskError: A rank could not write; raised on every rank.
        TakenOver: The run continues in another process.
    """
    content = {
        "round": t,
        "call": suspended.call,
        "identity": dict(identity),
        CLIENTS: dict(suspended.finished),
    }
    save(content, path, ranks)


def load_journal(
    path: Path, ranks: Ranks, *, t: int, identity: Mapping[str, Any]
) -> tuple[int, dict[int, dict[str, Any]]] | None:
    """Read the journal of a round; all ranks read it together.

    Args:
        path: The main file of the journal.
        ranks: The ranks that read it.
        t: The number of the round.
        identity: Properties that the run that wrote it must share.

    Returns:
        The number of the call of `train` within the round, and the finished sessions by client.
        None if there is no journal of this round and this federation: that of an earlier round is
        of no use.

    Raises:
        UserError: It cannot be read.
    """
    if not ranks.any(path.is_file()):
        return None

    content = load(path, ranks)
    if content["round"] != t or content["identity"] != dict(identity):
        return None

    session_of_client: dict[int, dict[str, Any]] = {}
    for shard in content[CLIENTS]:
        session_of_client |= shard
    return content["call"], session_of_client
