"""Forms packs, runs their sessions from start to end, and tests them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as L
import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightfed.data.tested_samples import TestSplit
from lightfed.distributed.placement import cut, split
from lightfed.local.alone import Alone
from lightfed.local.client_sessions import ClientSessions
from lightfed.local.group_state import GroupState, Packing
from lightfed.local.hooks import SessionContext, SessionFleet
from lightfed.local.optimizer import Stepper
from lightfed.local.session import GLOBAL, Autocast, Runtime, SessionReport, Work
from lightfed.packs.known_layers import unknown
from lightfed.packs.packing import Packs
from lightfed.packs.report import PackedReport
from lightfed.packs.row_tests import RowTests, can_test_at_once
from lightfed.packs.session import PackSession, PackWork
from lightfed.packs.stacked import Views
from lightfed.packs.stacked_optimizer import StackedOptimizer
from lightfed.state.rows import Rows
from lightfed.utils.errors import UserError, reason

log = logging.getLogger(__name__)


class PackRunner(Alone):
    """Trains and tests the clients of this rank side by side.

    Args:
        fleet: The clients.
        packs: The configuration: how many clients at once, in how much memory.
        make: Makes the optimizer of a module, or says why its clients have to train alone.
        context: Autocast of the Trainer's precision; None in full precision.
    """

    def __init__(
        self,
        fleet: SessionFleet,
        *,
        packs: Packs,
        make: Callable[[L.LightningModule], Optimizer | str],
        context: Autocast | None,
    ) -> None:
        super().__init__(fleet)
        self._packs = packs
        self._make = make
        self._context = context
        self._sessions: dict[int, PackSession] = {}  # by group

    @override
    def packing(self, state: GroupState) -> Packing:
        return self._packs.of(self._fleet, state, self._make, self._context)

    @override
    def attach(self, group: int, stepper: Stepper, runtime: Runtime) -> None:
        state = self._fleet.groups[group]
        stacked_kind: Any = getattr(stepper.optimizer, "stacked", StackedOptimizer)
        self._sessions[group] = PackSession(
            state.module,
            state.layout,
            stacked_kind(stepper.optimizer, state.live.trainable, stepper.rate),
            clipping=stepper.clipping,
            context=runtime.forward_context,
            known=state.packing.known,
        )

    @override
    def watch(self, group: int, rates: Mapping[str, float]) -> None:
        if group in self._sessions:
            self._sessions[group].rates = rates

    @override
    def schedule(self, settings: Mapping[str, Any]) -> None:
        for session in self._sessions.values():
            session.optimizer.scheduled = settings

    @override
    def tests(
        self, group: int, rows: Rows, clients: Sequence[int], tested_on: TestSplit = "test"
    ) -> RowTests | None:
        fleet = self._fleet
        state = fleet.groups[group]
        if state.packing.most == 1 or not can_test_at_once(rows.live.module):
            return None

        # The samples of all together, with the models of several servers.
        if not clients and len(rows.clients) > 1:
            return None

        return RowTests(
            rows,
            clients or [GLOBAL],
            fleet.data.tested[tested_on],
            split=tested_on,
            batch_size=fleet.data.eval_batch_size,
            packs=self._test_packs(group, clients, tested_on),
            flops=state.flops,
            context=self._context,
            device=fleet.device,
        )

    def _test_packs(
        self, group: int, clients: Sequence[int], tested_on: TestSplit
    ) -> list[list[int]]:
        """Return the tested clients of a group in packs, of one home or of about one size."""
        fleet = self._fleet
        most = fleet.groups[group].packing.most
        if fleet.stateful:
            packs = []
            for of_one_home in split(clients, fleet.pack_of):
                packs.extend(cut(of_one_home, most))
            return packs

        samples = fleet.data.tested[tested_on]
        by_size = sorted(clients, key=lambda client: len(samples.index(client)))
        return [by_size[start : start + most] for start in range(0, len(by_size), most)]

    @override
    def form(self, sessions: ClientSessions, clients: Sequence[int], t: int) -> list[list[int]]:
        if not self._sessions:
            return []

        fleet = self._fleet
        group_of = {client: fleet.group_of(client) for client in clients}
        ready = set()
        for group in set(group_of.values()):
            if group in self._sessions and not self._has_changed(group):
                ready.add(group)

        # Clients that the configuration has put together, and whose sessions fit each other.
        hooks_with_a_key = [hooks for hooks in fleet.hooks if hooks.overrides("pack_key")]
        members: dict[Any, list[int]] = {}
        for client, group in group_of.items():
            if group in ready:
                even = fleet.groups[group].packing.even
                shape = sessions.plans.shape(client, t, even=even)
                keys = [hooks.pack_key(fleet, client, t) for hooks in hooks_with_a_key]
                members.setdefault((fleet.pack_of(client), *shape, *keys), []).append(client)

        # More participants than a pack can have may live together: a draw is not even.
        packs = []
        for together in members.values():
            packing = fleet.groups[group_of[together[0]]].packing
            for pack in cut(together, packing.most):
                if len(pack) >= packing.least:
                    packs.append(pack)
        return packs

    def _has_changed(self, group: int) -> bool:
        """Return whether a callback has changed which parameters are trained, or known layers.

        Clients then train alone, where a frozen parameter that is to be trained now is refused.
        """
        state = self._fleet.groups[group]
        if not all(parameter.requires_grad for parameter in state.live.trainable):
            return True
        if any(parameter.requires_grad for parameter in state.live.frozen.values()):
            return True

        return state.packing.known and bool(unknown(state.module))

    @override
    def run(
        self, sessions: ClientSessions, clients: Sequence[int], t: int
    ) -> dict[int, SessionReport] | None:
        """Train a pack; None if it raises: its clients then have to train one after the other.

        Raises:
            UserError: A session rejects a user's setting.
        """
        try:
            return self._run(sessions, clients, t)
        except UserError:
            raise
        except Exception as error:
            # Alone, the client that fails is found, and only that one is skipped.
            what = "clients %s train one at a time, because their pack failed: %s"
            log.warning(what, [*clients], reason(error))

        state = self._fleet.state(clients[0])
        state.session.abandon()
        state.live.forget_views()
        sessions.forget_tests(clients)
        return None

    def _run(
        self, sessions: ClientSessions, clients: Sequence[int], t: int
    ) -> dict[int, SessionReport]:
        """Train a pack on copies of its rows, and write them back; return a report of each client.

        The rows of the store stay as they are until all sessions of the pack have been trained, so
        that clients can start again, one after the other, if the pack raises.
        """
        fleet = self._fleet
        plans = sessions.plans
        group = fleet.group_of(clients[0])
        state = fleet.groups[group]
        store = state.store

        # Longest session first, so that the clients that still train are always the first ones.
        lengths = {client: plans.steps_of(client, t) for client in clients}
        steps = dict(sorted(lengths.items(), key=lambda item: -item[1]))
        order = list(steps)

        block = store.copy(order)
        if store.host:
            block = block.to(store.device)

        # Without anything that looks at single sessions, none of them begins or ends by itself.
        watched = sessions.watched
        rows = block.each()
        contexts: list[SessionContext] = []
        works: list[Work] = []
        buffers = _Buffers(state, len(order), own=watched or not state.packing.known)
        if watched:
            for position, client in enumerate(order):
                context = sessions.begin(client, state, rows[position], t)
                contexts.append(context)
                works.append(sessions.work(context))
                buffers.note(position)
                # A hook that took a gradient, as My-1's does, has unbound the module already. Then
                # all that it wrote lies in the row.
                if state.live.row is not None:
                    state.live.unbind()

        work = PackWork(
            order,
            plans.side_by_side(steps, t),
            works,
            seed=plans.seed(order[0], t),
            lr=fleet.plan.lr if state.takes_lr else None,
            own_buffers=buffers.own,
            shared_buffers=buffers.shared,
            phases=plans.phases_of(order[0], t, state.module),
            timings=plans.timings,
            epoch_batches=fleet.data.num_batches(order[0], t) * plans.repeat,
        )
        result = self._sessions[group].train(block, work)
        store.put_block(order, block)

        reports: dict[int, SessionReport] = {}
        for position, client in enumerate(order):
            report = PackedReport(result, position, state.flops)
            reports[client] = report
            if watched:
                buffers.put(position)
                reports[client] = self._end(sessions, contexts[position], works[position], report)

        if watched:
            state.live.restore()
            state.live.forget_views()
        return reports

    def _end(
        self, sessions: ClientSessions, s: SessionContext, work: Work, report: PackedReport
    ) -> SessionReport:
        """End the session of one client of a pack; a client whose end raises has failed alone."""
        try:
            sessions.end(s, work, report)
        except UserError:
            raise
        except Exception as error:
            return sessions.failed(s.client, error)

        # The end of a session may have changed the row.
        self._fleet.row(s.client).copy_(s.row)
        return report


class _Buffers:
    """Buffers of a module that lie in no row: each client's own, or the same for all.

    An algorithm's `session_start` may write into them, as HeteroFL's does with the classes that a
    client lacks, and so may a user's steps. The module has a client's values again when that
    client's session ends.

    Args:
        state: The clients' group.
        clients: Number of clients in the pack.
        own: Whether each client gets its own values.

    Attributes:
        own: The values of every client, (K, *shape) by name.
        shared: Buffers that are the same for all, by name.
    """

    def __init__(self, state: GroupState, clients: int, *, own: bool) -> None:
        self._module = state.module
        self.own: Views = {}
        self.shared: Views = {}

        state.live.restore()
        entries = [*state.layout.floats, *state.layout.integers]
        in_row = {entry.name for entry in entries}
        for name, buffer in self._module.named_buffers():
            if name in in_row:
                continue
            if own:
                self.own[name] = torch.stack([buffer] * clients)
            else:
                self.shared[name] = buffer

    def note(self, position: int) -> None:
        """Take a client's values, after its session has started."""
        for name, values in self.own.items():
            values[position].copy_(self._module.get_buffer(name))

    def put(self, position: int) -> None:
        """Give the module a client's values, as they are after its training."""
        for name, values in self.own.items():
            self._module.get_buffer(name).copy_(values[position])
