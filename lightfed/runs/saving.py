"""Writes checkpoints, the last one among them, beside the next round: when, and in which steps.

Shards and main file get temporary names, then their own. `lightfed/runs/checkpoint.py` says which
files a checkpoint has, and why a reader never sees half of one.
"""

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightfed.distributed.collectives import Ranks
from lightfed.local.finished import Suspended
from lightfed.runs import checkpoint, run_lock
from lightfed.runs.checkpoint import (
    CLIENTS,
    FORMAT,
    MAKER,
    SHARDS,
    newest_file,
    part_of,
    previous_of,
    remove_leftovers,
    shard_file,
    shard_folder,
    tags_of,
)
from lightfed.state.chain import Chains, Changes
from lightfed.utils.atomic_io import flush_folder, write_atomically
from lightfed.utils.errors import DiskError, repair
from lightfed.utils.memory import free_memory

NAME = "last.ckpt"
BACKGROUND = "background"  # storage option: training goes on while the checkpoint is written
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
            self._chain = chains.next(folder)
            self._rows = self._chain.changes(self._rows, folder, ranks)

    def detach(self, ranks: Ranks) -> bool:
        """Copy all that training goes on to change, so that `write` can run in a thread.

        Returns False, on every rank, if that takes more than half of the free memory of any.
        """
        if isinstance(self._rows, Changes):
            if ranks.any(2 * self._rows.size * ranks.world > free_memory()):
                return False
            self._rows = self._rows.chosen(copy=True)
        self._content = deepcopy(self._content)
        return True

    def write(self, ranks: Ranks) -> None:
        """Write it; every rank does so at the same time.

        In a thread `ranks` are those of the thread. Raises a DiskError on every rank if any could
        not write, and TakenOver if the run continues in another process. New files are then
        removed, and the old ones are unchanged.
        """
        rows = self._rows.chosen() if isinstance(self._rows, Changes) else self._rows
        if rows is not None:
            shard = shard_file(self._main, self._tag, ranks.rank)
            self._on_all_ranks(lambda: _write(rows, shard), ranks)
        world = 0 if rows is None else ranks.world
        tags = [] if self._chain is None else self._chain.tags
        self._content["hyper_parameters"] = MAKER
        self._content[SHARDS] = {"tags": [*tags, self._tag], "ranks": world, "format": FORMAT}
        self._on_all_ranks(lambda: self._commit() if ranks.rank == 0 else None, ranks)
        if self._chain is not None:
            self._chain.extend(self._tag)

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
        if ranks.rank == 0 and self._tag not in tags_of(self._main):
            self._remove_new()
        rank, host, failure = failures[0]
        if isinstance(failure, run_lock.TakenOver):
            raise failure
        raise ranks.broadcast(_unwritable(self._main, rank, host, failure)) from failure

    def _commit(self) -> None:
        """Write the main file and replace the old one."""
        main, shards = self._main, self._content[SHARDS]
        if shards["ranks"]:
            flush_folder(shard_folder(main))  # the tag's own name
        part = part_of(main, self._tag)
        _write(self._content, part)
        run_lock.check(main)  # at the last moment
        previous = previous_of(main)
        old = tags_of(main) if self._keep_previous else []
        if old:
            os.replace(main, previous)
        os.replace(part, main)
        flush_folder(main.parent)
        with suppress(OSError):  # the next checkpoint removes leftovers
            remove_leftovers(main, {*shards["tags"], *(old or tags_of(previous))})

    def _remove_new(self) -> None:
        folder = shard_folder(self._main)
        shutil.rmtree(folder / self._tag, ignore_errors=True)
        with suppress(OSError):  # it does not exist
            part_of(self._main, self._tag).unlink()
        with suppress(OSError):  # it holds other shards
            folder.rmdir()


def save(checkpoint: dict[str, Any], path: str | Path, ranks: Ranks, **how: Any) -> None:
    """Write a checkpoint; called by every rank, with arguments and errors of `Writing`."""
    Writing(checkpoint, path, ranks, **how).write(ranks)


def save_journal(
    suspended: Suspended, path: Path, ranks: Ranks, *, t: int, identity: Mapping[str, Any]
) -> None:
    """Save the finished sessions of round t, so that they are not trained twice.

    A session is atomic and its draws are named: a round that restarts from its checkpoint has the
    same sessions. Called by every rank, with the errors of `save`. `identity` has properties that a
    run that resumes from it must share.
    """
    rows = {client: done.state_dict() for client, done in suspended.finished.items()}
    content = {"round": t, "call": suspended.call, "identity": dict(identity), CLIENTS: rows}
    save(content, path, ranks, keep_previous=False)


def load_journal(
    path: Path, ranks: Ranks, *, t: int, identity: Mapping[str, Any]
) -> tuple[int, dict[int, dict[str, Any]]] | None:
    """The journal of round t, read by all ranks together: call of `train`, sessions by client.

    None if there is no journal of this round and this federation: one of a finished round is stale.
    A UserError if it cannot be read.
    """
    if not ranks.any(path.is_file()):
        return None
    content = checkpoint.load(path, ranks)
    if content["round"] != t or content["identity"] != dict(identity):
        return None
    return content["call"], {k: s for shard in content[CLIENTS] for k, s in shard.items()}


def _unwritable(main: Path, rank: int, host: str, error: OSError) -> DiskError:
    found = f"checkpoint {main} cannot be written ({error.strerror or error})"
    whole = newest_file(main)
    kept = "" if whole is None else f"; {whole} is complete"
    fix = f"{repair(error)} and run the same command again{kept}"
    return DiskError("trainer.default_root_dir", f"{found} on rank {rank} ({host})", fix)


def _write(content: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: torch.save(content, file))


class Background:
    """Runs one job at a time; what a job raises is raised again by `finish`.

    Attributes:
        failed: whether `finish` raises already.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.failed = False

    def start(self, job: Callable[[], None]) -> None:
        """Run a job, when the one before it has finished.

        The process does not wait for it at its exit, where it would be in the way of an error.
        """
        self.finish()
        name = "lightfed-checkpoint"
        self._thread = threading.Thread(target=self._run, args=(job,), name=name, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the job; what it has raised is raised once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error, self.failed = self._error, None, False
        if error is not None:
            raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._error, self.failed = error, True


class Checkpoints:
    """Saves and loads; every method is called by every rank.

    If `strict`, loading may not fall back to the previous checkpoint. `progressed` says whether
    this process has saved rounds that were not on disk when it started. `background` is the thread
    that writes.
    """

    def __init__(self) -> None:
        self.strict = False
        self.progressed = False
        self._chains = Chains()
        self.background = Background()
        self._came_from: Path | None = None  # the main file that was loaded
        self._loaded = 0  # rounds on disk when this process started

    def save(self, content: dict[str, Any], path: Path, ranks: Ranks, option: object) -> None:
        """Write a checkpoint, after the one before it.

        `content` is as dumped by Lightning. With the option BACKGROUND it returns when all of it is
        copied; `finish` waits for the rest, and has the same errors.
        """
        self.finish()
        # Keep the checkpoint that was loaded until the run has a complete one of its own.
        keep = self._came_from != previous_of(path).resolve()
        chains = self._chains if path.name == NAME else None
        rounds = content["global_step"]
        writing = Writing(content, path, ranks, keep_previous=keep, chains=chains)

        def write(ranks: Ranks) -> None:
            writing.write(ranks)
            self.progressed = rounds > self._loaded
            if not keep:
                self._came_from = None

        if option == BACKGROUND and writing.detach(ranks):
            self.background.start(partial(write, ranks.for_thread()))
        else:
            write(ranks)

    def finish(self) -> None:
        """Wait for the checkpoint that is written while training goes on.

        Raises a DiskError on every rank if it cannot be written, and TakenOver if the run continues
        in another process.
        """
        self.background.finish()

    def load(self, path: Path, ranks: Ranks) -> dict[str, Any]:
        """Read a checkpoint; unless `strict`, or the previous one."""
        if self.strict:
            content = checkpoint.load(path, ranks)
        else:
            content, path = checkpoint.load_newest(path, ranks)
        self._came_from = path.resolve()
        self._loaded = content.get("global_step", 0)
        return content


class LastCheckpoint(ModelCheckpoint):
    """Writes `last.ckpt` before the first round, between rounds, and after the last one.

    A round that ends while the one before is written waits for it. So a crash loses the rounds
    since the last checkpoint that was due, and if it was not complete, since the one before it.

    It is a separate type so that its state is not mixed up with that of a user's checkpoints.

    Args:
        every: rounds between two checkpoints.
        minutes: between two checkpoints; the first of both counts. With neither, every round.

    Attributes:
        is_configured: whether an interval is given.
        rounds: finished in the newest checkpoint, which may be in writing.
    """

    def __init__(self, every: int | None = None, minutes: float | None = None) -> None:
        super().__init__(
            filename=Path(NAME).stem, save_on_train_epoch_end=True, enable_version_counter=False
        )
        self.is_configured = every is not None or minutes is not None
        self._every = every if self.is_configured else 1
        self._minutes = minutes
        self._saved_at = 0.0
        self.rounds = 0

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write to the run folder, where resuming looks for it, regardless of loggers."""
        logger = getattr(trainer, "run_logger", None)
        if logger is not None and logger.claimed:
            self.dirpath = str(logger.folder / "checkpoints")
        super().setup(trainer, pl_module, stage)

    @property
    def path(self) -> Path:
        """Path of the checkpoint, available once the run has its folder."""
        assert self.dirpath is not None, "setup chooses the folder"
        return Path(self.dirpath) / NAME

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the state before the first round, so that the round can be suspended."""
        super().on_train_start(trainer, pl_module)
        resumed = trainer.ckpt_path
        if resumed is None or Path(resumed).resolve() != self.path.resolve():
            self.save(trainer)
        self.rounds, self._saved_at = trainer.global_step, time.monotonic()

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the state after a round, if it is time."""
        due = self._every is not None and trainer.global_step - self.rounds >= self._every
        if self._minutes is not None and not due:
            passed = time.monotonic() - self._saved_at > 60 * self._minutes
            due = trainer.strategy.broadcast(passed)
        if due:
            self.save(trainer, background=True)

    def save(self, trainer: L.Trainer, *, background: bool = False) -> None:
        """Save the state; with `background`, while training goes on."""
        trainer.save_checkpoint(self.path, storage_options=BACKGROUND if background else None)
        self.best_model_path = str(self.path)
        self.rounds, self._saved_at = trainer.global_step, time.monotonic()

    def catch_up(self, trainer: L.Trainer) -> None:
        """Save the state, unless it is that of the newest checkpoint."""
        if self.rounds != trainer.global_step:
            self.save(trainer)
