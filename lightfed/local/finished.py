"""Results of finished sessions in an interrupted round."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from lightfed.local.hooks import SessionFleet
from lightfed.local.session import Report
from lightfed.state.rows import Moment, Row


@dataclass
class Finished:
    """The result of a session, its tests by moment, row and kept state by name.

    The row's tensors are "floats" (P,) and "integers" (Q,).
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

    def put_in_place(
        self, fleet: SessionFleet, client: int, tests: Mapping[Moment, list[Report]]
    ) -> Report:
        """Restore a client's row and state, and its tests; the report of its session."""
        fleet.row(client).copy_(Row(self.tensors["floats"], self.tensors["integers"]))
        for name, kept in fleet.kept.items():
            kept.restore(client, self.kept.get(name))
        for moment, report in self.tests.items():
            tests[moment].append(report)
        return self.report


def finished(
    fleet: SessionFleet, reports: Sequence[Report], tests: Mapping[Moment, Sequence[Report]]
) -> dict[int, Finished]:
    """Results of this rank's sessions, by client; one that failed may succeed when resumed."""
    tested = {moment: {report.client: report for report in t} for moment, t in tests.items()}
    results = {}
    for report in reports:
        if report.error:
            continue
        client, row = report.client, fleet.row(report.client)
        found = {name: kept.saved(client) for name, kept in fleet.kept.items()}
        # Cloned: a view would be saved with the whole matrix behind it.
        results[client] = Finished(
            report,
            {moment: t[client] for moment, t in tested.items() if client in t},
            {"floats": row.floats.cpu().clone(), "integers": row.integers.cpu().clone()},
            {name: x.cpu().clone() for name, x in found.items() if x is not None},
        )
    return results


class Suspended(Exception):
    """A round stopped before all sessions finished; `Fleet.train` raises it on all ranks.

    `call` is the index of the call of `train` in this round, `finished` has this rank's sessions;
    `total` counts those of all ranks, and `new` those that did not come from a journal.
    """

    def __init__(
        self, call: int, finished: Mapping[int, Finished], *, total: int, new: int
    ) -> None:
        super().__init__(f"{total} session{'' if total == 1 else 's'}")
        self.call, self.finished, self.total, self.new = call, finished, total, new
