"""Whose updates a round goes on with: sessions may raise, or end in what is not finite."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightfed_kernels import FIXED_LIMIT

from lightfed.core.session import Report
from lightfed.utils.errors import UserError

if TYPE_CHECKING:
    from lightfed.core.fleet import Fleet


def judge(fleet: "Fleet", reports: Sequence[Report], t: int) -> dict[int, bool]:
    """Whose update can be used; the others are named in the log.

    Who keeps a row that is not finite starts anew. Called by every rank.

    Args:
        fleet: of the clients.
        reports: of all sessions, the same on every rank.
        t: the round.

    Raises:
        UserError: more sessions failed than may, or every one raised.
    """
    limit = FIXED_LIMIT if fleet.accumulate == "fixed" else math.inf
    finite = {report.client: report.norm < limit for report in reports}
    bad = [report for report in reports if report.error or not finite[report.client]]
    for report in bad:
        if report.error:
            fleet.warn(f"round {t}: client {report.client} is left out: {report.error}")
        if not finite[report.client]:
            _start_anew(fleet, report, t)
    _check(bad, len(reports), t, allowed=fleet.max_failed)
    return {report.client: finite[report.client] and not report.error for report in reports}


def _start_anew(fleet: "Fleet", report: Report, t: int) -> None:
    """From what is not finite there is no way back."""
    if fleet.algorithm.stateful and fleet.home(report.client) == fleet.ranks.rank:
        fleet.algorithm.start_anew(fleet, report.client)
    fleet.warn(
        f"round {t}: the update of client {report.client} is not finite (norm {report.norm:g}); "
        "it is left out of the merge, and a client that keeps its row starts anew"
    )


def _check(bad: Sequence[Report], sessions: int, t: int, *, allowed: int | None) -> None:
    none_ran = bool(bad) and all(report.error for report in bad) and len(bad) == sessions
    if not none_ran and (allowed is None or len(bad) <= allowed):
        return
    first = bad[0].error or "its update is not finite"
    found = f"{len(bad)} of {sessions} sessions of round {t} failed"
    fix = "correct the cause" if none_ran else "correct the cause, or allow more"
    found = f"{found} (client {bad[0].client}: {first})"
    raise UserError("model.max_failed_clients", found, fix)
