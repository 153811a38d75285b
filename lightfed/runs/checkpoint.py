"""Checkpoints: one main file and one shard of client rows per rank, committed by `os.replace`.

    last.ckpt                      server state, counters, callbacks: tensors and primitives only
    last.ckpt.shards/<tag>/rank0.pt   states of the stateful clients of rank 0
    before-last.ckpt               the one before, in case the disk loses a block of the last one
    sessions.ckpt                  the journal: finished sessions of an interrupted round, as shards

A reader sees the old checkpoint or the new one, never a mixture. The shards of a new tag and the
main file that names the tag are written and flushed under temporary names. Then the new main file
takes the place of the old one. Shards of other tags are removed last, but for those of the
checkpoint before the last one. What is in a checkpoint is said by `runs/federation_state.py`.
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
from typing import Any
from uuid import uuid4

import torch
from lightning.pytorch.utilities import rank_zero_only

from lightfed.distributed.collectives import Ranks
from lightfed.local.finished import Suspended
from lightfed.runs import run_lock
from lightfed.state.client_state import Saved
from lightfed.utils.atomic_io import Damaged, check, flush_folder, read, write_atomically
from lightfed.utils.errors import DiskError, UserError, repair, require
from lightfed.utils.memory import free_memory

SHARDS = "lightfed_shards"  # key in the main file: tag of the shards, their number, the format
FORMAT = 4  # of the content; a version of lightfed that other versions cannot read counts up
CLIENTS = "lightfed_clients"  # key in a dumped checkpoint: this rank's rows
LAST = "last.ckpt"
BEFORE = "before-last.ckpt"  # beside it
JOURNAL = "sessions.ckpt"
_NOT_STATE = ("hyper_parameters", "hparams_name")  # ends of keys; config.yaml has these values
log = logging.getLogger(__name__)

# Reading.


def load(path: str | Path, ranks: Ranks | None = None) -> dict[str, Any]:
    """Read a checkpoint with all its shards, written by any number of ranks.

    Verifies all checksums. If `ranks` read it together, all call this, each verifies a share of the
    shards, and all return or raise alike. Returns the main file's content, and under `CLIENTS` a
    list of the shards, with memory-mapped tensors. A UserError if it does not exist, is not
    complete, or another version of lightfed wrote it.
    """
    rank, world = (0, 1) if ranks is None else (ranks.rank, ranks.world)
    checkpoint: dict[str, Any] = {}
    failures: list[UserError] = []
    try:
        checkpoint = _load(path, share=slice(rank, None, world))
    except UserError as error:
        failures = [error]
    for failure in failures if ranks is None else ranks.gather(failures):
        raise failure
    return checkpoint


def _load(path: str | Path, *, share: slice) -> dict[str, Any]:
    """Read main file and shards; verify the checksums of a share of the shards."""
    main = main_file(path).resolve()  # ModelCheckpoint(save_last="link") makes links
    check(main)
    checkpoint = read(main)
    shards = checkpoint.get(SHARDS) if isinstance(checkpoint, dict) else None
    fix = "give one of a lightfed run"
    if not isinstance(shards, dict):
        raise UserError("ckpt_path", f"{main} was not written by lightfed", fix)
    written = shards.get("format")
    if written != FORMAT:
        found = f"{main} has format {written}; this version of lightfed reads format {FORMAT}"
        fix = "resume with the version that wrote it, which environment.json names"
        raise UserError("ckpt_path", found, fix)
    files = _shards(main, shards)
    for file in files[share]:
        check(file)
    checkpoint[CLIENTS] = [read(file) for file in files]
    return checkpoint


def _shards(main: Path, named: Mapping[str, Any]) -> list[Path]:
    """The files of the shards that a main file names.

    A UserError if it names none that could be there; Damaged if some are not there. It is compared
    with the files before there is a list of them: what a file claims may be any number.
    """
    tag, ranks = named.get("tag"), named.get("ranks")
    named_well = isinstance(tag, str) and re.fullmatch(r"\w+", tag) is not None
    fits = named_well and isinstance(ranks, int) and ranks >= 0
    fix = "give another checkpoint"
    require(fits, "ckpt_path", f"{main} names its shards by {tag!r} and {ranks!r}", fix)
    assert isinstance(tag, str), "it is named well"
    assert isinstance(ranks, int), "it is a number"
    there = sum(1 for _ in _shard(main, tag, 0).parent.glob("rank*.pt"))
    if ranks > there:
        missing = next(rank for rank in range(there + 1) if not _shard(main, tag, rank).is_file())
        found = f"{_shard(main, tag, missing)} cannot be read (no such file; {ranks} are named)"
        raise Damaged("ckpt_path", found, fix)
    return [_shard(main, tag, rank) for rank in range(ranks)]


def load_or_before(path: Path, ranks: Ranks) -> tuple[dict[str, Any], bool]:
    """Read a checkpoint; where last.ckpt is damaged, the one before it, with a line.

    Called by every rank, with the errors of `load`. Returns the content, and whether it is that of
    the one before.
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
            raise damaged from None  # it is the one that was asked for
        rounds = content.get("global_step", "an unknown number of")
        found = f"{damaged.found}: {before.name} is loaded instead, after {rounds} rounds"
        _warn(found)
        return content, True


@rank_zero_only
def _warn(message: str) -> None:
    log.warning("%s", message)


def main_file(path: str | Path) -> Path:
    """The main file of a checkpoint; a UserError if it does not exist."""
    main = Path(path).expanduser()
    fix = "give the path of a .ckpt file, or `last`"
    require(isfile(main), "ckpt_path", f"no file {main}", fix)  # no OSError
    return main


def shard_folder(main: Path) -> Path:
    """The folder of a main file's shards; the one before the last has its tag among the last's."""
    name = LAST if main.name == BEFORE else main.name
    return main.with_name(name + ".shards")


def tag_of(main: Path) -> str:
    """The tag of a main file's shards; "" if it cannot be read."""
    if not isfile(main):  # to read a pipe would wait for a writer
        return ""
    try:
        return str(read(main)[SHARDS]["tag"])
    except (UserError, LookupError, TypeError):
        return ""


def remove(path: str | Path) -> None:
    """Remove a checkpoint and its shards."""
    Path(path).unlink(missing_ok=True)
    if Path(path).name == LAST:
        Path(path).with_name(BEFORE).unlink(missing_ok=True)
    shutil.rmtree(shard_folder(Path(path)), ignore_errors=True)


def _shard(main: Path, tag: str, rank: int) -> Path:
    return shard_folder(main) / tag / f"rank{rank}.pt"


def _part(main: Path, tag: str) -> Path:
    """The path of a main file before it takes its place."""
    return main.with_name(f"{main.name}.{tag}.part")


# Writing.


class Writing:
    """A checkpoint, as dumped by Lightning, that is to be written; every rank makes one.

    The rows of this rank's clients are under `CLIENTS`, on stateful runs. `path`, of rank 0, is
    that of the main file. With `keeps`, the checkpoint that it replaces stays beside it, as BEFORE.
    """

    def __init__(
        self, checkpoint: dict[str, Any], path: str | Path, ranks: Ranks, *, keeps: bool = False
    ) -> None:
        main, self._tag = ranks.broadcast((str(path), uuid4().hex[:12]))
        self._main, self._keeps = Path(main), keeps
        self._rows: Saved | None = checkpoint.pop(CLIENTS, None)
        keys = [key for key in checkpoint if not key.endswith(_NOT_STATE)]
        self._content = {key: checkpoint[key] for key in keys}  # only primitives load safely

    def detach(self, ranks: Ranks) -> bool:
        """Copy all that training goes on to change, so that `write` can run in a thread.

        Returns False, on every rank, if that takes more than half of the free memory of any.
        """
        rows = self._rows or {}  # empty on every rank, or on none
        views = [block for own in rows.values() for block in own if block["values"]._is_view()]
        size = sum(block["values"].nbytes for block in views)
        if rows and ranks.any(2 * size * ranks.world > free_memory()):
            return False
        for block in views:
            block["values"] = block["values"].clone()
        self._content = deepcopy(self._content)
        return True

    def write(self, ranks: Ranks) -> None:
        """Write it; every rank does so at the same time.

        In a thread `ranks` are those of the thread. Raises a DiskError on every rank if any could
        not write, and TakenOver if the run continues in another process. New files are then
        removed, and the old ones are unchanged.
        """
        if self._rows is not None:
            shard = _shard(self._main, self._tag, ranks.rank)
            self._on_all_ranks(lambda: _write(self._rows, shard), ranks)
        world = 0 if self._rows is None else ranks.world
        self._content[SHARDS] = {"tag": self._tag, "ranks": world, "format": FORMAT}
        self._on_all_ranks(lambda: self._commit() if ranks.rank == 0 else None, ranks)

    def _on_all_ranks(self, step: Callable[[], None], ranks: Ranks) -> None:
        """Run a writing step on every rank; if it fails on one, no rank waits for it."""
        failures: list[tuple[int, str, OSError | run_lock.TakenOver]] = []
        try:
            step()
        except (OSError, run_lock.TakenOver) as error:
            failures = [(ranks.rank, socket.gethostname(), error)]
        failures = ranks.gather(failures)
        if not failures:
            return
        if ranks.rank == 0 and self._tag != tag_of(self._main):
            self._remove_new()
        rank, host, failure = failures[0]
        if isinstance(failure, run_lock.TakenOver):
            raise failure
        raise ranks.broadcast(_unwritable(self._main, rank, host, failure)) from failure

    def _commit(self) -> None:
        """Write the main file and replace the old one."""
        main = self._main
        if self._rows is not None:
            flush_folder(shard_folder(main))  # the tag's own name
        _write(self._content, _part(main, self._tag))
        run_lock.check(main)  # at the last moment
        if self._keeps:
            self._keep_old()
        os.replace(_part(main, self._tag), main)
        flush_folder(main.parent)
        with suppress(OSError):  # the next checkpoint removes leftovers
            self._remove_others()

    def _keep_old(self) -> None:
        """Give the old main file a second name, so that there is a whole one at every moment."""
        main = self._main
        if not main.is_file() or main.is_symlink():
            return
        before = main.with_name(BEFORE)
        second = _part(before, self._tag)
        try:
            os.link(main, second)
        except OSError:  # a file system without links
            shutil.copyfile(main, second)
        os.replace(second, before)

    def _remove_others(self) -> None:
        """Remove shards of other tags, and what a killed writer left next to the checkpoint."""
        main = self._main
        kept = {self._tag}
        if main.name == LAST:
            kept.add(tag_of(main.with_name(BEFORE)))
        for old in shard_folder(main).glob("*"):
            if old.name not in kept:
                shutil.rmtree(old, ignore_errors=True)
        for name in (main, main.with_name(BEFORE)):
            for part in main.parent.glob(_part(name, "*").name):
                part.unlink(missing_ok=True)

    def _remove_new(self) -> None:
        folder = shard_folder(self._main)
        shutil.rmtree(folder / self._tag, ignore_errors=True)
        with suppress(OSError):  # it does not exist
            _part(self._main, self._tag).unlink()
        with suppress(OSError):  # it holds other shards
            folder.rmdir()


def save(
    checkpoint: dict[str, Any], path: str | Path, ranks: Ranks, *, keeps: bool = False
) -> None:
    """Write a checkpoint; called by every rank, with arguments and errors of `Writing`."""
    Writing(checkpoint, path, ranks, keeps=keeps).write(ranks)


def _write(content: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: torch.save(content, file))


def _unwritable(main: Path, rank: int, host: str, error: OSError) -> DiskError:
    found = f"checkpoint {main} cannot be written ({error.strerror or error})"
    kept = f"; {main} is complete" if isfile(main) else ""
    fix = f"{repair(error)} and run the same command again{kept}"
    return DiskError("trainer.default_root_dir", f"{found} on rank {rank} ({host})", fix)


# The journal of a round.


def save_journal(
    suspended: Suspended, path: Path, ranks: Ranks, *, t: int, identity: Mapping[str, Any]
) -> None:
    """Save the finished sessions of round t, so that they are not trained twice.

    A session is atomic and its draws are named: a round that restarts from its checkpoint has the
    same sessions. Called by every rank, with the errors of `save`. `identity` has properties that a
    run that resumes from it must share.
    """
    rows = dict(suspended.finished)
    content = {"round": t, "call": suspended.call, "identity": dict(identity), CLIENTS: rows}
    save(content, path, ranks)


def load_journal(
    path: Path, ranks: Ranks, *, t: int, identity: Mapping[str, Any]
) -> tuple[int, dict[int, dict[str, Any]]] | None:
    """The journal of round t, read by all ranks together: call of `train`, sessions by client.

    None if there is no journal of this round and this federation: one of a finished round is stale.
    A UserError if it cannot be read.
    """
    if not ranks.any(path.is_file()):
        return None
    content = load(path, ranks)
    if content["round"] != t or content["identity"] != dict(identity):
        return None
    return content["call"], {k: s for shard in content[CLIENTS] for k, s in shard.items()}
