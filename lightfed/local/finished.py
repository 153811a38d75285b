"""Results of finished sessions in an interrupted round."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from lightfed.local.hooks import Moment
from lightfed.local.session import Report


@dataclass
class Finished:
    """The result of a session.

    Attributes:
        report: of the session.
        tests: reports of tests in the session, by moment (`lightfed.local.hooks.Moment`).
        tensors: the client's row, as "floats" (P,) and "integers" (Q,).
        kept: the client's kept state, by name (`Fleet.keep`).
    """

    report: Report
    tests: dict[Moment, Report]
    tensors: dict[str, Tensor]
    kept: dict[str, Tensor]

    def state_dict(self) -> dict[str, Any]:
        """Tensors and primitives."""
        return {
            "report": asdict(self.report),
            "tests": {moment: asdict(report) for moment, report in self.tests.items()},
            "tensors": self.tensors,
            "result": self.kept,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Finished":
        tests = {moment: Report(**report) for moment, report in state["tests"].items()}
        return cls(Report(**state["report"]), tests, state["tensors"], state["result"])


class Suspended(Exception):
    """A round stopped before all sessions finished; `Fleet.train` raises it on all ranks.

    Args:
        call: index of the call of `train` in this round, from 0.
        finished: finished sessions of this rank.
        total: number of finished sessions on all ranks.
        new: number of those that did not come from a journal.
    """

    def __init__(
        self, call: int, finished: Mapping[int, Finished], *, total: int, new: int
    ) -> None:
        super().__init__(f"{total} session{'' if total == 1 else 's'}")
        self.call, self.finished, self.total, self.new = call, finished, total, new
