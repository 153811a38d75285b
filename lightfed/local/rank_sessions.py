"""Trains the clients of a rank, between `send` and `merge`."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

from lightfed.lightning_fits.session_rates import SessionRates
from lightfed.local.alone import Alone
from lightfed.local.client_sessions import ClientSessions
from lightfed.local.finished import Suspended, finished, put_in_place
from lightfed.local.group_state import Packing
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
from lightfed.state.rows import Moment, Row
from lightfed.utils import signals
from lightfed.utils.errors import UserError
from lightfed.utils.reading import read

log = logging.getLogger(__name__)


RunClient = Callable[[int], SessionReport | None]
Waves = Callable[[list[int], int, RunClient], list[SessionReport]]


class Training:
    """Trains the clients of this rank, each alone or in a pack.

    Args:
        fleet: The federation.
        sessions: Begins and ends each client's session.
        packs: Trains clients side by side.

    Attributes:
        sessions: As given.
        calls: Number of calls of `train` in this round.
    """

    def __init__(self, fleet: SessionFleet, sessions: ClientSessions, packs: Alone) -> None:
        self._fleet = fleet
        self.sessions = sessions
        self._side_by_side = packs
        self.calls = 0
        self._waves: Waves = _one_after_the_other
        self._runtime = Runtime()
        self._steppers_with_round_settings: list[Stepper] = []

        # Of one call of `train`.
        self._pack_of: dict[int, list[int]] = {}
        self._reports_of_packs: dict[int, SessionReport] = {}
        self._refusals: list[UserError] = []

    def attach(self, runtime: Runtime, steppers: Sequence[Steps]) -> None:
        """Create the sessions of the groups, from how each takes its steps.

        Args:
            runtime: Precision and clipping.
            steppers: Of each group, in their order.

        Raises:
            UserError: Clients should keep the state of an optimizer that has none.
        """
        self._runtime = runtime
        self._steppers_with_round_settings = [steps.stepper for steps in steppers if steps.takes_lr]
        for group, steps in enumerate(steppers):
            state = self._fleet.groups[group]
            stepper = steps.stepper
            state.takes_lr = steps.takes_lr
            state.optimizer = stepper.optimizer
            callbacks = () if state.trainer is None else state.trainer.callbacks
            stepper.keeps_gradients = bool(callbacks) or not state.group.is_ours
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
            if state.packing.most > 1:
                self._side_by_side.attach(group, stepper, runtime)

        self.sessions.attach(runtime, [state.session for state in self._fleet.groups])

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
        """By group: how many of its clients train at once, or why they train one after the other.

        Groups of which nobody expects packs, as those with a single client, have no entry.
        """
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
        self.sessions.besides.clear()

        scheduled = self._fleet.plan.scheduled
        self._side_by_side.schedule(scheduled)
        for stepper in self._steppers_with_round_settings:
            stepper.scheduled = scheduled
            if scheduled:
                # Methods read a rate from the optimizer, also where packs step with their own.
                for param_group in stepper.optimizer.param_groups:
                    param_group.update(scheduled)

    @property
    def context(self) -> Autocast | None:
        """The autocast of the Trainer's precision; None in full precision."""
        return self._runtime.forward_context

    def train(
        self,
        clients: Sequence[int],
        waves: int,
        t: int,
        plans: SessionPlans,
    ) -> list[Report]:
        """Train clients of all ranks, each on its rank.

        Args:
            clients: On all ranks.
            waves: The largest number of sessions on one rank.
            t: The round.
            plans: The batches that the sessions train on.

        Returns:
            The reports of all ranks' sessions, by ascending client, on every rank.
            `sessions.tests` then has the reports of all ranks' tests.

        Raises:
            Suspended: A signal asked the run to stop before all sessions finished.
            UserError: A session rejects a user's setting.
        """
        fleet = self._fleet
        sessions = self.sessions
        sessions.plans = plans
        sessions.tests = {moment: [] for moment in fleet.plan.tested}
        own_clients = fleet.mine(clients)
        reports_of_this_rank = self._train_on_this_rank(own_clients, waves, t)

        # Every rank must reach this collective, even if one of its sessions was refused. A rank
        # that raised earlier would leave the others waiting here forever.
        outcome = reports_of_this_rank, self._refusals, sessions.tests
        outcomes = fleet.ranks.gather([outcome], f"the end of the sessions of round {t}")
        for _, refusals, _ in outcomes:
            for refusal in refusals:
                raise refusal

        reports: list[Report] = []
        for reports_of_a_rank, _, _ in outcomes:
            reports.extend(reports_of_a_rank)
        if len(reports) < len(clients):
            raise self._suspended(reports, reports_of_this_rank)

        self.calls += 1
        tests: dict[Moment, list[Report]] = {}
        for moment in sessions.tests:
            tests[moment] = []
            for _, _, tests_of_a_rank in outcomes:
                tests[moment].extend(tests_of_a_rank[moment])
        sessions.tests = tests
        return sorted(reports, key=lambda report: report.client)

    def _train_on_this_rank(self, own_clients: list[int], waves: int, t: int) -> list[Report]:
        """Train the clients of this rank; fewer reports if a signal asks the run to stop."""
        self._refusals = []
        self._reports_of_packs = {}
        self._pack_of = {}
        with self.sessions.timings.part("sessions"):
            for pack in self._side_by_side.form(self.sessions, own_clients, t):
                self._pack_of |= dict.fromkeys(pack, pack)
            pending = self._waves(own_clients, waves, partial(self.run, mine=own_clients, t=t))
            self._read(pending)
            reports = [report.resolve() for report in pending]

        for report in reports:
            passes = self.sessions.besides.pop(report.client, {})
            if not report.error and not self._is_known(report.client):
                report.besides = sum(passes.values())
        return reports

    def _suspended(self, reports: list[Report], reports_of_this_rank: list[Report]) -> Suspended:
        """Return what says that a signal stopped the round: with the sessions of this rank so far.

        Args:
            reports: Of all ranks.
            reports_of_this_rank: The part of it whose rows are here.
        """
        done = [report.client for report in reports if not report.error]
        new = sum(not self._is_known(client) for client in done)
        journal = finished(self._fleet, reports_of_this_rank, self.sessions.tests)
        return Suspended(self.calls, journal, total=len(done), new=new)

    def _read(self, pending: Sequence[SessionReport]) -> None:
        """Bring the numbers of all sessions to the host at once."""
        # The clients of a pack share a source, which is read once.
        sources = {id(source): source for report in pending for source in report.sources()}
        read([*sources.values()])

    def run(self, client: int, mine: list[int], t: int) -> SessionReport | None:
        """Run a session, or take its result from before a stop or from its pack.

        Args:
            client: Whose session.
            mine: This rank's clients in order, to prefetch the next row.
            t: The round.

        Returns:
            The report; None if the session was refused, or if a signal asks the run to stop.
        """
        plan = self._fleet.plan
        if self._is_known(client):
            return put_in_place(plan.known[client], self._fleet, client, self.sessions.tests)
        if client in self._reports_of_packs:
            return self._reports_of_packs[client]
        if plan.suspends and signals.asked() is not None:
            return None

        try:
            if client in self._pack_of:
                pack = self._pack_of[client]
                reports = self._side_by_side.run(self.sessions, pack, t)
                if reports is not None:
                    self._reports_of_packs |= reports
                    return reports[client]
                # The pack raised, for a reason that one of its clients may have: each trains alone.
                for member in pack:
                    del self._pack_of[member]
            return self._train_alone(client, mine, t)
        except UserError as refusal:
            self._refusals.append(refusal)
            return None
        except Exception as error:  # a failing client must not stop the others
            return self.sessions.failed(client, error)

    def _is_known(self, client: int) -> bool:
        """Whether a client's session has run before a stop.

        A pack of which one session is missing runs again as a whole.
        """
        plan = self._fleet.plan
        if not plan.known:
            return False  # as in most rounds
        members = self._pack_of.get(client, [client])
        return self.calls == plan.call and all(member in plan.known for member in members)

    def _train_alone(self, client: int, mine: list[int], t: int) -> PendingReport:
        """Train a client alone, on its row."""
        state = self._fleet.state(client)
        state.live.restore()
        row = self._fetch(client, mine)
        session = self.sessions.begin(client, state, row, t)
        work = self.sessions.work(session)
        report = state.session.train(session.row, work)
        self.sessions.end(session, work, report)

        state.live.restore()  # evaluations must not depend on whom this rank trained last
        if state.staging is not None:
            state.staging.put_back(client)
        return report

    def _fetch(self, client: int, mine: list[int]) -> Row:
        """Return a client's row on the device, and start to prefetch the next client's."""
        staging = self._fleet.state(client).staging
        if staging is None:
            return self._fleet.row(client)
        row = staging.get(client)

        # The next client that trains alone: one in a pack, or known from before a stop, needs none.
        for following in islice(mine, mine.index(client) + 1, None):
            if self._is_known(following) or following in self._pack_of:
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
