"""Results of the sessions that have finished in a round which a signal stops."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightfed.local.hooks import SessionFleet
from lightfed.local.session import Report
from lightfed.state.rows import Moment, Row


def finished(
    fleet: SessionFleet, reports: Sequence[Report], tests: Mapping[Moment, Sequence[Report]]
) -> dict[int, dict[str, Any]]:
    """Return the results of this rank's sessions, for a file.

    Args:
        fleet: The federation.
        reports: Of this rank's sessions. One that failed is skipped: it may succeed when the round
            goes on.
        tests: Reports of the tests in these sessions, by moment.

    Returns:
        By client: its report, its tests by moment, its row as "floats" (P,) and "integers" (Q,),
        and what it keeps besides. There are only tensors and primitives in it.
    """
    results = {}
    for report in reports:
        if report.error:
            continue
        client = report.client

        tests_of_client = {}
        for moment, reports_of_moment in tests.items():
            tests_of_client[moment] = [
                asdict(test) for test in reports_of_moment if test.client == client
            ]

        kept_tensors = {}
        for name, kept in fleet.kept.items():
            value = kept.data.get(client)
            if value is not None:
                kept_tensors[name] = value.cpu().clone()

        # Cloned, because a view would be written with the whole matrix that it is a part of.
        row = fleet.row(client)
        results[client] = {
            "report": asdict(report),
            "tests": tests_of_client,
            "tensors": {
                "floats": row.floats.cpu().clone(),
                "integers": row.integers.cpu().clone(),
            },
            "result": kept_tensors,
        }
    return results


def put_in_place(
    result: Mapping[str, Any],
    fleet: SessionFleet,
    client: int,
    tests: Mapping[Moment, list[Report]],
) -> Report:
    """Restore what a session has left: the client's row, what it keeps, and its tests.

    Args:
        result: An entry of `finished`.
        fleet: The federation, whose row and kept tensors of the client are overwritten.
        client: Number of the client.
        tests: Reports of tests by moment, to which the client's are added.

    Returns:
        The report of the session.
    """
    fleet.row(client).copy_(Row(result["tensors"]["floats"], result["tensors"]["integers"]))
    for name, kept in fleet.kept.items():
        kept.restore(client, result["result"].get(name))
    for moment, reports in result["tests"].items():
        tests[moment].extend(Report(**report) for report in reports)
    return Report(**result["report"])


class Suspended(Exception):
    """A round stopped before all its sessions had finished; raised by `Fleet.train` on all ranks.

    Attributes:
        call: Index of the call of `train` in this round.
        finished: Results of this rank's sessions, by client.
        total: Number of finished sessions on all ranks.
        new: Number of those that did not come from an earlier stop of the same round.
    """

    def __init__(
        self, call: int, finished: Mapping[int, Mapping[str, Any]], *, total: int, new: int
    ) -> None:
        super().__init__("1 session" if total == 1 else f"{total} sessions")
        self.call = call
        self.finished = finished
        self.total = total
        self.new = new
