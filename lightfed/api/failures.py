"""Which updates a round can use: sessions may raise, or end with non-finite values."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightfed.local.session import Report
from lightfed.utils.errors import UserError

# In a row, with one session per round: a session may fail by its data, but not so often.
_ROUNDS_OF_ONE = 3


@dataclass(frozen=True)
class Verdict:
    """Which updates of a round's sessions are usable, with a warning for each failure.

    `bad` are reports of unusable sessions, `not_finite` clients whose rows are not finite.
    """

    usable: dict[int, bool]
    bad: list[Report]
    not_finite: list[int]
    warnings: list[str]

    def check(self, t: int, *, allowed: int | None, fruitless: int) -> int:
        """End the run if too many sessions failed or no progress is made.

        At most `allowed` sessions may fail (None: no limit). `fruitless` is the number of rounds in
        a row without a usable update, and returned with this round. A UserError if too many failed,
        if none of several has a usable update, or if rounds of a single session failed too often in
        a row.
        """
        sessions, bad = len(self.usable), self.bad
        nothing = 0 < sessions == len(bad)
        if sessions:
            fruitless = fruitless + 1 if nothing else 0
        hopeless = nothing and (sessions > 1 or fruitless >= _ROUNDS_OF_ONE)
        if not hopeless and (allowed is None or len(bad) <= allowed):
            return fruitless
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


def judge(reports: Sequence[Report], t: int, *, limit: float) -> Verdict:
    """Decide which updates can be used; `limit` is the largest norm that counts as finite."""
    usable, bad, not_finite, warnings = {}, [], [], []
    for report in reports:
        client, finite = report.client, report.norm < limit
        usable[client] = finite and not report.error
        if not usable[client]:
            bad.append(report)
        if report.error:
            warnings.append(f"round {t}: client {client} is left out: {report.error}")
        if not finite:
            not_finite.append(client)
            warnings.append(
                f"round {t}: the update of client {client} is not finite (norm {report.norm:g}); "
                "it is left out of the merge, and a client that keeps its row is reset"
            )
    return Verdict(usable, bad, not_finite, warnings)


@dataclass
class Outcomes:
    """Whether the updates of clients that have trained in this round can be used.

    Clients whose sessions raised are `silent`: they send nothing.
    """

    usable: dict[int, bool] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)

    def add(self, reports: Sequence[Report], verdict: Verdict) -> None:
        """Add the sessions of one call of `train`."""
        self.usable |= verdict.usable
        self.silent |= {report.client for report in reports if report.error}

    def contributing(self, clients: Iterable[int]) -> list[int]:
        """The clients whose updates can be used."""
        return [client for client in clients if self.usable.get(client, True)]

    def sending(self, clients: Iterable[int]) -> list[int]:
        """The clients that send something."""
        return [client for client in clients if client not in self.silent]
