"""Checkpoints: one main file and one shard of client rows per rank, committed by `os.replace`.

    last.ckpt                      server state, counters, callbacks: tensors and primitives only
    last.previous.ckpt             the one before it, in case the newest gets corrupted
    last.ckpt.shards/<tag>/rank0.pt   states of the stateful clients of rank 0
    sessions.ckpt                  the journal: finished sessions of an interrupted round, as shards

A reader sees the old checkpoint or the new one, never a mixture. The shards of a new tag and the
main file that names the tag are written and flushed under temporary names. Then the old main file
is renamed to the previous one and the new file takes its place. Shards of other tags are removed
last. Whenever the writer dies, at least one of the two main files exists and `load_newest` finds
it. A main file names several tags if each has only the clients that had changed (`state/chain.py`).
"""

import logging
import shutil
from collections.abc import Collection
from os.path import isfile
from pathlib import Path
from typing import Any

from lightfed.distributed.collectives import Ranks
from lightfed.utils.atomic_io import check, read
from lightfed.utils.errors import UserError, require
from lightfed.utils.lightning_private import may_make_modules

SHARDS = "lightfed_shards"  # key in the main file: tags of the shards, number of each, the format
FORMAT = 3  # of the content; a version of lightfed that other versions cannot read counts up
CLIENTS = "lightfed_clients"  # key in a dumped checkpoint: this rank's rows
JOURNAL = "sessions.ckpt"
_PREVIOUS = ".previous"
log = logging.getLogger(__name__)


def load_server_safetensors_instead(module: type, arguments: Any) -> Any:
    """What Lightning's `load_from_checkpoint` calls to make the user's module: a UserError."""
    found = f"a checkpoint of a federation, not of a {module.__name__}"
    fix = "load models/server.safetensors of its run folder by load_state_dict (docs/python.md)"
    raise UserError("load_from_checkpoint", found, fix)


MAKER = {"_instantiator": f"{__name__}.{load_server_safetensors_instead.__name__}"}
"""`hyper_parameters` of a main file: the function that makes its module."""

may_make_modules(MAKER["_instantiator"])


class OtherFormat(UserError):
    """A checkpoint is intact, but another version of lightfed wrote it."""


def load(path: str | Path, ranks: Ranks | None = None) -> dict[str, Any]:
    """Read a checkpoint with all its shards, written by any number of ranks.

    Verifies all checksums. If `ranks` read it together, all call this, each verifies a share of the
    shards, and all return or raise alike. Returns the main file's content, and under `CLIENTS` a
    list of the shards, oldest first, with memory-mapped tensors. A client's state is that of the
    last shard that has it. Raises OtherFormat if another version of lightfed wrote it, and a
    UserError if it does not exist or is not complete.
    """
    if ranks is None:
        return _load(path, share=slice(None))
    checkpoint: dict[str, Any] = {}
    failures: list[UserError] = []
    try:
        checkpoint = _load(path, share=slice(ranks.rank, None, ranks.world))
    except UserError as error:
        failures = [error]
    for failure in ranks.gather(failures):
        raise failure
    return checkpoint


def load_newest(path: str | Path, ranks: Ranks) -> tuple[dict[str, Any], Path]:
    """Read a checkpoint, or the previous one if it is unreadable; called by every rank.

    Also returns its main file, the same on every rank. A UserError if neither can be read.
    OtherFormat if another version of lightfed wrote the newest: the run would lose its rounds.
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
    return next((file for file in (main, previous_of(main)) if isfile(file)), None)  # no OSError


def main_file(path: str | Path) -> Path:
    """The main file of a checkpoint; a UserError if it does not exist."""
    main = Path(path).expanduser()
    if not isfile(main):
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


def remove_leftovers(main: Path, keep: Collection[str]) -> None:
    """Remove shards of other tags, and what a killed writer left next to the checkpoint."""
    for old in shard_folder(main).glob("*"):
        if old.name not in keep:
            shutil.rmtree(old, ignore_errors=True)
    for part in main.parent.glob(part_of(main, "*").name):
        part.unlink(missing_ok=True)


def shard_folder(main: Path) -> Path:
    """The folder of a main file's shards, shared with the previous checkpoint."""
    return main.with_name(main.stem.removesuffix(_PREVIOUS) + main.suffix + ".shards")


def shard_file(main: Path, tag: str, rank: int) -> Path:
    """The shard of a rank."""
    return shard_folder(main) / tag / f"rank{rank}.pt"


def part_of(main: Path, tag: str) -> Path:
    """The path of a main file before it takes its place."""
    return main.with_name(f"{main.name}.{tag}.part")


def tags_of(main: Path) -> list[str]:
    """The tags of a main file's shards; none if it cannot be read."""
    if not isfile(main):  # to read a pipe would wait for a writer
        return []
    try:
        return list(_read_main(main)[SHARDS]["tags"])
    except (UserError, KeyError):
        return []


def _load(path: str | Path, *, share: slice) -> dict[str, Any]:
    """Read main file and shards; verify the checksums of a share of the shards."""
    main = main_file(path).resolve()  # ModelCheckpoint(save_last="link") makes links
    check(main)
    checkpoint = _read_main(main)
    shards = checkpoint[SHARDS]
    written = shards.get("format")
    if written != FORMAT:
        found = f"{main} has format {written}; this version of lightfed reads format {FORMAT}"
        fix = "resume with the version that wrote it, which environment.json names"
        raise OtherFormat("ckpt_path", found, fix)
    tags, ranks = shards["tags"], range(shards["ranks"])
    files = [shard_file(main, tag, rank) for tag in tags for rank in ranks]
    for file in files[share]:
        check(file)
    checkpoint[CLIENTS] = [read(file) for file in files]
    return checkpoint


def _read_main(path: Path) -> dict[str, Any]:
    checkpoint = read(path)
    ours, fix = isinstance(checkpoint, dict) and SHARDS in checkpoint, "give one of a lightfed run"
    require(ours, "ckpt_path", f"{path} was not written by lightfed", fix)
    return checkpoint
