"""Saves the finished sessions of an interrupted round, so that they are not trained twice.

A session is atomic and its draws are named. So a round that restarts from its checkpoint has the
same sessions. Those in the journal are not trained: their rows and other results are restored.

    sessions.ckpt                       round, call of `train`, identity of the run
    sessions.ckpt.shards/<tag>/rank0.pt   client -> result of its session, for clients of rank 0
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightfed.distributed.collectives import Ranks
from lightfed.local.finished import Suspended
from lightfed.runs import checkpoint, saving

FILE = "sessions.ckpt"


def write(
    suspended: Suspended, path: Path, ranks: Ranks, *, t: int, identity: Mapping[str, Any]
) -> None:
    """Write the journal of round t; called by every rank.

    `identity` has properties that a run that resumes from it must share. A UserError if it cannot
    be written.
    """
    rows = {client: done.state_dict() for client, done in suspended.finished.items()}
    content: dict[str, Any] = {"round": t, "call": suspended.call, "identity": dict(identity)}
    content[checkpoint.CLIENTS] = rows
    saving.save(content, path, ranks, keep_previous=False)


def read(
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
    sessions = {k: s for shard in content[checkpoint.CLIENTS] for k, s in shard.items()}
    return content["call"], sessions
