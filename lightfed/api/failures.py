"""Which updates a round can use: sessions may raise, or end with non-finite values."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite

from lightfed.local.session import Report
from lightfed.utils.errors import NOT_FINITE, UserError


@dataclass
class Outcomes:
    """Whether the updates of clients that have trained in this round can be used.

    Clients whose sessions raised are `silent`: they send nothing. Those of `late` come too late.
    """

    usable: dict[int, bool] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)

    def add(self, reports: Sequence[Report]) -> list[Report]:
        """Add the sessions of a call of `train`; those whose updates cannot be used."""
        bad = [report for report in reports if report.error or not self.finite(report)]
        self.usable |= {report.client: True for report in reports}
        self.usable |= {report.client: False for report in bad}
        self.silent |= {report.client for report in reports if report.error}
        return bad

    def lose(self, clients: Collection[int]) -> None:
        """Add clients that leave during their sessions and send nothing."""
        self.usable |= dict.fromkeys(clients, False)
        self.silent |= {*clients}

    def finite(self, report: Report) -> bool:
        """Whether the row is finite after the session."""
        return isfinite(report.norm)

    def warnings(self, bad: Iterable[Report], t: int) -> Iterator[str]:
        """What the log says of unusable sessions."""
        for report in bad:
            if report.error:
                yield f"round {t}: client {report.client} is left out: {report.error}"
            if not self.finite(report):
                yield (
                    f"round {t}: the update of client {report.client} is not finite (norm "
                    f"{report.norm:g}); it is left out of the merge, and a client that keeps its "
                    "row is reset"
                )

    def contributing(self, clients: Iterable[int]) -> list[int]:
        """The clients whose updates can be used in this round."""
        usable = (client for client in clients if self.usable.get(client, True))
        return [client for client in usable if client not in self.late]

    def sending(self, clients: Iterable[int]) -> list[int]:
        """The clients that send something."""
        return [client for client in clients if client not in self.silent]


def check(bad: Sequence[Report], sessions: int, t: int, *, allowed: int | None) -> None:
    """End the run if too many of the sessions of a round failed, or all of several.

    At most `allowed` sessions may fail; by default all but one. A UserError otherwise.
    """
    hopeless = len(bad) == sessions > 1
    most = sessions - 1 if allowed is None else allowed
    if not bad or (not hopeless and len(bad) <= most):
        return
    first = bad[0].error or f"{NOT_FINITE}, norm {bad[0].norm:g}"
    found = f"{len(bad)} of {sessions} sessions of round {t} failed"
    found = f"{found} (client {bad[0].client}: {first})"
    if len(bad) == sessions and not any(report.error for report in bad):
        fix = "lower the learning rate, or look at trainer.precision and the data"
        raise UserError("model.optimizer", found, fix)
    fix = "correct the cause" if hopeless else "correct the cause, or allow more"
    raise UserError("model.max_failed_clients", found, fix)
