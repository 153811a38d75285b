"""Runs clients' sessions between "send" and "merge", on their rank."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

from lightfed.lightning_fits.session_rates import SessionRates
from lightfed.local.alone import Alone
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
    SessionReport,
)
from lightfed.state.rows import Row
from lightfed.utils import signals
from lightfed.utils.errors import UserError
from lightfed.utils.reading import read

log = logging.getLogger(__name__)


RunClient = Callable[[int], SessionReport | None]
Waves = Callable[[list[int], int, RunClient], list[SessionReport]]


class Training(ClientSessions):
    """Runs the sessions of this rank's clients.

    Args:
        fleet: Of the clients.
        packs: Trains clients side by side.

    Attributes:
        calls: number of calls of `sessions` in this round.
    """

    def __init__(self, fleet: SessionFleet, packs: Alone) -> None:
        super().__init__(fleet)
        self._side_by_side = packs
        self.calls = 0
        self._waves: Waves = _one_after_the_other
        self._refusals: list[UserError] = []
        self._packs: dict[int, list[int]] = {}  # by client, in a call of `sessions`
        self._steppers: list[Stepper] = []  # that use the round's settings
        self._results: dict[int, SessionReport] = {}

    def attach(self, runtime: Runtime, steppers: Sequence[Steps]) -> None:
        """Create the sessions of the groups, from how each takes its steps.

        Args:
            runtime: Precision and clipping.
            steppers: Of each group, in their order.

        Raises:
            UserError: Clients should keep the state of an optimizer that has none.
        """
        self._runtime = runtime
        self._sessions = {}
        self._steppers = [steps.stepper for steps in steppers if steps.takes_lr]
        for group, steps in enumerate(steppers):
            state = self._fleet.groups[group]
            stepper = steps.stepper
            state.takes_lr = steps.takes_lr
            state.optimizer = stepper.optimizer
            if steps.configure is None:
                self._check_kept(stepper)
            elif state.packing.most > 1:
                # The module configures optimizers of its own, which only it can step.
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
                self._side_by_side.attach(group, stepper, runtime)

    def watch(self, group: int, rates: SessionRates) -> None:
        """Log the learning rates of a group's sessions, alone and in packs."""
        state = self._fleet.groups[group]
        state.session.watch(rates)
        # Without a scheduler, which no pack has, they stay as they are configured.
        self._side_by_side.watch(group, rates.of([state.optimizer], []))

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
        """How many clients of a group train at once, or why they do not, by the group's name."""
        described: dict[str, int | str] = {}
        for state in self._fleet.groups:
            how = state.packing.reason or state.packing.most
            if how != 1:
                described[state.name] = how
        return described

    def start(self, waves: Waves | None) -> None:
        """Begin a round.

        Args:
            waves: Calls `run` for the clients of this rank, in order; by default without a loop's
                hooks.
        """
        self.calls = 0
        self._waves = waves or _one_after_the_other
        self.besides.clear()

        scheduled = self._fleet.plan.scheduled
        self._side_by_side.schedule(scheduled)
        for stepper in self._steppers:
            stepper.scheduled = scheduled
            if scheduled:
                # Methods read a rate from the optimizer, also where packs step with their own.
                for param_group in stepper.optimizer.param_groups:
                    param_group.update(scheduled)

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
        """Train clients of all ranks locally; all reports, by ascending client, on every rank.

        `tests` then has the reports of all ranks' tests.

        Args:
            clients: On all ranks.
            waves: The most sessions of one rank.
            t: The round.
            plans: What the sessions of this call of `Fleet.train` train on.

        Raises:
            Suspended: A signal asked the run to stop before all sessions finished.
            UserError: A session rejects a user's setting.
        """
        fleet = self._fleet
        mine = fleet.mine(clients)
        self.tests = {moment: [] for moment in fleet.plan.tested}
        self._refusals = []
        self.plans = plans
        with self._timings.part("sessions"):
            packs = self._side_by_side.form(self, mine, t)
            self._packs = {client: pack for pack in packs for client in pack}
            self._results = {}
            pending = self._waves(mine, waves, partial(self.run, mine=mine, t=t))
            self._read(pending)
            reports_of_this_rank = [report.resolve() for report in pending]

        for report in reports_of_this_rank:
            passes = self.besides.pop(report.client, {})
            if not (report.error or self._is_known(report.client)):
                report.besides = sum(passes.values())

        # Every rank must reach this collective, even if one of its sessions was refused. A rank
        # that raised earlier would leave the others waiting here forever.
        outcome = reports_of_this_rank, self._refusals, self.tests
        outcomes = fleet.ranks.gather([outcome], f"the end of the sessions of round {t}")
        for _, refusals, _ in outcomes:
            for refusal in refusals:
                raise refusal

        reports: list[Report] = [report for of_a_rank, _, _ in outcomes for report in of_a_rank]
        if len(reports) < len(clients):
            done = [report.client for report in reports if not report.error]
            new = sum(not self._is_known(client) for client in done)
            journal = finished(fleet, reports_of_this_rank, self.tests)
            raise Suspended(self.calls, journal, total=len(done), new=new)

        self.calls += 1
        for moment in self.tests:
            self.tests[moment] = [report for _, _, tests in outcomes for report in tests[moment]]
        return sorted(reports, key=lambda report: report.client)

    def _read(self, pending: Sequence[SessionReport]) -> None:
        """Bring the numbers of all sessions to the host at once."""
        # The clients of a pack share a source, which is read once.
        sources = {id(source): source for report in pending for source in report.sources()}
        read([*sources.values()])

    def run(self, client: int, mine: list[int], t: int) -> SessionReport | None:
        """Run a session or reuse its known result; None if a signal asks the run to stop.

        Args:
            client: Whose session.
            mine: This rank's clients in order, to prefetch the next row.
            t: The round.
        """
        if self._is_known(client):
            known = self._fleet.plan.known[client]
            return put_in_place(known, self._fleet, client, self.tests)
        if client in self._results:
            return self._results[client]  # it has trained in the pack of an earlier client
        if self._fleet.plan.suspends and signals.asked() is not None:
            return None

        try:
            if client in self._packs:
                pack = self._packs[client]
                results = self._side_by_side.run(self, pack, t)
                if results is not None:
                    self._results |= results
                    return results[client]
                # The pack raised, for a reason that one of its clients may have: each trains alone.
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
        """Train a client alone, on its row."""
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
        staging = self._fleet.state(client).staging
        if staging is None:
            return self._fleet.row(client)
        row = staging.get(client)

        # The next client that trains alone: one in a pack, or known from before a stop, needs none.
        for following in islice(mine, mine.index(client) + 1, None):
            if self._is_known(following) or following in self._packs:
                continue
            next_staging = self._fleet.state(following).staging
            if next_staging is not None:
                next_staging.prefetch(following)
            break
        return row


def _one_after_the_other(mine: list[int], _: int, run: RunClient) -> list[SessionReport]:
    """Run sessions without a loop's hooks."""
    reports = [run(client) for client in mine]
    return [report for report in reports if report is not None]
