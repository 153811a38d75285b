"""Begins, ends and tests the sessions of clients, whether they train alone or in packs."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from lightfed_kernels import apply_mask_
from torch import Tensor

from lightfed.data.tested_samples import TestSplit
from lightfed.lightning_fits.python_state import Attributes
from lightfed.local.group_state import GroupState
from lightfed.local.hooks import SessionContext, SessionFleet
from lightfed.local.local_work import Phase, SessionPlans
from lightfed.local.logbook import batch_size
from lightfed.local.optimizer import Proximal
from lightfed.local.session import LocalSession, Report, Runtime, SessionReport, Work
from lightfed.models.build import blank
from lightfed.models.client_module import reported
from lightfed.state.costs import MaskedFlops
from lightfed.state.rows import Moment, Row, Rows
from lightfed.utils.errors import UserError, reason, tracebacks
from lightfed.utils.rng import derive_seed, seed_default_generators

# The round of a session that only serves an evaluation, such as a fine-tuned test.
NO_ROUND = -1

# A gradient costs a forward and a backward pass, which counts as two.
_PASSES_OF_A_GRADIENT = 3


class ClientSessions:
    """What surrounds the training of a client: `begin`, `work`, `end`, and tests in between.

    A client that trains alone and each client of a pack go through the same three calls. Only the
    training between `work` and `end` differs: `lightfed.local.rank_sessions.Training` trains one
    client, `lightfed.packs.runner.PackRunner` several at once.

    Args:
        fleet: The federation.

    Attributes:
        timings: The stopwatch of the run's parts.
        plans: The batches that sessions train on.
        tests: The reports of tests within sessions of this rank, by moment.
        besides: FLOPs of `Fleet.gradient` and `Fleet.loss` in this round, by client and call. They
            are added to the client's next session.
    """

    def __init__(self, fleet: SessionFleet) -> None:
        self._fleet = fleet
        self.timings = fleet.ranks.timings
        self.plans = SessionPlans(fleet.data, fleet.work, fleet.seed, self.timings)
        self.tests: dict[Moment, list[Report]] = {}
        self.besides: dict[int, dict[str, float]] = {}

        # Only hooks that are overridden are called: five calls of functions that do nothing would
        # be a noticeable part of a session of a tiny network.
        self._start_hooks = self._hooks("session_start")
        self._end_hooks = self._hooks("session_end")
        self._gradient_hooks = self._hooks("local_gradient")
        self._proximal_hooks = self._hooks("proximal")
        self._decay_hooks = self._hooks("decay_after_clipping")

        self._runtime = Runtime()
        self._session_by_module: dict[int, LocalSession] = {}
        self._masked_flops_by_group: dict[str, MaskedFlops] = {}
        self._has_logged_a_traceback = False

    def _hooks(self, name: str) -> list[Callable[..., Any]]:
        """Return a hook of the algorithm and of the penalties, where they override it."""
        return [getattr(hooks, name) for hooks in self._fleet.hooks if hooks.overrides(name)]

    def attach(self, runtime: Runtime, sessions: Collection[LocalSession]) -> None:
        """Take the sessions of all groups, and the settings for modules that have none.

        Args:
            runtime: Precision and clipping.
            sessions: One for each group.
        """
        self._runtime = runtime
        self._session_by_module = {id(session.module): session for session in sessions}

    def session_of(self, module: L.LightningModule) -> LocalSession:
        """Return the session that evaluates a module: a group's or an algorithm's own one."""
        session = self._session_by_module.get(id(module))
        if session is None:
            session = LocalSession(module, self._runtime)
            self._session_by_module[id(module)] = session
        return session

    def begin(self, client: int, state: GroupState, row: Row, t: int) -> SessionContext:
        """Start a session on a row, and test the client before it trains.

        Args:
            client: Number of the client.
            state: Its group in this round.
            row: Its values, on the device. The group's module is bound to them.
            t: The round.
        """
        session = self._begin(client, state, row, t)
        self._test_at("aggregated", session)
        return session

    def work(self, session: SessionContext) -> Work:
        """Return the work of a session that has begun."""
        client = session.client
        t = session.round
        total = self.plans.steps_of(client, t)
        return self._make_work(
            session,
            total=total,
            batches=self.plans.batches(client, t, total),
            seed=self.plans.seed(client, t),
            epoch_batches=self._fleet.data.num_batches(client, t) * self.plans.repeat,
            mask=self._fleet.kept.mask(client),
            phases=self.plans.phases_of(client, t, session.module),
            attributes=Attributes(self._fleet.attributes, client),
        )

    def end(self, session: SessionContext, work: Work, report: SessionReport) -> None:
        """Finish a session on its trained row, and test the client after its training.

        Args:
            session: The session that `begin` started.
            work: The work that it has done.
            report: Its report, which gets the FLOPs of a sample.
        """
        session.step = report.steps
        if work.mask is None:
            report.flops = session.group.flops
        else:
            report.flops = self._masked_flops(session.group, work.mask)

        if self._fleet.optimizers is not None and work.proximal is not None:
            optimizer_state = work.proximal.momentum
            if optimizer_state is not None:
                self._fleet.optimizers[session.client] = optimizer_state

        for session_end in self._end_hooks:
            session_end(session)
        self._test_at("trained", session)

    def _begin(self, client: int, state: GroupState, row: Row, t: int) -> SessionContext:
        """Bind the module to a row, call the hooks of a session's start, and collect its pulls."""
        fleet = self._fleet
        state.live.bind(row)
        session = SessionContext(fleet, client, t, state, row, lr=fleet.plan.lr)
        for session_start in self._start_hooks:
            session_start(session)

        if self._gradient_hooks or self._end_hooks or self._proximal_hooks:
            session.received = session.parameters.clone()
        for proximal in self._proximal_hooks:  # at most one, see `check_additions`
            session.proximal = proximal(session)

        decay = sum(decay_after_clipping(session) for decay_after_clipping in self._decay_hooks)
        if decay:
            pull = self._pull_of(session)
            pull.decay = torch.full_like(session.parameters, decay)
            pull.decay[state.personal] = 0.0  # penalties are not about personal tensors

        if fleet.optimizers is not None and t != NO_ROUND:
            pull = self._pull_of(session)
            pull.carries = True
            pull.momentum = fleet.optimizers.get(client)
        return session

    def _pull_of(self, session: SessionContext) -> Proximal:
        """Return the session's pull; by default one without force, which carries other settings."""
        if session.proximal is None:
            session.proximal = Proximal(session.parameters, 0.0)
        return session.proximal

    def _make_work(self, session: SessionContext, **settings: Any) -> Work:
        """Make the work of a session, with the pull and the hook that its gradients go through.

        Args:
            session: The session.
            settings: The other fields of `Work`, which depend on what the session is for.
        """
        fleet = self._fleet
        pull = session.proximal
        is_hooked = bool(self._gradient_hooks)
        if fleet.personal and pull is not None and pull.gamma:
            # The optimizer would pull personal tensors, too. The hook pulls only the others.
            pull = replace(pull, gamma=0.0)
            is_hooked = True
        return Work(
            session.client,
            lr=fleet.plan.lr if session.group.takes_lr else None,
            hook=partial(self._change_gradient, session) if is_hooked else None,
            proximal=pull,
            first=int(fleet.updates[session.client]),
            **settings,
        )

    def _change_gradient(self, session: SessionContext, gradient: Tensor) -> None:
        """Pass a batch's gradient, of shape (P,), through the hooks, before the optimizer.

        Elements of personal tensors stay as they are: neither a hook nor a pull is about them.
        """
        personal = session.group.personal
        personal_gradient = gradient[personal] if self._fleet.personal else None

        for local_gradient in self._gradient_hooks:
            returned = local_gradient(session, gradient)
            if returned is not None:
                raise UserError(
                    "model.algorithm",
                    "local_gradient returns a value",
                    "change the gradient in place, as by +=",
                )

        if personal_gradient is not None:
            pull = session.proximal
            if pull is not None:
                gradient.add_(session.parameters - pull.anchor, alpha=pull.gamma)
            gradient[personal] = personal_gradient
        session.step += 1

    @property
    def watched(self) -> bool:
        """Whether a hook, a mask or a test looks at single sessions of this round."""
        fleet = self._fleet
        has_hooks = bool(
            self._start_hooks
            or self._end_hooks
            or self._gradient_hooks
            or self._proximal_hooks
            or self._decay_hooks
        )
        has_tests = any(fleet.plan.tested.values())
        keeps_more = fleet.kept.masks is not None or fleet.optimizers is not None
        return has_hooks or has_tests or keeps_more

    def failed(self, client: int, error: Exception) -> Report:
        """Report a session that raised.

        The row keeps the steps done so far, within the client's mask.
        """
        fleet = self._fleet
        state = fleet.state(client)
        why = self.abandon(client, state, error)
        if state.staging is not None and state.staging.holds(client):
            state.staging.put_back(client)

        values = fleet.row(client).floats
        mask = fleet.kept.mask(client)
        if mask is not None:
            apply_mask_(values, mask.to(values.device))
        return Report(client, 0, norm=float(values.norm()), error=why)

    def abandon(self, client: int, state: GroupState, error: Exception) -> str:
        """Clean a group's module after a session that raised; return the reason in one line."""
        if not self._has_logged_a_traceback:
            # A fault in a model often fails every client: one traceback is enough.
            tracebacks.debug("the session of client %d failed", client, exc_info=error)
            self._has_logged_a_traceback = True
        state.session.abandon()
        return reason(error)

    def forget_tests(self, clients: Collection[int]) -> None:
        """Discard the tests of sessions that are run again."""
        for moment, reports in self.tests.items():
            self.tests[moment] = [report for report in reports if report.client not in clients]

    def finetune(
        self,
        client: int,
        row: Row,
        *,
        trained: Sequence[str] = (),
        epochs: int | None = None,
    ) -> list[Report]:
        """Train a copy of a row in an unreported session, and test the client on it.

        Args:
            client: Number of the client.
            row: The values to start from, which do not change.
            trained: Names of the parameters to train; all by default.
            epochs: Local epochs of the session; the configured length by default.

        Returns:
            The reports of the tests, one for each split; or one without samples if the session
            raised.
        """
        state = self._fleet.groups[self._fleet.home_group(client)]
        state.live.restore()
        try:
            session = self._begin(client, state, state.borrow(row), NO_ROUND)
            state.session.train(session.row, self._finetuning(session, trained, epochs))
        except UserError:
            raise
        except Exception as error:  # of the user's module, as in a round
            return [Report(client, 0, error=self.abandon(client, state, error))]

        reports = self._test_in_session(session, "trained", "personal")
        state.live.restore()
        return reports

    def _finetuning(
        self, session: SessionContext, trained: Sequence[str], epochs: int | None
    ) -> Work:
        """Return the work of a session that only serves an evaluation.

        It is an ordinary session, without what the method adds to those of its rounds: masks,
        phases and repeated steps. Every evaluation makes the same draws, so that metrics of two
        rounds differ only by their models. The arguments are those of `finetune`.
        """
        client = session.client
        t = session.round
        purpose = "finetune-"
        total = self.plans.steps_of(client, t, purpose)
        if epochs is not None:
            per_epoch = self._fleet.data.num_batches(client, t)
            total = self._fleet.work.limited(epochs * per_epoch)
        phases = {0: Phase(trained).parameters(session.module)} if trained else {}
        return self._make_work(
            session,
            total=total,
            batches=self.plans.batches(client, t, total, purpose),
            seed=self.plans.seed(client, t, purpose),
            epoch_batches=self._fleet.data.num_batches(client, t),
            phases=phases,
            attributes=Attributes(None, client),
        )

    def gradient(self, client: int, row: Row, t: int) -> Tensor:
        """Return the gradient of one training batch at a row, in eval mode.

        The batch is drawn by (seed, "gradient", t, client).

        Returns:
            A tensor of shape (P,), 0 for parameters that the loss does not use.
        """
        state = self._fleet.state(client)
        self._seed("gradient", t, client)
        batch = next(self.plans.batches(client, t, 1, "gradient-"))
        self._count_passes(
            client, f"gradient {t}", passes=_PASSES_OF_A_GRADIENT * batch_size(batch)
        )
        return state.session.gradient(row, batch)

    def loss(self, client: int, row: Row, t: int) -> float:
        """Return the mean loss of a client's training samples at a row.

        The module is in eval mode, and the samples are not augmented.
        """
        data = self._fleet.data
        state = self._fleet.state(client)
        self._seed("loss", t, client)
        batches = data.batches(data.client_plan(client, data.eval_batch_size))
        loss, samples = state.session.loss(row, batches)
        self._count_passes(client, f"loss {t}", passes=samples)
        return loss

    def _count_passes(self, client: int, call: str, *, passes: float) -> None:
        """Count the FLOPs of forward passes of single samples beside a client's session.

        They are kept by the call that has caused them. A session that begins again, as after a pack
        that failed, makes the same calls, which then replace their earlier counts.
        """
        flops_of_calls = self.besides.setdefault(client, {})
        flops_of_calls[call] = passes * self._fleet.state(client).flops

    def _masked_flops(self, state: GroupState, mask: Tensor) -> Tensor | float:
        """Return the forward FLOPs of a sample under a client's mask.

        It is 0 where the forward pass of the model is not known to take one tensor.
        """
        if self._fleet.data.task == "columns" or not state.flops:
            return 0.0

        masked_flops = self._masked_flops_by_group.get(state.name)
        if masked_flops is None:
            sample = blank(self._fleet.data, samples=2).to(self._fleet.device)
            masked_flops = MaskedFlops(state.module, sample, state.layout.floats, state.flops)
            self._masked_flops_by_group[state.name] = masked_flops
        return masked_flops(mask)

    def _test_at(self, moment: Moment, session: SessionContext) -> None:
        """Test a client on its own test split, if the plan of the round says so."""
        client = session.client
        if client not in self._fleet.plan.tested.get(moment, ()):
            return
        for report in self._test_in_session(session, moment, moment):
            report.stored = self._fleet.stored_bytes(client)
            self.tests[moment].append(report)

    def _test_in_session(
        self, session: SessionContext, moment: Moment, purpose: str
    ) -> list[Report]:
        """Test the model that is in a session, on the client's samples of each split.

        There is no report if the algorithm has no model of this moment.
        """
        fleet = self._fleet.in_session(session)
        rows = self._fleet.algorithm.models(fleet, moment, [session.client])
        if rows is None:
            return []
        return [
            self.test(session.client, rows, purpose, split=split)
            for split in self._fleet.data.tested
        ]

    def test(
        self,
        client: int,
        rows: Rows,
        purpose: str = "personal",
        *,
        split: TestSplit = "test",
    ) -> Report:
        """Test a client's model on its samples of a split.

        A module's draws in evaluation, such as the tokens to mask, are named
        (seed, purpose, client), so that they are the same on any rank. Every split has the same.

        Returns:
            The report, without samples if the module's `validation_step` raised.
        """
        with rows.bound(client) as module:
            self._seed(f"{purpose}-evaluation", NO_ROUND, client)
            batches = self._fleet.data.tested[split].batches(client)
            evaluator = self.session_of(module)
            try:
                with self.timings.part("evaluation"):
                    report = evaluator.evaluate(batches, client=client)
            except UserError:
                raise
            except Exception as error:  # of the user's module
                evaluator.forget()
                return Report(client, 0, error=reason(error), split=split)
        report.metrics = reported(report.metrics)
        report.split = split
        return report

    def _seed(self, purpose: str, t: int, client: int) -> None:
        """Seed the default generators, by (seed, purpose, t, client)."""
        seed = derive_seed(self._fleet.seed, purpose, t, client)
        seed_default_generators(seed, self._fleet.device)
