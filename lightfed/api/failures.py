"""Which updates a round can use: sessions may raise, or end with non-finite values."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite

from lightfed.local.session import Report
from lightfed.utils.errors import NOT_FINITE, UserError


@dataclass
class Outcomes:
    """Which updates of the clients that have trained in this round can be used.

    Attributes:
        usable: Whether each client's update is finite and complete.
        silent: Clients whose sessions raised, or that have left: they send nothing.
        late: Clients whose updates come too late.
    """

    usable: dict[int, bool] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)

    def add(self, reports: Sequence[Report]) -> list[Report]:
        """Add the sessions of a call of `train`; return those whose updates cannot be used."""
        rejected = []
        for report in reports:
            is_usable = not report.error and self.finite(report)
            self.usable[report.client] = is_usable
            if report.error:
                self.silent.add(report.client)
            if not is_usable:
                rejected.append(report)
        return rejected

    def lose(self, clients: Collection[int]) -> None:
        """Add clients that leave during their sessions and send nothing."""
        self.usable |= dict.fromkeys(clients, False)
        self.silent.update(clients)

    def finite(self, report: Report) -> bool:
        """Whether the row is finite after the session."""
        return isfinite(report.norm)

    def warnings(self, rejected: Iterable[Report], t: int) -> Iterator[str]:
        """Yield what the log says about sessions whose updates cannot be used."""
        for report in rejected:
            if report.error:
                yield f"round {t}: client {report.client} is skipped: {report.error}"
            if not self.finite(report):
                yield (
                    f"round {t}: the update of client {report.client} is not finite (norm "
                    f"{report.norm:g}); it is not merged, and a client that keeps its row is "
                    "reset"
                )

    def contributing(self, clients: Iterable[int]) -> list[int]:
        """Return those of the clients whose updates count in this round."""
        usable = [client for client in clients if self.usable.get(client, True)]
        return [client for client in usable if client not in self.late]

    def sending(self, clients: Iterable[int]) -> list[int]:
        """Return those of the clients that send something."""
        return [client for client in clients if client not in self.silent]


def takes_no_time(client: int) -> UserError:
    """Return the error of a client that would do any number of steps in `model.local_seconds`."""
    found = f"given, and a step of client {client} takes no time"
    return UserError("model.local_seconds", found, "give all clients a speed, model.devices.flops")


def check(rejected: Sequence[Report], sessions: int, t: int, *, allowed: int | None) -> None:
    """End the run if too many sessions of a round have failed, or all of several.

    Args:
        rejected: Reports of the sessions whose updates cannot be used.
        sessions: Number of sessions.
        t: The round.
        allowed: Number of sessions that may fail; None for all but one.

    Raises:
        UserError: More sessions have failed.
    """
    if not rejected:
        return
    all_failed = len(rejected) == sessions
    all_of_several_failed = all_failed and sessions > 1
    most = sessions - 1 if allowed is None else allowed
    if len(rejected) <= most and not all_of_several_failed:
        return

    first = rejected[0]
    why = first.error or f"{NOT_FINITE}, norm {first.norm:g}"
    found = (
        f"{len(rejected)} of {sessions} sessions of round {t} failed (client {first.client}: {why})"
    )
    none_raised = not any(report.error for report in rejected)
    if all_failed and none_raised:
        fix = "lower the learning rate, or look at trainer.precision and the data"
        raise UserError("model.optimizer", found, fix)
    fix = "correct the cause" if all_of_several_failed else "correct the cause, or allow more"
    raise UserError("model.max_failed_clients", found, fix)
