"""The sessions of clients, side by side or not: their start and end, and tests in them."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import lightning.pytorch as L
import torch
from lightfed_kernels import apply_mask_
from torch import Tensor

from lightfed.lightning_fits.python_state import Attributes
from lightfed.local.client_group import GroupState
from lightfed.local.hooks import SESSION_HOOKS, SessionContext, SessionFleet
from lightfed.local.local_work import SessionPlans
from lightfed.local.logbook import batch_size
from lightfed.local.optimizer import Proximal
from lightfed.local.session import LocalSession, Report, Runtime, SessionReport, Work
from lightfed.models.build import blank
from lightfed.models.client_module import reported
from lightfed.state.costs import MaskedFlops
from lightfed.state.rows import Moment, Row, Rows
from lightfed.utils.errors import UserError, reason, require, tracebacks
from lightfed.utils.rng import derive_seed, seed_default_generators


class ClientSessions:
    """The start and end of sessions, side by side or not.

    Attributes:
        plans: what sessions train on.
        tests: reports of those tests, of this rank's sessions.
        besides: FLOPs of a client's gradients and losses in this round, before its session ends.
    """

    def __init__(self, fleet: SessionFleet) -> None:
        self._fleet = fleet
        self._runtime = Runtime()
        self._sessions: dict[int, LocalSession] = {}
        self._masked: dict[str, MaskedFlops] = {}  # by group
        self._starts, self._ends, self._gradients, self._pulls, self._decays = (
            [getattr(hooks, name) for hooks in fleet.hooks if hooks.overrides(name)]
            for name in SESSION_HOOKS
        )
        self._timings = timings = fleet.ranks.timings
        self.plans = SessionPlans(fleet.data, fleet.work, fleet.seed, timings)
        self.tests: dict[Moment, list[Report]] = {}
        self.besides: dict[int, dict[str, float]] = {}
        self._explained = False

    def session_of(self, module: L.LightningModule) -> LocalSession:
        """The session that evaluates a module: a group's, or one for an algorithm's own module."""
        session = self._sessions.get(id(module))
        if session is None:
            session = self._sessions[id(module)] = LocalSession(module, self._runtime)
        return session

    def begin(self, client: int, state: GroupState, row: Row, t: int) -> SessionContext:
        """Start a session on a row, and test the client before its training."""
        s = self._begin(client, state, row, t)
        self._test("aggregated", s)
        return s

    def work(self, s: SessionContext) -> Work:
        """The work of a session that has begun."""
        return self._work(s, "", self._fleet.kept.mask(s.client))

    def end(self, s: SessionContext, work: Work, report: SessionReport) -> None:
        """Finish a session on its trained row, and test the client after its training."""
        s.step = report.steps
        report.flops = s.group.flops
        if work.mask is not None:
            report.flops = self._masked_flops(s.group, work.mask)
        state = None if work.proximal is None else work.proximal.momentum
        if self._fleet.optimizers is not None and state is not None:
            self._fleet.optimizers[s.client] = state
        for end in self._ends:
            end(s)
        self._test("trained", s)

    def _begin(self, client: int, state: GroupState, row: Row, t: int) -> SessionContext:
        """Start a session: bind the module to its row."""
        state.live.bind(row)
        s = SessionContext(self._fleet, client, t, state, row, lr=self._fleet.plan.lr)
        for start in self._starts:
            start(s)
        if self._gradients or self._ends or self._pulls:
            s.received = s.parameters.clone()
        for pull in self._pulls:
            s.proximal = pull(s)
        decay = sum(weight(s) for weight in self._decays)
        if decay:
            s.proximal = s.proximal or Proximal(s.parameters, 0.0)
            s.proximal.decay = torch.full_like(s.parameters, decay)
            s.proximal.decay[state.personal] = 0.0  # no hook is about personal tensors
        if self._fleet.optimizers is not None and t >= 0:
            s.proximal = s.proximal or Proximal(s.parameters, 0.0)
            s.proximal.carries, s.proximal.momentum = True, self._fleet.optimizers.get(client)
        return s

    def failed(self, client: int, error: Exception) -> Report:
        """Report a session that raised; its row keeps the steps done, within the client's mask."""
        fleet, state = self._fleet, self._fleet.state(client)
        reason = self.abandon(client, state, error)
        if state.staging is not None and state.staging.holds(client):
            state.staging.put_back(client)
        row = fleet.row(client).floats
        mask = fleet.kept.mask(client)
        if mask is not None:
            apply_mask_(row, mask.to(row.device))
        return Report(client, 0, norm=float(row.norm()), error=reason)

    def abandon(self, client: int, state: GroupState, error: Exception) -> str:
        """Clean a group's module after a session that raised; return the reason in one line."""
        if not self._explained:
            tracebacks.debug("the session of client %d failed", client, exc_info=error)
            self._explained = True  # later failures get one line each
        state.session.abandon()
        return reason(error)

    def forget_tests(self, clients: Collection[int]) -> None:
        """Discard tests of sessions that are run again."""
        for moment, reports in self.tests.items():
            self.tests[moment] = [r for r in reports if r.client not in clients]

    def finetune(self, client: int, row: Row) -> Report:
        """Test a client after an unreported session on a copy of a row.

        There are no samples if the session raises.
        """
        state = self._fleet.groups[self._fleet.home_group(client)]
        state.live.restore()
        try:
            s = self._begin(client, state, state.borrow(row), -1)
            # The same draws in every evaluation: metrics of two rounds differ only by their models.
            state.session.train(s.row, self._work(s, "finetune-"))
        except UserError:
            raise
        except Exception as error:  # as in a round
            return Report(client, 0, error=self.abandon(client, state, error))
        report = self._test_in_session(s, "trained", "personal")
        state.live.restore()
        return report

    def gradient(self, client: int, row: Row, t: int) -> Tensor:
        """(P,) the gradient of one training batch at a row, in eval mode; 0 if there is none.

        Drawn by (seed, "gradient", t, client).
        """
        state = self._fleet.state(client)
        self._seed("gradient", t, client)
        batch = next(self.plans.batches(client, t, 1, "gradient-"))
        self._spent(client, f"gradient {t}", 3 * batch_size(batch))
        return state.session.gradient(row, batch)

    def loss(self, client: int, row: Row, t: int) -> float:
        """The mean loss of a client's training samples at a row, in eval mode, not augmented."""
        data, state = self._fleet.data, self._fleet.state(client)
        self._seed("loss", t, client)
        batches = data.batches(data.client_plan(client, data.eval_batch_size))
        loss, samples = state.session.loss(row, batches)
        self._spent(client, f"loss {t}", samples)
        return loss

    def _spent(self, client: int, what: str, forward: float) -> None:
        """Count forward passes of so many samples; once, if a session is begun again."""
        passes = self.besides.setdefault(client, {})
        passes[what] = forward * self._fleet.state(client).flops

    def _masked_flops(self, state: GroupState, mask: Tensor) -> Tensor | float:
        """Forward FLOPs of a sample under a client's mask; 0 without a forward of one tensor."""
        if self._fleet.data.task == "columns":
            return 0.0
        if state.flops and state.name not in self._masked:
            sample = blank(self._fleet.data, samples=2).to(self._fleet.device)
            layout = state.layout.floats
            self._masked[state.name] = MaskedFlops(state.module, sample, layout, state.flops)
        return self._masked[state.name](mask) if state.flops else 0.0

    def _work(self, s: SessionContext, purpose: str, mask: Tensor | None = None) -> Work:
        """A session's work; the names of its draws start with `purpose`."""
        pull, hooked = s.proximal, bool(self._gradients)
        if pull is not None and pull.gamma and self._fleet.personal:  # of the other elements
            pull, hooked = replace(pull, gamma=0.0), True
        plans, client, t = self.plans, s.client, s.round
        repeat = 1 if purpose else plans.repeat
        total = plans.steps_of(client, t, purpose)
        return Work(
            client,
            plans.batches(client, t, total, purpose),
            epoch_batches=self._fleet.data.num_batches(client, t) * repeat,
            lr=self._fleet.plan.lr if s.group.takes_lr else None,
            seed=plans.seed(client, t, purpose),
            hook=partial(self._gradient, s) if hooked else None,
            mask=mask,
            proximal=pull,
            phases={} if purpose else plans.phases_of(client, t, s.module),
            total=total,
            first=int(self._fleet.updates[client]),
            attributes=Attributes(None if purpose else self._fleet.attributes, client),
        )

    @property
    def watched(self) -> bool:
        """Whether a hook, a mask or a test looks at single sessions of this round."""
        return (
            bool(self._starts or self._ends or self._gradients or self._pulls or self._decays)
            or self._fleet.kept.masks is not None
            or self._fleet.optimizers is not None
            or any(self._fleet.plan.tested.values())
        )

    def _gradient(self, s: SessionContext, gradient: Tensor) -> None:
        """Pass a batch's gradient through the hooks before the optimiser.

        Elements of personal tensors stay as they are: neither a hook nor a pull is about them.
        """
        own = gradient[s.group.personal] if self._fleet.personal else None
        for change in self._gradients:
            found, fix = "local_gradient returns a value", "change the gradient in place, as by +="
            require(change(s, gradient) is None, "model.algorithm", found, fix)
        if own is not None:
            if s.proximal is not None:
                gradient.add_(s.parameters - s.proximal.anchor, alpha=s.proximal.gamma)
            gradient[s.group.personal] = own
        s.step += 1

    def _test(self, moment: Moment, s: SessionContext) -> None:
        """Test a client on its own test split, if this moment is to be tested."""
        client = s.client
        if client not in self._fleet.plan.tested.get(moment, ()):
            return
        report = self._test_in_session(s, moment, moment)
        report.stored = self._fleet.stored_bytes(client)
        self.tests[moment].append(report)

    def _test_in_session(self, s: SessionContext, moment: Moment, purpose: str) -> Report:
        """Test the model that is in a session."""
        fleet = self._fleet
        fleet.session = s
        try:
            rows = fleet.algorithm.models(fleet, moment, [s.client])
            return Report(s.client, 0) if rows is None else self.test(s.client, rows, purpose)
        finally:
            fleet.session = None

    def test(self, client: int, rows: Rows, purpose: str = "personal") -> Report:
        """Test a client's model on its test split.

        A module's draws in evaluation (tokens to mask) are named (seed, purpose, client), so that
        they are the same on any rank. If its `validation_step` raises, no sample is tested.
        """
        with rows.bound(client) as module:
            self._seed(f"{purpose}-evaluation", -1, client)
            batches = self._fleet.data.test_batches(client)
            session = self.session_of(module)
            try:
                with self._timings.part("evaluation"):
                    report = session.evaluate(batches, client=client)
            except UserError:
                raise
            except Exception as error:
                session.forget()
                return Report(client, 0, error=reason(error))
        report.metrics = reported(report.metrics)
        return report

    def _seed(self, purpose: str, t: int, client: int) -> None:
        seed = derive_seed(self._fleet.seed, purpose, t, client)
        seed_default_generators(seed, self._fleet.device)
