"""Runs clients' sessions between "send" and "merge", on their rank."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from lightfed.local.client_group import Packing
from lightfed.local.client_sessions import ClientSessions
from lightfed.local.finished import Suspended, finished, put_in_place
from lightfed.local.hooks import SessionFleet
from lightfed.local.local_work import SessionPlans
from lightfed.local.optimizer import Stepper, Steps
from lightfed.local.session import (
    Autocast,
    LocalSession,
    PendingReport,
    Report,
    Runtime,
)
from lightfed.packs.runner import PackReport, PackRunner
from lightfed.packs.session import LaneReport, PackSession
from lightfed.packs.stacked_optimizer import StackedOptimizer
from lightfed.state.rows import Row
from lightfed.utils import signals
from lightfed.utils.errors import UserError
from lightfed.utils.reading import read

log = logging.getLogger(__name__)


Pending = PendingReport | LaneReport | Report
RunClient = Callable[[int], Pending | None]
Waves = Callable[[list[int], int, RunClient], list[Pending]]


class Training(ClientSessions):
    """Runs the sessions of this rank's clients.

    Attributes:
        calls: number of calls of `sessions` in this round.
    """

    def __init__(self, fleet: SessionFleet) -> None:
        super().__init__(fleet)
        self.calls = 0
        self._waves: Waves = _one_after_the_other
        self._refusals: list[UserError] = []
        self._runner = PackRunner(fleet, self)
        self._packs: dict[int, list[int]] = {}  # by client, in a call of `sessions`
        self._steppers: list[Stepper] = []  # that use the round's settings
        self._results: dict[int, PackReport] = {}

    def attach(self, runtime: Runtime, steppers: Sequence[Steps]) -> None:
        """Create the sessions of the groups, from how each takes its steps."""
        self._runtime = runtime
        self._sessions, self._runner.trainers = {}, {}
        self._steppers = [steps.stepper for steps in steppers if steps.takes_lr]
        for group, steps in enumerate(steppers):
            state, stepper = self._fleet.groups[group], steps.stepper
            state.takes_lr, state.optimizer = steps.takes_lr, stepper.optimizer
            if steps.configure is None:
                self._check_kept(stepper)
            elif state.packing.most > 1:
                state.packing = Packing(reason=steps.reason)
            state.session = LocalSession(
                state.module,
                runtime,
                live=state.live,
                stepper=stepper,
                trainer=state.trainer,
                configure=steps.configure,
                transfers=bool(state.table.transfer),
                key=f"model.clients.{group}.model",
            )
            self._sessions[id(state.module)] = state.session
            if state.packing.most > 1:
                kind: Any = getattr(stepper.optimizer, "stacked", StackedOptimizer)
                self._runner.trainers[group] = PackSession(
                    state.module,
                    state.layout,
                    kind(stepper.optimizer, state.live.trainable, stepper.rate),
                    clipping=stepper.clipping,
                    context=runtime.forward_context,
                    known=state.packing.known,
                )

    def _check_kept(self, stepper: Stepper) -> None:
        """Refuse `model.keep_optimizer` for an optimizer that has nothing to keep."""
        fleet = self._fleet
        if fleet.optimizers is None or fleet.algorithm.carries or stepper.slots != {}:
            return
        found = f"true, and {type(stepper.optimizer).__name__} has no state"
        fix = "leave it out, or give it a momentum"
        raise UserError("model.keep_optimizer", found, fix)

    @property
    def side_by_side(self) -> dict[str, int | str]:
        """How many clients of a group train at once, or why they do not, by its name."""
        found = {s.name: s.packing.reason or s.packing.most for s in self._fleet.groups}
        return {name: how for name, how in found.items() if how != 1}

    def start(self, waves: Waves | None) -> None:
        """Begin a round. `waves` calls `run` for the clients of this rank, in order."""
        self.calls, self._waves = 0, waves or _one_after_the_other
        self.besides.clear()
        packed = [trainer.optimizer for trainer in self._runner.trainers.values()]
        scheduled = self._fleet.plan.scheduled
        for stacked in packed:
            stacked.scheduled = scheduled
        for stepper in self._steppers:
            stepper.scheduled = scheduled
            for group in stepper.optimizer.param_groups if scheduled else ():
                group.update(scheduled)  # for methods that read them, of packs too

    @property
    def context(self) -> Autocast | None:
        """The autocast of the Trainer's precision; None in full precision."""
        return self._runtime.forward_context

    def sessions(
        self,
        clients: Sequence[int],
        waves: int,
        t: int,
        plans: SessionPlans,
    ) -> list[Report]:
        """Local training of clients of all ranks, at most `waves` on one: all reports, ascending.

        `tests` has those of all ranks; `plans` are those of the call of `Fleet.train`.

        Raises Suspended if a signal asked the run to stop before all sessions finished, and a
        UserError if a session rejects a user's setting.
        """
        fleet = self._fleet
        mine = fleet.mine(clients)
        self.tests, self._refusals = {moment: [] for moment in fleet.plan.tested}, []
        self.plans = plans
        with self._timings.part("sessions"):
            packs = self._runner.form(mine, t) if self._runner.trainers else []
            self._packs = {client: pack for pack in packs for client in pack}
            self._results = {}
            pending = self._waves(mine, waves, partial(self.run, mine=mine, t=t))
            self._read(pending)
            here = [report.resolve() for report in pending]
        for report in here:
            spent = sum(self.besides.pop(report.client, {}).values())
            if not (report.error or self._is_known(report.client)):
                report.besides = spent
        given = here, self._refusals, self.tests
        every = fleet.ranks.gather([given], f"the end of the sessions of round {t}")
        for refusal in (refusal for _, refusals, _ in every for refusal in refusals):
            raise refusal
        reports: list[Report] = [report for part, *_ in every for report in part]
        if len(reports) < len(clients):
            done = [report.client for report in reports if not report.error]
            new = sum(not self._is_known(client) for client in done)
            raise Suspended(self.calls, finished(fleet, here, self.tests), total=len(done), new=new)
        self.calls += 1
        for moment in self.tests:
            self.tests[moment] = [report for *_, tests in every for report in tests[moment]]
        return sorted(reports, key=lambda report: report.client)

    def _read(self, pending: Sequence[Pending]) -> None:
        """Bring the numbers of all sessions to the host at once."""
        alone = [report for report in pending if isinstance(report, PendingReport)]
        lanes = [report for report in pending if isinstance(report, LaneReport)]
        packs = {id(lane.result): lane.result for lane in lanes}
        read([*alone, *lanes, *packs.values()])

    def run(self, client: int, mine: list[int], t: int) -> Pending | None:
        """Run a session or reuse its known result; None if a signal asks the run to stop.

        `mine` are this rank's clients in order, to prefetch the next row.
        """
        if self._is_known(client):
            known = self._fleet.plan.known[client]
            return put_in_place(known, self._fleet, client, self.tests)
        if client in self._results:
            return self._results[client]
        if self._fleet.plan.suspends and signals.asked() is not None:
            return None
        try:
            if client in self._packs:
                pack = self._packs[client]
                found = self._runner.run(pack, t)
                if found is not None:
                    self._results |= found
                    return found[client]
                for member in pack:
                    del self._packs[member]
            return self._session(client, mine, t)
        except UserError as refusal:
            self._refusals.append(refusal)
            return None
        except Exception as error:  # a failing client must not stop the others
            return self.failed(client, error)

    def _is_known(self, client: int) -> bool:
        """Whether its session has run before a stop; a pack of which one failed runs again."""
        plan = self._fleet.plan
        pack = self._packs.get(client, [client])
        return self.calls == plan.call and all(member in plan.known for member in pack)

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
        alone = (k for k in after if not self._is_known(k) and k not in self._packs)
        coming = next(alone, None)
        if coming is not None and (ahead := fleet.state(coming).staging) is not None:
            ahead.prefetch(coming)
        return row


def _one_after_the_other(mine: list[int], _: int, run: RunClient) -> list[Pending]:
    """Run sessions without a loop's hooks."""
    reports = [run(client) for client in mine]
    return [report for report in reports if report is not None]
