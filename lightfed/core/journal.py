"""The finished sessions of a round that was interrupted, so that nobody trains them twice.

A session is atomic and its draws have names, so a round that begins again from the checkpoint it
started from meets the same sessions. Those in the journal are not trained: their rows, and whatever
else they left, are put in place.

    sessions.ckpt                       round, call of `train`, what it must agree with
    sessions.ckpt.shards/<tag>/rank0.pt   client -> what its session left, of the clients of rank 0
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lightfed.comm.collectives import Ranks
from lightfed.core import checkpoint
from lightfed.core.algorithm import Moment
from lightfed.core.session import Report

FILE = "sessions.ckpt"


@dataclass
class Finished:
    """What a session has left.

    Attributes:
        report: of the session.
        tests: of the client in its session, by moment (`lightfed.core.algorithm.Moment`).
        tensors: its row, as "floats" (P,) and "integers" (Q,).
        result: what its algorithm has of it besides (`Algorithm.session_result`).
    """

    report: Report
    tests: dict[Moment, Report]
    tensors: dict[str, Tensor]
    result: dict[str, Tensor]

    def state_dict(self) -> dict[str, Any]:
        """Tensors and primitives."""
        return {
            "report": asdict(self.report),
            "tests": {moment: asdict(report) for moment, report in self.tests.items()},
            "tensors": self.tensors,
            "result": self.result,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Finished":
        tests = {moment: Report(**report) for moment, report in state["tests"].items()}
        return cls(Report(**state["report"]), tests, state["tensors"], state["result"])


class Suspended(Exception):
    """A round ends amid its sessions; raised by `Fleet.train` on all ranks alike.

    Args:
        call: of `train` in this round, from 0.
        finished: sessions of this rank.
        total: finished sessions of all ranks.
        new: those of them that were not known from a journal.
    """

    def __init__(
        self, call: int, finished: Mapping[int, Finished], *, total: int, new: int
    ) -> None:
        super().__init__(f"{total} session{'' if total == 1 else 's'}")
        self.call, self.finished, self.total, self.new = call, finished, total, new


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
