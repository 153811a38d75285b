"""The finished sessions of a round that was interrupted, so that nobody trains them twice.

A session is atomic and its draws have names, so a round that begins again from the checkpoint it
started from meets the same sessions. Those in the journal are not trained: their rows, and whatever
else they left, are put in place.

    sessions.ckpt                       round, call of `train`, what it must agree with
    sessions.ckpt.shards/<tag>/rank0.pt   client -> what its session left, of the clients of rank 0
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightfed.distributed.collectives import Ranks
from lightfed.local.finished import Suspended
from lightfed.runs import checkpoint

FILE = "sessions.ckpt"


def write(
    suspended: Suspended, path: Path, ranks: Ranks, *, t: int, identity: Mapping[str, Any]
) -> None:
    """Put the journal of round t on disk; called by every rank.

    Args:
        suspended: the finished sessions.
        path: of the journal.
        ranks: of the run.
        t: the round.
        identity: what a run that goes on from it has to have in common.

    Raises:
        UserError: it cannot be written.
    """
    rows = {client: done.state_dict() for client, done in suspended.finished.items()}
    content: dict[str, Any] = {"round": t, "call": suspended.call, "identity": dict(identity)}
    content[checkpoint.CLIENTS] = rows
    checkpoint.save(content, path, ranks, keep_previous=False)


def read(
    path: Path, ranks: Ranks, *, t: int, identity: Mapping[str, Any]
) -> tuple[int, dict[int, dict[str, Any]]] | None:
    """The journal of round t, read by all ranks together.

    Returns:
        call of `train`, and sessions by client (see `Finished.of`); None if there is none of this
        round and this federation: one of a round that is over is stale.

    Raises:
        UserError: it cannot be read.
    """
    if not ranks.any(path.is_file()):
        return None
    content = checkpoint.load(path, ranks)
    if content["round"] != t or content["identity"] != dict(identity):
        return None
    sessions = {k: s for shard in content[checkpoint.CLIENTS] for k, s in shard.items()}
    return content["call"], sessions
