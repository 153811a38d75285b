"""Runs clients' sessions between "send" and "merge", on their rank."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any, Protocol

import lightning.pytorch as L
import torch
from lightfed_kernels import Segments, apply_mask_, count_per_tensor
from torch import Tensor, nn

from lightfed.distributed import liveness as watch
from lightfed.distributed.collectives import Ranks
from lightfed.local.client_group import GroupState
from lightfed.local.client_module import reported
from lightfed.local.finished import Finished, Suspended
from lightfed.local.hooks import Hooks, Moment, SessionContext
from lightfed.local.local_work import ClientData, LocalWork, Phase
from lightfed.local.optimizer import Proximal, Stepper
from lightfed.local.packed.report import PackedReport
from lightfed.local.packed.rules import Packing, overrides_hooks
from lightfed.local.packed.runner import PackRunner
from lightfed.local.session import (
    Known,
    LocalSession,
    PendingReport,
    Report,
    Runtime,
    Work,
)
from lightfed.models.build import blank
from lightfed.state.client_state import Kept
from lightfed.state.costs import masked_flops, weight_uses
from lightfed.state.rows import Row
from lightfed.utils import signals
from lightfed.utils.errors import UserError
from lightfed.utils.rng import derive_seed, seed_default_generators, torch_generator

log = logging.getLogger(__name__)


Pending = PendingReport | PackedReport | Known
RunClient = Callable[[int], Pending | None]
Waves = Callable[[list[int], int, RunClient], list[Pending]]


class Clients(Protocol):
    """The part of the federation that sessions use; `lightfed.api.fleet.Fleet` implements it."""

    algorithm: Hooks
    groups: list[GroupState]
    data: ClientData
    device: torch.device
    kept: dict[str, Kept]
    masks: Kept | None
    ranks: Ranks
    seed: int
    work: LocalWork

    def mine(self, clients: Sequence[int]) -> list[int]: ...
    def row(self, client: int) -> Row: ...
    def deliver(self, clients: Collection[int]) -> bool: ...
    def state(self, client: int) -> GroupState: ...
    def group_of(self, client: int) -> int: ...
    def home_group(self, client: int) -> int: ...
    def mask(self, client: int) -> Tensor | None: ...
    def stored_bytes(self, client: int) -> int: ...


class Training:
    """Runs the sessions of this rank's clients.

    Attributes:
        waves: calls `run` for the clients of this rank; the loop adds batch hooks.
        lr: learning rate of the round, for optimisers that use it.
        tested: clients to test in their sessions of this round: before training, with the
            aggregated model, or after training.
        suspends: the round may be suspended, because the state it started from is on disk.
        calls: number of calls of `sessions` in this round.
        tests: reports of those tests, of this rank's sessions.
        steps: batches per session by client, if they differ from the configuration.
        side_by_side: how many clients of a group train at once, or why they do not, by its name.
        phases: parts of every session, if it has several.
    """

    def __init__(self, fleet: Clients) -> None:
        self._fleet = fleet
        self._runtime = Runtime()
        self._sessions: dict[int, LocalSession] = {}
        self._uses: dict[int, dict[str, float]] = {}  # by group, then by weight
        self._segments: dict[int, Segments] = {}
        method = type(fleet.algorithm)
        self._has_gradient = method.local_gradient is not Hooks.local_gradient
        self._hooked = overrides_hooks(fleet.algorithm)
        self._has_end = method.session_end is not Hooks.session_end
        self.waves: Waves = _one_after_the_other
        self.lr: float | None = None
        self.tested: Mapping[Moment, Collection[int]] = {}
        self.tests: dict[Moment, list[Report]] = {}
        self.steps: Mapping[int, int] = {}
        self.phases: Sequence[Phase] = ()
        self.suspends = False
        self.side_by_side: Mapping[str, int | str] = {}
        self.calls = 0
        self._known: Mapping[int, Mapping[str, Any]] = {}  # sessions already run
        self._known_call = 0
        self._refusals: list[UserError] = []
        self._explained = False
        self._packs = PackRunner(fleet, self)

    def attach(
        self,
        runtime: Runtime,
        steppers: Sequence[tuple[Stepper, bool]],
        packings: Sequence[Packing] = (),
    ) -> None:
        """Create the sessions of the groups.

        Args:
            runtime: of the Trainer.
            steppers: one per group, and whether it uses the round's learning rate.
            packings: one per group; without them clients train one after the other.
        """
        self._runtime = runtime
        self._sessions = {}
        self._packs.attach(packings, runtime.forward_context)
        self.side_by_side = {
            state.name: packing.reason or packing.most
            for state, packing in zip(self._fleet.groups, packings, strict=False)
        }
        for state, (stepper, takes_lr) in zip(self._fleet.groups, steppers, strict=True):
            state.takes_lr = takes_lr
            state.session = LocalSession(state.module, runtime, live=state.live, stepper=stepper)
            self._sessions[id(state.module)] = state.session

    def session_of(self, module: L.LightningModule) -> LocalSession:
        """The session that evaluates a module: a group's, or one for an algorithm's own module."""
        session = self._sessions.get(id(module))
        if session is None:
            session = self._sessions[id(module)] = LocalSession(module, self._runtime)
        return session

    def go_on(self, call: int, sessions: Mapping[int, Mapping[str, Any]]) -> None:
        """Use a journal's sessions for the given call of `sessions` in the next round."""
        self._known_call, self._known = call, sessions

    def sessions(self, clients: Sequence[int], waves: int, t: int) -> list[Report]:
        """Local training of every client.

        Args:
            clients: of all ranks.
            waves: largest number of clients on a rank.
            t: the round.

        Returns:
            reports of all clients, ascending, on every rank.

        Raises:
            Suspended: a signal asked the run to stop before all sessions finished.
            UserError: a session rejects a user's setting.
        """
        fleet = self._fleet
        mine = fleet.mine(clients)
        self.tests, self._refusals = {moment: [] for moment in self.tested}, []
        watch.forget_signal()
        self._packs.form([k for k in mine if not self._is_known(k)], t)
        pending = self.waves(mine, waves, lambda client: self.run(client, mine, t))
        here = [report.resolve() for report in pending]
        fleet.ranks.meet(f"the end of the sessions of round {t}")
        gathered = fleet.ranks.gather([*here, *self._refusals])
        for refusal in gathered:
            if isinstance(refusal, UserError):
                raise refusal
        if len(gathered) < len(clients):
            done = [report.client for report in gathered if not report.error]
            new = sum(not self._is_known(client) for client in done)
            raise Suspended(self.calls, self._finished(here), total=len(done), new=new)
        self.calls += 1
        return sorted(gathered, key=lambda report: report.client)

    def run(self, client: int, mine: list[int], t: int) -> Pending | None:
        """Run a session or reuse its known result; None if a signal asks the run to stop.

        Args:
            client: number of the client.
            mine: this rank's clients in order, to prefetch the next row.
            t: the round.
        """
        if self._is_known(client):
            return Known(self._put_in_place(client))
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
        assert state.session is not None, "sessions are attached before the first round"
        s = self.begin(client, state, self._fetch(client, mine), t)
        work = self.work(s)
        report = state.session.train(s.row, work)
        self.end(s, work, report)
        if state.staging is not None:
            state.staging.put_back(client)
        return report

    def begin(self, client: int, state: GroupState, row: Row, t: int) -> SessionContext:
        """Start a session on a row, and test the client before its training."""
        s = self._begin(client, state, row, t)
        self._test("aggregated", s)
        return s

    def work(self, s: SessionContext) -> Work:
        """The work of a session that has begun."""
        s.proximal = self._fleet.algorithm.proximal(s)
        return self._work(s, "", self._fleet.mask(s.client), s.proximal)

    def end(self, s: SessionContext, work: Work, report: PendingReport | PackedReport) -> None:
        """Finish a session on its trained row, and test the client after its training."""
        s.step = report.steps
        report.flops = s.group.flops
        if work.mask is not None:
            report.flops = self._masked_flops(s.client, work.mask)
        if work.proximal is not None and work.proximal.gap is not None:
            report.logged["stationarity"] = work.proximal.gap
        if self._has_end:
            self._fleet.algorithm.session_end(s)
        self._test("trained", s)

    def _begin(self, client: int, state: GroupState, row: Row, t: int) -> SessionContext:
        """Start a session: bind the module to its row."""
        state.live.bind(row)
        s = SessionContext(self._fleet, client, t, state, row, lr=self.lr)
        if self._has_gradient or self._has_end:
            s.received = s.parameters.clone()
        self._fleet.algorithm.session_start(s)
        return s

    def failed(self, client: int, error: Exception) -> Known:
        """Report a session that raised; its row keeps the steps done, within the client's mask."""
        fleet, state = self._fleet, self._fleet.state(client)
        reason = self.abandon(client, state, error)
        if state.staging is not None and state.staging.holds(client):
            state.staging.put_back(client)
        row = fleet.row(client).floats
        mask = fleet.mask(client)
        if mask is not None:
            apply_mask_(row, mask.to(row.device))
        return Known(Report(client, 0, norm=float(row.norm()), error=reason))

    def abandon(self, client: int, state: GroupState, error: Exception) -> str:
        """Clean a group's module after a session that raised; return the reason in one line."""
        assert state.session is not None, "sessions are attached before the first round"
        if not self._explained:
            log.warning("the session of client %d failed", client, exc_info=error)
            self._explained = True  # later failures get one line each
        state.session.abandon()
        return " ".join(f"{type(error).__name__}: {error}".split())

    def forget_tests(self, clients: Collection[int]) -> None:
        """Discard tests of sessions that are run again."""
        for moment, reports in self.tests.items():
            self.tests[moment] = [r for r in reports if r.client not in clients]

    def _finished(self, reports: Sequence[Report]) -> dict[int, Finished]:
        """Results of this rank's sessions, for a journal."""
        fleet = self._fleet
        tests = {
            moment: {report.client: report for report in found}
            for moment, found in self.tests.items()
        }
        finished = {}
        for report in reports:
            if report.error:
                continue  # may succeed when the round resumes
            client = report.client
            row = fleet.row(client)
            # Cloned: a view would be saved with the whole matrix behind it.
            tensors = {"floats": row.floats, "integers": row.integers}
            finished[client] = Finished(
                report,
                {moment: found[client] for moment, found in tests.items() if client in found},
                {name: x.cpu().clone() for name, x in tensors.items()},
                {
                    name: x.cpu().clone()
                    for name, kept in fleet.kept.items()
                    if (x := kept.saved(client)) is not None
                },
            )  # fmt: skip
        return finished

    def _put_in_place(self, client: int) -> Report:
        """Restore the result of a session from before the restart."""
        fleet, done = self._fleet, Finished.of(self._known[client])
        row = fleet.row(client)
        row.copy_(Row(done.tensors["floats"], done.tensors["integers"]))
        for name, kept in fleet.kept.items():
            kept.restore(client, done.kept.get(name))
        for moment, report in done.tests.items():
            self.tests[moment].append(report)
        return done.report

    def finetune(self, client: int, row: Row) -> L.LightningModule:
        """The client's module, bound to a copy of a row after an unreported session."""
        fleet, state = self._fleet, self._fleet.groups[self._fleet.home_group(client)]
        assert state.session is not None, "sessions are attached before the first round"
        s = self._begin(client, state, state.borrow(row), -1)
        # The same draws in every evaluation: metrics of two rounds differ only by their models.
        state.session.train(s.row, self._work(s, "finetune-"))
        return fleet.algorithm.tested(s)

    def gradient(self, client: int, row: Row, t: int) -> Tensor:
        """(P,) the gradient of one training batch at a row, in eval mode; 0 if there is none.

        Drawn by (seed, "gradient", t, client).
        """
        state = self._fleet.state(client)
        assert state.session is not None, "sessions are attached before the first round"
        self._seed("gradient", t, client)
        batch = next(self._batches(client, t, 1, "gradient-"))
        return state.session.gradient(row, batch)

    def box(self, client: int) -> tuple[float, float] | None:
        """Bounds of a client's parameters, if its optimiser projects onto them."""
        session = self._fleet.state(client).session
        assert session is not None, "sessions are attached before the first round"
        return session.box

    def _masked_flops(self, client: int, mask: Tensor) -> float:
        """Forward FLOPs of a sample under a client's mask."""
        fleet, state = self._fleet, self._fleet.state(client)
        group = fleet.group_of(client)
        if not state.flops:
            return 0.0  # unknown for a module without a forward
        if group not in self._uses:
            sample = blank(fleet.data, samples=2).to(fleet.device)
            self._uses[group] = weight_uses(state.module, sample)
            self._segments[group] = Segments.build(state.layout.floats, device=fleet.device)
        counts = count_per_tensor(mask, self._segments[group]).tolist()
        missing = {
            entry.name: entry.numel - count
            for entry, count in zip(state.layout.floats, counts, strict=True)
        }
        return masked_flops(state.flops, self._uses[group], missing)

    def _work(
        self,
        s: SessionContext,
        purpose: str,
        mask: Tensor | None = None,
        proximal: Proximal | None = None,
    ) -> Work:
        """A session's work; the names of its draws start with `purpose`."""
        fleet, client, t = self._fleet, s.client, s.round
        per_epoch = fleet.data.num_batches(client, t)
        lengths = [fleet.work.batches(per_epoch)] if purpose else self.lengths(client, t)
        return Work(
            client,
            self._batches(client, t, sum(lengths), purpose),
            epoch_batches=per_epoch,
            lr=self.lr if s.group.takes_lr else None,
            seed=self.seed(client, t, purpose),
            hook=partial(self._gradient, s) if self._has_gradient else None,
            mask=mask,
            proximal=proximal,
            phases={} if purpose else self.phases_of(client, t, s.module),
        )

    def seed(self, client: int, t: int, purpose: str = "") -> int:
        """Of dropout, and what else a session draws from the device's default generator."""
        return derive_seed(self._fleet.seed, f"{purpose}session", t, client)

    @property
    def watched(self) -> bool:
        """Whether a hook, a mask or a test looks at single sessions of this round."""
        return self._hooked or self._fleet.masks is not None or any(self.tested.values())

    def lengths(self, client: int, t: int) -> list[int]:
        """Number of batches of each part of a client's session in round t."""
        given = self.steps.get(client)
        work = self._fleet.work
        per_epoch = self._fleet.data.num_batches(client, t)
        if self.phases:
            return [work.phase(phase, per_epoch) for phase in self.phases]
        return [work.batches(per_epoch) if given is None else work.limited(given)]

    def phases_of(self, client: int, t: int, module: nn.Module) -> dict[int, Sequence[Tensor]]:
        """The parameters of a module that are trained from a batch on, by its index."""
        if not self.phases:
            return {}
        starts = accumulate(self.lengths(client, t), initial=0)
        phases = zip(starts, self.phases, strict=False)
        return {start: phase.parameters(module) for start, phase in phases}

    def _gradient(self, s: SessionContext, gradient: Tensor) -> None:
        """Pass a batch's gradient through the algorithm's hook before the optimiser."""
        self._fleet.algorithm.local_gradient(s, gradient)
        s.step += 1

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

    def _batches(self, client: int, t: int, left: int, purpose: str) -> Iterator[Any]:
        """`left` training batches; their order is named (seed, purpose + "order", t, client)."""
        for plan in self._plans(client, t, left, purpose):
            yield from self._fleet.data.batches(plan)

    def plans(self, client: int, t: int) -> list[Any]:
        """The local epochs of a client's session, before their samples are gathered."""
        return [*self._plans(client, t, sum(self.lengths(client, t)))]

    def _plans(self, client: int, t: int, left: int, purpose: str = "") -> Iterator[Any]:
        """The local epochs of `left` training batches, before their samples are gathered."""
        fleet, data = self._fleet, self._fleet.data
        order = torch_generator(fleet.seed, f"{purpose}order", t, client)
        augment = None
        if data.augments:
            augment = torch_generator(fleet.seed, f"{purpose}augment", t, client)
        while left > 0:
            plan = data.train_plan(client, order=order, augment=augment, limit=left, t=t)
            assert plan.sizes, f"client {client} has no batch"
            left -= len(plan.sizes)
            yield plan

    def _test(self, moment: Moment, s: SessionContext) -> None:
        """Test a client on its own test split, if this moment is to be tested."""
        client = s.client
        if client not in self.tested.get(moment, ()):
            return
        fleet = self._fleet
        module = fleet.algorithm.tested(s)
        if module.training:
            module.eval()
        self._seed(f"{moment}-evaluation", -1, client)
        report = self.session_of(module).evaluate(fleet.data.test_batches(client), client=client)
        report.metrics = reported(report.metrics)
        report.stored = fleet.stored_bytes(client)
        self.tests[moment].append(report)

    def _seed(self, purpose: str, t: int, client: int) -> None:
        seed = derive_seed(self._fleet.seed, purpose, t, client)
        seed_default_generators(seed, self._fleet.device)


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
