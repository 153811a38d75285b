"""Checkpoints: one main file, one shard of client rows a rank, committed by one `os.replace`.

    last.ckpt                      server state, counters, callbacks: tensors and primitives only
    last.ckpt.shards/<tag>/rank0.pt   the rows of the stateful clients that lie on rank 0, keyed by
    client

A reader sees the old checkpoint or the new one, never a mixture: shards of a new tag are written
and flushed before the main file that names the tag replaces the old one in the same folder; shards
of other tags are removed after it.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from lightfed.comm.collectives import Ranks
from lightfed.utils.errors import UserError

SHARDS = "lightfed_shards"  # key in the main file: tag of the shards and their number
CLIENTS = "lightfed_clients"  # key in a dumped checkpoint: this rank's rows
_NOT_STATE = (
    "hyper_parameters",
    "hparams_name",
    "datamodule_hyper_parameters",
    "datamodule_hparams_name",
)


def save(checkpoint: dict[str, Any], path: str | Path, ranks: Ranks) -> None:
    """Write a checkpoint; called by every rank.

    Args:
        checkpoint: as dumped by Lightning; the rows of this rank's clients under `CLIENTS`, on
            stateful runs.
        path: of the main file; rank 0's is used.
        ranks: of the run.
    """
    main = Path(ranks.broadcast(str(path)))
    tag = ranks.broadcast(uuid4().hex[:12])
    rows = checkpoint.pop(CLIENTS, None)
    for key in _NOT_STATE:
        checkpoint.pop(
            key, None
        )  # the configuration is in config.yaml; only primitives load safely
    folder = shard_folder(main)
    if rows is not None:
        (folder / tag).mkdir(parents=True, exist_ok=True)
        _write(rows, folder / tag / f"rank{ranks.rank}.pt")
    ranks.barrier()
    if ranks.rank == 0:
        main.parent.mkdir(parents=True, exist_ok=True)
        checkpoint[SHARDS] = {"tag": tag, "ranks": ranks.world if rows is not None else 0}
        _write(checkpoint, main)
        _remove_shards(folder, keep=tag if rows is not None else None)
        _remove_leftovers(main)
    ranks.barrier()


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint with all its shards; any number of ranks may read it.

    Returns:
        the main file's content, and under `CLIENTS` a list of the shards, their tensors mapped, not
        read.

    Raises:
        UserError: there is no such file, or it is no complete checkpoint.
    """
    main = main_file(path).resolve()  # ModelCheckpoint(save_last="link") makes links
    checkpoint = _read(main)
    if not isinstance(checkpoint, dict) or SHARDS not in checkpoint:
        raise UserError(
            "ckpt_path",
            f"{main} was not written by lightfed",
            "give a checkpoint of a lightfed run",
        )
    shards = checkpoint[SHARDS]
    folder = shard_folder(main) / shards["tag"]
    checkpoint[CLIENTS] = [_read(folder / f"rank{r}.pt") for r in range(shards["ranks"])]
    return checkpoint


def main_file(path: str | Path) -> Path:
    """The main file of a checkpoint.

    Raises:
        UserError: there is no such file.
    """
    main = Path(path)
    if not main.is_file():
        raise UserError("ckpt_path", f"no file {main}", "give the path of a .ckpt file, or `last`")
    return main


def remove(path: str | Path) -> None:
    """Remove a checkpoint and its shards."""
    main = Path(path)
    main.unlink(missing_ok=True)
    shutil.rmtree(shard_folder(main), ignore_errors=True)


def shard_folder(main: Path) -> Path:
    return main.with_name(main.name + ".shards")


def write_atomically(path: Path, write: Any) -> None:
    """Make `path` whole or not at all.

    A temporary file beside it, flushed to disk, then renamed over it.

    Args:
        path: the target.
        write: called with a binary file.
    """
    temporary = path.with_name(f"{path.name}.{uuid4().hex[:8]}.part")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(content: Any, path: Path) -> None:
    write_atomically(path, lambda file: torch.save(content, file))


def _read(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises half a dozen types for a broken archive
        reason = re.split(r"\n|\. ", str(error))[0]
        raise UserError(
            "ckpt_path", f"{path} cannot be read ({reason})", "give another checkpoint"
        ) from error


def _remove_shards(folder: Path, *, keep: str | None) -> None:
    if not folder.is_dir():
        return
    for old in folder.iterdir():
        if old.name != keep:
            shutil.rmtree(old, ignore_errors=True)


def _remove_leftovers(main: Path) -> None:
    """What a killed writer left beside the checkpoint."""
    for part in main.parent.glob(f"{main.name}.*.part"):
        part.unlink(missing_ok=True)
