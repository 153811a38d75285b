"""Checkpoints: one main file and one shard of client rows per rank, committed by `os.replace`.

    last.ckpt                      server state, counters, callbacks: tensors and primitives only
    last.previous.ckpt             the one before it, in case the newest gets corrupted
    last.ckpt.shards/<tag>/rank0.pt   states of the stateful clients of rank 0

A reader sees the old checkpoint or the new one, never a mixture. The shards of a new tag and the
main file that names the tag are written and flushed under temporary names. Then the old main file
is renamed to the previous one and the new file takes its place. Shards of other tags are removed
last. Whenever the writer dies, at least one of the two main files exists and `load_newest` finds
it. A main file names several tags if each has only the clients that had changed (`state/chain.py`).
"""

import errno
import logging
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from lightfed.distributed.collectives import Ranks
from lightfed.runs import run_lock
from lightfed.state.chain import Chains
from lightfed.utils.atomic_io import check, flush_folder, read, write_atomically
from lightfed.utils.errors import DiskError, UserError, require

SHARDS = "lightfed_shards"  # key in the main file: tags of the shards, number of each, the format
FORMAT = 3  # of the content; a version of lightfed that other versions cannot read counts up
CLIENTS = "lightfed_clients"  # key in a dumped checkpoint: this rank's rows
_PREVIOUS = ".previous"
_NOT_STATE = ("hyper_parameters", "hparams_name")  # ends of keys; config.yaml has these values
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
log = logging.getLogger(__name__)


class OtherFormat(UserError):
    """A checkpoint is intact, but another version of lightfed wrote it."""


def save(
    checkpoint: dict[str, Any],
    path: str | Path,
    ranks: Ranks,
    *,
    keep_previous: bool = True,
    chains: Chains | None = None,
) -> None:
    """Write a checkpoint; called by every rank.

    Args:
        checkpoint: as dumped by Lightning; the rows of this rank's clients under `CLIENTS`, on
            stateful runs.
        path: of the main file; rank 0's is used.
        ranks: of the run.
        keep_previous: whether the replaced checkpoint becomes the previous one. If not, or if it is
            incomplete, an existing previous one stays.
        chains: those of this main file; only clients that have changed are then written.

    Raises:
        DiskError: on every rank, if any could not write. New files are removed and the old ones
            are unchanged.
        TakenOver: on every rank, if the run continues in another process; new files are removed.
    """
    main = Path(ranks.broadcast(str(path)))
    tag = ranks.broadcast(uuid4().hex[:12])
    rows = checkpoint.pop(CLIENTS, None)
    chain = None if chains is None or rows is None else chains.next(shard_folder(main))
    for key in [key for key in checkpoint if key.endswith(_NOT_STATE)]:
        del checkpoint[key]  # only primitives can be loaded safely
    if rows is not None:
        rows = rows if chain is None else chain.changes(rows, shard_folder(main), ranks)
        shard = shard_folder(main) / tag / f"rank{ranks.rank}.pt"
        _together(lambda: _write(rows, shard), main, tag, ranks)
    tags = [tag] if chain is None else [*chain.tags, tag]
    world = 0 if rows is None else ranks.world
    checkpoint[SHARDS] = {"tags": tags, "ranks": world, "format": FORMAT}

    def commit() -> None:
        if ranks.rank == 0:
            _commit(checkpoint, main, tag, keep_previous=keep_previous)

    _together(commit, main, tag, ranks)
    if chain is not None:
        chain.extend(tag)


def load(path: str | Path, ranks: Ranks | None = None) -> dict[str, Any]:
    """Read a checkpoint with all its shards, written by any number of ranks.

    Verifies all checksums.

    Args:
        path: of the main file.
        ranks: the ranks that read it together: all call this, each verifies a share of the shards,
            and all return or raise alike. None for a single reader.

    Returns:
        the main file's content, and under `CLIENTS` a list of the shards, oldest first, with
        memory-mapped tensors. A client's state is that of the last shard that has it.

    Raises:
        UserError: the file does not exist, or is not a complete checkpoint.
        OtherFormat: another version of lightfed wrote it.
    """
    share, shares = (0, 1) if ranks is None else (ranks.rank, ranks.world)
    checkpoint: dict[str, Any] = {}
    failures: list[UserError] = []
    try:
        checkpoint = _load(path, share=share, shares=shares)
    except UserError as error:
        failures = [error]
    failures = failures if ranks is None else ranks.gather(failures)
    if failures:
        raise failures[0]
    return checkpoint


def load_newest(path: str | Path, ranks: Ranks) -> tuple[dict[str, Any], Path]:
    """Read a checkpoint, or the previous one if it is unreadable; called by every rank.

    Returns:
        the checkpoint as from `load` and its main file, the same on every rank.

    Raises:
        UserError: neither can be read.
        OtherFormat: another version of lightfed wrote the newest; the run would lose its rounds.
    """
    main = Path(path)
    previous = previous_of(main)
    if not ranks.any(previous.is_file()):
        return load(main, ranks), main
    if not ranks.any(main.is_file()):  # the writer died between two renames: nothing is lost
        return load(previous, ranks), previous
    try:
        return load(main, ranks), main
    except OtherFormat:
        raise
    except UserError as error:
        newest = error
    try:
        checkpoint = load(previous, ranks)
    except UserError as error:
        found = f"{newest.found}, and {error.found}"
        raise UserError("ckpt_path", found, "give another checkpoint") from error
    if ranks.rank == 0:
        log.warning("%s; resuming from %s instead", newest.found, previous)
    return checkpoint, previous


def newest_file(path: str | Path) -> Path | None:
    """The main file, or the previous one if a killed writer left only that; None without either."""
    main = Path(path)
    return next((file for file in (main, previous_of(main)) if file.is_file()), None)


def main_file(path: str | Path) -> Path:
    """The main file of a checkpoint.

    Raises:
        UserError: the file does not exist.
    """
    main = Path(path)
    if not main.is_file():
        other = newest_file(main) or "the path of a .ckpt file, or `last`"
        raise UserError("ckpt_path", f"no file {main}", f"give {other}")
    return main


def previous_of(main: Path) -> Path:
    """The path of the checkpoint that `main` has replaced."""
    return main.with_name(f"{main.stem}{_PREVIOUS}{main.suffix}")


def remove(path: str | Path) -> None:
    """Remove a checkpoint, the one before it, and their shards."""
    main = Path(path)
    previous_of(main).unlink(missing_ok=True)
    main.unlink(missing_ok=True)
    shutil.rmtree(main.with_name(main.name + ".shards"), ignore_errors=True)


def shard_folder(main: Path) -> Path:
    """The folder of a main file's shards, shared with the previous checkpoint."""
    return main.with_name(main.stem.removesuffix(_PREVIOUS) + main.suffix + ".shards")


def _together(step: Callable[[], None], main: Path, tag: str, ranks: Ranks) -> None:
    """Run a writing step on every rank; if it fails on one, no rank waits for it."""
    failures: list[tuple[int, str, OSError | run_lock.TakenOver]] = []
    try:
        step()
    except (OSError, run_lock.TakenOver) as error:
        failures = [(ranks.rank, socket.gethostname(), error)]
    failures = ranks.gather(failures)
    if not failures:
        return
    if ranks.rank == 0:
        _remove_new(main, tag)
    rank, host, failure = failures[0]
    if isinstance(failure, run_lock.TakenOver):
        raise failure
    raise ranks.broadcast(_unwritable(main, rank, host, failure)) from failure


def _unwritable(main: Path, rank: int, host: str, error: OSError) -> DiskError:
    reason = error.strerror or str(error)
    found = f"checkpoint {main} cannot be written ({reason}) on rank {rank} ({host})"
    repair = "free space" if error.errno in _FULL else "repair the file system"
    whole = newest_file(main)
    kept = "" if whole is None else f"; {whole} is complete"
    return DiskError(
        "trainer.default_root_dir", found, f"{repair} and run the same command again{kept}"
    )


def _commit(checkpoint: dict[str, Any], main: Path, tag: str, *, keep_previous: bool) -> None:
    """Write the main file and replace the old one; called only by rank 0."""
    if checkpoint[SHARDS]["ranks"]:
        flush_folder(shard_folder(main))  # the tag's own name
    new = _part(main, tag)
    _write(checkpoint, new)
    run_lock.check(main)  # at the last moment
    previous = previous_of(main)
    old = _tags(main) if keep_previous else []
    if old:
        os.replace(main, previous)
    os.replace(new, main)
    flush_folder(main.parent)
    with suppress(OSError):  # the next checkpoint removes leftovers
        _remove_leftovers(main, {*checkpoint[SHARDS]["tags"], *(old or _tags(previous))})


def _write(content: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: torch.save(content, file))


def _load(path: str | Path, *, share: int, shares: int) -> dict[str, Any]:
    """Read main file and shards; verify every `shares`-th shard's checksums, from `share`."""
    main = main_file(path).resolve()  # ModelCheckpoint(save_last="link") makes links
    check(main)
    checkpoint = _read_main(main)
    shards = checkpoint[SHARDS]
    written = shards.get("format", 1)  # version 0.1 does not name its own
    if written != FORMAT:
        found = f"{main} has format {written}; this version of lightfed reads format {FORMAT}"
        fix = "resume with the version that wrote it, which environment.json names"
        raise OtherFormat("ckpt_path", found, fix)
    names = [f"{tag}/rank{r}.pt" for tag in shards["tags"] for r in range(shards["ranks"])]
    files = [shard_folder(main) / name for name in names]
    for file in files[share::shares]:
        check(file)
    checkpoint[CLIENTS] = [read(file) for file in files]
    return checkpoint


def _read_main(path: Path) -> dict[str, Any]:
    checkpoint = read(path)
    ours, fix = isinstance(checkpoint, dict) and SHARDS in checkpoint, "give one of a lightfed run"
    require(ours, "ckpt_path", f"{path} was not written by lightfed", fix)
    return checkpoint


def _tags(main: Path) -> list[str]:
    """The tags of a main file's shards; none if it cannot be read."""
    try:
        return list(_read_main(main)[SHARDS]["tags"])
    except (UserError, KeyError):
        return []


def _remove_new(main: Path, tag: str) -> None:
    """Remove the files of a failed checkpoint, unless it is already in place."""
    if tag in _tags(main):
        return
    shutil.rmtree(shard_folder(main) / tag, ignore_errors=True)
    with suppress(OSError):  # it does not exist
        _part(main, tag).unlink()
    with suppress(OSError):  # it holds other shards
        shard_folder(main).rmdir()


def _remove_leftovers(main: Path, keep: set[str]) -> None:
    """Remove shards of other tags, and what a killed writer left next to the checkpoint."""
    for old in shard_folder(main).glob("*"):
        if old.name not in keep:
            shutil.rmtree(old, ignore_errors=True)
    for part in main.parent.glob(f"{main.name}.*.part"):
        part.unlink(missing_ok=True)


def _part(main: Path, tag: str) -> Path:
    """The main file before it takes its place."""
    return main.with_name(f"{main.name}.{tag}.part")
