"""Writes checkpoints: shards and main file under temporary names, then the names of both.

`lightfed/runs/checkpoint.py` says which files a checkpoint has, and why a reader never sees half of
one.
"""

import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from lightfed.distributed.collectives import Ranks
from lightfed.runs import run_lock
from lightfed.runs.checkpoint import (
    CLIENTS,
    FORMAT,
    MAKER,
    SHARDS,
    newest_file,
    previous_of,
    shard_folder,
    tags_of,
)
from lightfed.state.chain import Chains, Changes
from lightfed.utils.atomic_io import flush_folder, write_atomically
from lightfed.utils.errors import DiskError, repair
from lightfed.utils.memory import free_memory

_NOT_STATE = ("hyper_parameters", "hparams_name")  # ends of keys; config.yaml has these values


class Writing:
    """A checkpoint, as dumped by Lightning, that is to be written; every rank makes one.

    The rows of this rank's clients are under `CLIENTS`, on stateful runs. `path`, of rank 0, is
    that of the main file. `keep_previous`: the replaced checkpoint becomes the previous one; if
    not, or if it is incomplete, an existing previous one stays. With the chains of this main file
    only clients that have changed are written.
    """

    def __init__(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        ranks: Ranks,
        *,
        keep_previous: bool = True,
        chains: Chains | None = None,
    ) -> None:
        main, self._tag = ranks.broadcast((str(path), uuid4().hex[:12]))
        self._main = Path(main)
        self._keep_previous = keep_previous
        self._rows, self._chain = checkpoint.pop(CLIENTS, None), None
        keys = [key for key in checkpoint if not key.endswith(_NOT_STATE)]
        self._content = {key: checkpoint[key] for key in keys}  # only primitives load safely
        if chains is not None and self._rows is not None:
            folder = shard_folder(self._main)
            self._copies, self._chain = chains.copies, chains.next(folder)
            self._rows = self._chain.changes(self._rows, folder, ranks)

    def detach(self, ranks: Ranks) -> bool:
        """Copy all that training goes on to change, so that `write` can run in a thread.

        Returns False, on every rank, if that takes more than half of the free memory of any.
        """
        if isinstance(self._rows, Changes):
            if ranks.any(2 * self._rows.size * ranks.world > free_memory()):
                return False
            self._rows = self._rows.chosen(self._copies)
        self._content = deepcopy(self._content)
        return True

    def write(self, ranks: Ranks) -> None:
        """Write it; every rank does so at the same time.

        In a thread `ranks` are those of the thread. Raises a DiskError on every rank if any could
        not write, and TakenOver if the run continues in another process. New files are then
        removed, and the old ones are unchanged.
        """
        main, tag, chain = self._main, self._tag, self._chain
        rows = self._rows.chosen() if isinstance(self._rows, Changes) else self._rows
        if rows is not None:
            shard = shard_folder(main) / tag / f"rank{ranks.rank}.pt"
            _together(lambda: _write(rows, shard), main, tag, ranks)
        tags = [tag] if chain is None else [*chain.tags, tag]
        world = 0 if rows is None else ranks.world
        self._content["hyper_parameters"] = MAKER
        self._content[SHARDS] = {"tags": tags, "ranks": world, "format": FORMAT}

        def commit() -> None:
            if ranks.rank == 0:
                _commit(self._content, main, tag, keep_previous=self._keep_previous)

        _together(commit, main, tag, ranks)
        if chain is not None:
            chain.extend(tag)


def save(checkpoint: dict[str, Any], path: str | Path, ranks: Ranks, **how: Any) -> None:
    """Write a checkpoint; called by every rank, with arguments and errors of `Writing`."""
    Writing(checkpoint, path, ranks, **how).write(ranks)


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
    whole = newest_file(main)
    kept = "" if whole is None else f"; {whole} is complete"
    return DiskError(
        "trainer.default_root_dir", found, f"{repair(error)} and run the same command again{kept}"
    )


def _commit(checkpoint: dict[str, Any], main: Path, tag: str, *, keep_previous: bool) -> None:
    """Write the main file and replace the old one; called only by rank 0."""
    if checkpoint[SHARDS]["ranks"]:
        flush_folder(shard_folder(main))  # the tag's own name
    new = _part(main, tag)
    _write(checkpoint, new)
    run_lock.check(main)  # at the last moment
    previous = previous_of(main)
    old = tags_of(main) if keep_previous else []
    if old:
        os.replace(main, previous)
    os.replace(new, main)
    flush_folder(main.parent)
    with suppress(OSError):  # the next checkpoint removes leftovers
        _remove_leftovers(main, {*checkpoint[SHARDS]["tags"], *(old or tags_of(previous))})


def _write(content: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: torch.save(content, file))


def _remove_new(main: Path, tag: str) -> None:
    """Remove the files of a failed checkpoint, unless it is already in place."""
    if tag in tags_of(main):
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
