"""Runs clients' sessions between "send" and "merge", on their rank."""

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from lightfed.distributed import liveness as watch
from lightfed.local.hooks import SessionFleet
from lightfed.local.optimizer import Stepper
from lightfed.local.packed.runner import PackRunner
from lightfed.local.packed.steps.packing import Packing
from lightfed.local.packed.steps.report import PackedReport
from lightfed.local.session import Autocast, Known, LocalSession, PendingReport, Report, Runtime
from lightfed.local.sessions.around import AroundSessions
from lightfed.local.sessions.finished import Finished, Suspended, finished
from lightfed.state.rows import Row
from lightfed.utils import signals
from lightfed.utils.errors import UserError

log = logging.getLogger(__name__)


Pending = PendingReport | PackedReport | Known
RunClient = Callable[[int], Pending | None]
Waves = Callable[[list[int], int, RunClient], list[Pending]]


class Training(AroundSessions):
    """Runs the sessions of this rank's clients.

    Attributes:
        waves: calls `run` for the clients of this rank; the loop adds batch hooks.
        suspends: the round may be suspended, because the state it started from is on disk.
        calls: number of calls of `sessions` in this round.
        side_by_side: how many clients of a group train at once, or why they do not, by its name.
        captured: whether the steps of a group's packs are captured, or why not, by its name.
    """

    def __init__(self, fleet: SessionFleet) -> None:
        super().__init__(fleet)
        self.waves: Waves = _one_after_the_other
        self.suspends = False
        self.side_by_side: Mapping[str, int | str] = {}
        self.captured: Mapping[str, bool | str] = {}
        self.calls = 0
        self._known: Mapping[int, Mapping[str, Any]] = {}  # sessions already run
        self._known_call = 0
        self._refusals: list[UserError] = []
        self._packs = PackRunner(fleet, self)

    def attach(
        self,
        runtime: Runtime,
        steppers: Sequence[tuple[Stepper, bool]],
        packings: Sequence[Packing] = (),
    ) -> None:
        """Create the sessions of the groups; without packings clients train one after the other.

        A stepper comes with whether it uses the round's learning rate.
        """
        self._runtime = runtime
        self._sessions = {}
        self._packs.attach(packings, runtime.forward_context)
        self.side_by_side = {
            state.name: packing.reason or packing.most
            for state, packing in zip(self._fleet.groups, packings, strict=False)
        }
        self.captured = {
            state.name: packing.eager or True
            for state, packing in zip(self._fleet.groups, packings, strict=False)
            if packing.stepper is not None
        }
        for state, packing in zip(self._fleet.groups, packings, strict=False):
            state.side_by_side = max(1, packing.most)
        for state, (stepper, takes_lr) in zip(self._fleet.groups, steppers, strict=True):
            state.takes_lr = takes_lr
            state.session = LocalSession(state.module, runtime, live=state.live, stepper=stepper)
            self._sessions[id(state.module)] = state.session

    @property
    def context(self) -> Autocast | None:
        """The autocast of the Trainer's precision; None in full precision."""
        return self._runtime.forward_context

    def go_on(self, call: int, sessions: Mapping[int, Mapping[str, Any]]) -> None:
        """Use a journal's sessions for the given call of `sessions` in the next round."""
        self._known_call, self._known = call, sessions

    def sessions(
        self,
        clients: Sequence[int],
        waves: int,
        t: int,
        tally: Mapping[str, Mapping[int, Tensor]],
    ) -> tuple[list[Report], dict[str, float]]:
        """Local training of clients of all ranks, at most `waves` on one: all reports, ascending.

        Sums over the ranks of what clients keep then are second. `tests` has those of all ranks.

        Raises Suspended if a signal asked the run to stop before all sessions finished, and a
        UserError if a session rejects a user's setting.
        """
        fleet = self._fleet
        mine = fleet.mine(clients)
        self.tests, self._refusals = {moment: [] for moment in self.tested}, []
        watch.forget_signal()
        with self._timings.part("sessions"):
            self._packs.form([k for k in mine if not self._is_known(k)], t)
            pending = self.waves(mine, waves, lambda client: self.run(client, mine, t))
            here = [report.resolve() for report in pending]
        for report in here:
            spent = sum(self.besides.pop(report.client, {}).values())
            if not (report.error or self._is_known(report.client)):
                report.besides = spent
        given = here, self._refusals, self.tests, _tallied(tally)
        every = fleet.ranks.gather([given], f"the end of the sessions of round {t}")
        for refusal in (refusal for _, refusals, *_ in every for refusal in refusals):
            raise refusal
        reports: list[Report] = [report for theirs, *_ in every for report in theirs]
        if len(reports) < len(clients):
            done = [report.client for report in reports if not report.error]
            new = sum(not self._is_known(client) for client in done)
            raise Suspended(self.calls, finished(fleet, here, self.tests), total=len(done), new=new)
        self.calls += 1
        for moment in self.tests:
            self.tests[moment] = [report for _, _, tests, _ in every for report in tests[moment]]
        tallies = {name: float(sum(theirs[name] for *_, theirs in every)) for name in tally}
        return sorted(reports, key=lambda report: report.client), tallies

    def run(self, client: int, mine: list[int], t: int) -> Pending | None:
        """Run a session or reuse its known result; None if a signal asks the run to stop.

        `mine` are this rank's clients in order, to prefetch the next row.
        """
        if self._is_known(client):
            return Known(
                Finished.of(self._known[client]).put_in_place(self._fleet, client, self.tests)
            )
        if self._packs.has_run(client):
            return self._packs.result(client)
        if self.suspends and _asked():
            return None
        try:
            if self._packs.holds(client) and self._packs.run(client, t):
                return self._packs.result(client)
            return self._session(client, mine, t)
        except UserError as refusal:
            self._refusals.append(refusal)
            return None
        except Exception as error:  # a failing client must not stop the others
            return self.failed(client, error)

    def _is_known(self, client: int) -> bool:
        return self.calls == self._known_call and client in self._known

    def _session(self, client: int, mine: list[int], t: int) -> PendingReport:
        state = self._fleet.state(client)
        state.live.restore()
        s = self.begin(client, state, self._fetch(client, mine), t)
        work = self.work(s)
        report = state.session.train(s.row, work)
        self.end(s, work, report)
        state.live.restore()  # evaluations must not depend on whom this rank trained last
        if state.staging is not None:
            state.staging.put_back(client)
        return report

    def _fetch(self, client: int, mine: list[int]) -> Row:
        """The client's row on the device; starts prefetching the next client's."""
        fleet, state = self._fleet, self._fleet.state(client)
        if state.staging is None:
            return fleet.row(client)
        row = state.staging.get(client)
        after = islice(mine, mine.index(client) + 1, None)
        alone = (k for k in after if not self._is_known(k) and not self._packs.holds(k))
        coming = next(alone, None)
        if coming is not None and (ahead := fleet.state(coming).staging) is not None:
            ahead.prefetch(coming)
        return row


def _tallied(tally: Mapping[str, Mapping[int, Tensor]]) -> dict[str, int]:
    """The sums over this rank's clients, each read from the device at once."""
    return {name: int(sum(kept.values())) for name, kept in tally.items()}


def _asked() -> bool:
    """Whether this rank, or another as far as known, has received a signal."""
    if signals.asked() is not None:
        watch.spread_signal()
        return True
    return watch.signalled()


def _one_after_the_other(mine: list[int], _: int, run: RunClient) -> list[Pending]:
    """Run sessions without a loop's hooks."""
    reports = [run(client) for client in mine]
    return [report for report in reports if report is not None]
