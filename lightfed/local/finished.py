"""Results of finished sessions in an interrupted round."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightfed.local.hooks import SessionFleet
from lightfed.local.session import Report
from lightfed.state.rows import Moment, Row


def finished(
    fleet: SessionFleet, reports: Sequence[Report], tests: Mapping[Moment, Sequence[Report]]
) -> dict[int, dict[str, Any]]:
    """Results of this rank's sessions, by client: report, tests by moment, row and kept state.

    Tensors and primitives; the row's tensors are "floats" (P,) and "integers" (Q,). A session that
    failed is left out: it may succeed when resumed.
    """
    tested = {moment: {report.client: report for report in t} for moment, t in tests.items()}
    results = {}
    for report in reports:
        if report.error:
            continue
        client, row = report.client, fleet.row(report.client)
        found = {name: kept.data.get(client) for name, kept in fleet.kept.items()}
        # Cloned: a view would be saved with the whole matrix behind it.
        results[client] = {
            "report": asdict(report),
            "tests": {moment: asdict(t[client]) for moment, t in tested.items() if client in t},
            "tensors": {"floats": row.floats.cpu().clone(), "integers": row.integers.cpu().clone()},
            "result": {name: x.cpu().clone() for name, x in found.items() if x is not None},
        }
    return results


def put_in_place(
    result: Mapping[str, Any],
    fleet: SessionFleet,
    client: int,
    tests: Mapping[Moment, list[Report]],
) -> Report:
    """Restore a client's row and state, and its tests, from a result; the report of its session."""
    fleet.row(client).copy_(Row(result["tensors"]["floats"], result["tensors"]["integers"]))
    for name, kept in fleet.kept.items():
        kept.restore(client, result["result"].get(name))
    for moment, report in result["tests"].items():
        tests[moment].append(Report(**report))
    return Report(**result["report"])


class Suspended(Exception):
    """A round stopped before all sessions finished; `Fleet.train` raises it on all ranks.

    `call` is the index of the call of `train` in this round, `finished` has this rank's sessions;
    `total` counts those of all ranks, and `new` those that did not come from a journal.
    """

    def __init__(
        self, call: int, finished: Mapping[int, Mapping[str, Any]], *, total: int, new: int
    ) -> None:
        super().__init__(f"{total} session{'' if total == 1 else 's'}")
        self.call, self.finished, self.total, self.new = call, finished, total, new
