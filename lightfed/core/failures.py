"""Whose updates a round goes on with: sessions may raise, or end in what is not finite."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightfed_kernels import FIXED_LIMIT

from lightfed.core.session import Report
from lightfed.utils.errors import UserError

if TYPE_CHECKING:
    from lightfed.core.fleet import Fleet

# Of a single session: one may break by its own data, but not so often.
_ROUNDS_OF_ONE = 3


def judge(fleet: "Fleet", reports: Sequence[Report], t: int) -> dict[int, bool]:
    """Whose update can be used; the others are named in the log.

    Who keeps a row that is not finite starts anew. Called by every rank.

    Args:
        fleet: of the clients.
        reports: of all sessions, the same on every rank.
        t: the round.

    Raises:
        UserError: more sessions failed than may, or not one of several has a usable update, or
            that of the only one could not be used for some rounds in a row.
    """
    limit = FIXED_LIMIT if fleet.accumulate == "fixed" else math.inf
    finite = {report.client: report.norm < limit for report in reports}
    bad = [report for report in reports if report.error or not finite[report.client]]
    for report in bad:
        if report.error:
            fleet.warn(f"round {t}: client {report.client} is left out: {report.error}")
        if not finite[report.client]:
            _start_anew(fleet, report, t)
    _check(fleet, bad, len(reports), t)
    return {report.client: finite[report.client] and not report.error for report in reports}


def _start_anew(fleet: "Fleet", report: Report, t: int) -> None:
    """From what is not finite there is no way back."""
    if fleet.algorithm.stateful and fleet.home(report.client) == fleet.ranks.rank:
        fleet.algorithm.start_anew(fleet, report.client)
    fleet.warn(
        f"round {t}: the update of client {report.client} is not finite (norm {report.norm:g}); "
        "it is left out of the merge, and a client that keeps its row starts anew"
    )


def _check(fleet: "Fleet", bad: Sequence[Report], sessions: int, t: int) -> None:
    """End the run if more failed than may, or if it comes to nothing."""
    fruitless = 0 < sessions == len(bad)
    if sessions:
        fleet.fruitless_rounds = fleet.fruitless_rounds + 1 if fruitless else 0
    hopeless = fruitless and (sessions > 1 or fleet.fruitless_rounds >= _ROUNDS_OF_ONE)
    if not hopeless and (fleet.max_failed is None or len(bad) <= fleet.max_failed):
        return
    first = bad[0].error or f"its update is not finite, norm {bad[0].norm:g}"
    found = f"{len(bad)} of {sessions} sessions of round {t} failed"
    if hopeless and sessions == 1:
        found = f"the only session of a round failed, {_ROUNDS_OF_ONE} rounds in a row"
    found = f"{found} (client {bad[0].client}: {first})"
    if hopeless and not any(report.error for report in bad):
        fix = "lower the learning rate, or look at trainer.precision and the data"
        raise UserError("model.optimizer", found, fix)
    fix = "correct the cause" if hopeless else "correct the cause, or allow more"
    raise UserError("model.max_failed_clients", found, fix)
