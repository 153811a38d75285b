"""Runs the sessions of packs: their start, their training and their end."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as L
import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightfed.distributed.placement import split
from lightfed.local.alone import Alone
from lightfed.local.client_group import GroupState, Packing
from lightfed.local.client_sessions import ClientSessions
from lightfed.local.hooks import SessionContext, SessionFleet
from lightfed.local.optimizer import Stepper
from lightfed.local.session import GLOBAL, Autocast, Runtime, SessionReport, Work
from lightfed.packs.packing import Packs, unknown
from lightfed.packs.row_tests import RowTests, at_once
from lightfed.packs.session import LaneReport, PackSession, PackWork
from lightfed.packs.stacked_optimizer import StackedOptimizer
from lightfed.state.rows import Rows
from lightfed.utils.errors import UserError, reason

log = logging.getLogger(__name__)


class PackRunner(Alone):
    """The packs of this rank.

    Args:
        fleet: Of the clients.
        packs: The configuration: how many at once, in how much memory.
        make: Makes the optimizer of a module, or says why that trains alone.
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
        self._trainers: dict[int, PackSession] = {}  # by group

    @override
    def packing(self, state: GroupState) -> Packing:
        return self._packs.of(self._fleet, state, self._make, self._context)

    @override
    def attach(self, group: int, stepper: Stepper, runtime: Runtime) -> None:
        state = self._fleet.groups[group]
        stacked_kind: Any = getattr(stepper.optimizer, "stacked", StackedOptimizer)
        self._trainers[group] = PackSession(
            state.module,
            state.layout,
            stacked_kind(stepper.optimizer, state.live.trainable, stepper.rate),
            clipping=stepper.clipping,
            context=runtime.forward_context,
            known=state.packing.known,
        )

    @override
    def watch(self, group: int, rates: Mapping[str, float]) -> None:
        if group in self._trainers:
            self._trainers[group].rates = rates

    @override
    def schedule(self, settings: Mapping[str, Any]) -> None:
        for trainer in self._trainers.values():
            trainer.optimizer.scheduled = settings

    @override
    def tests(self, group: int, rows: Rows, clients: Sequence[int]) -> RowTests | None:
        fleet = self._fleet
        state = fleet.groups[group]
        of_several_servers = not clients and len(rows.clients) > 1
        if state.packing.most == 1 or of_several_servers or not at_once(rows.live.module):
            return None

        return RowTests(
            rows,
            clients or [GLOBAL],
            fleet.data,
            packs=self._test_packs(group, clients),
            flops=state.flops,
            context=self._context,
            device=fleet.device,
        )

    def _test_packs(self, group: int, clients: Sequence[int]) -> list[list[int]]:
        """The tested clients of a group in packs: those of one home, or of about one size."""
        fleet = self._fleet
        most = fleet.groups[group].packing.most
        if fleet.stateful:
            return split(clients, fleet.pack_of)

        by_size = sorted(clients, key=lambda client: len(fleet.data.test_index(client)))
        return [by_size[start : start + most] for start in range(0, len(by_size), most)]

    @override
    def form(self, sessions: ClientSessions, clients: Sequence[int], t: int) -> list[list[int]]:
        if not self._trainers:
            return []
        fleet, plans = self._fleet, sessions.plans
        groups = {client: fleet.group_of(client) for client in clients}
        ready = [g for g in {*groups.values()} & self._trainers.keys() if not self._has_changed(g)]
        members: dict[Any, list[int]] = {}
        for client, group in groups.items():
            if group in ready:
                shape = plans.shape(client, t, even=fleet.groups[group].packing.even)
                members.setdefault((fleet.pack_of(client), *shape), []).append(client)
        return [
            pack
            for pack in members.values()
            if len(pack) >= fleet.groups[groups[pack[0]]].packing.least
        ]

    def _has_changed(self, group: int) -> bool:
        """Whether a callback has frozen parameters, or has changed the kinds of known layers."""
        state = self._fleet.groups[group]
        frozen = not all(p.requires_grad for p in state.live.trainable)
        return frozen or (state.packing.known and bool(unknown(state.module)))

    @override
    def run(
        self, sessions: ClientSessions, clients: Sequence[int], t: int
    ) -> dict[int, SessionReport] | None:
        """Train a pack; None if it raises: its clients then have to train one after the other.

        Raises:
            UserError: a session rejects a user's setting.
        """
        try:
            return self._run(sessions, clients, t)
        except UserError:
            raise
        except Exception as error:
            log.warning("clients %s train one after the other: %s", [*clients], reason(error))
        state = self._fleet.state(clients[0])
        state.session.abandon()
        state.live.forget_views()
        sessions.forget_tests(clients)
        return None

    def _run(
        self, sessions: ClientSessions, clients: Sequence[int], t: int
    ) -> dict[int, SessionReport]:
        """Train copies of the rows and write them back; a report of each client."""
        fleet = self._fleet
        plans = sessions.plans
        group = fleet.group_of(clients[0])
        state, store = fleet.groups[group], fleet.groups[group].store
        lengths = {client: plans.steps_of(client, t) for client in clients}
        steps = dict(sorted(lengths.items(), key=lambda item: -item[1]))  # longest first
        order = [*steps]
        block = store.copy(order)
        block = block.to(store.device) if store.host else block
        watched, contexts, works = sessions.watched, list[SessionContext](), list[Work]()
        buffers = _Buffers(state, len(order), own=watched or not state.packing.known)
        rows = block.each()
        for lane, client in enumerate(order) if watched else ():
            contexts.append(sessions.begin(client, state, rows[lane], t))
            works.append(sessions.work(contexts[lane]))
            buffers.note(lane)
            # A hook that took a gradient, as My-1's does, has unbound the module already. Then all
            # that it wrote lies in the row.
            if state.live.row is not None:
                state.live.unbind()
        work = PackWork(
            order,
            plans.side_by_side(steps, t),
            works,
            seed=plans.seed(order[0], t),
            lr=fleet.plan.lr if state.takes_lr else None,
            own=buffers.own,
            shared=buffers.shared,
            phases=plans.phases_of(order[0], t, state.module),
            timings=plans.timings,
            epoch_batches=fleet.data.num_batches(order[0], t) * plans.repeat,
        )
        result = self._trainers[group].train(block, work)
        store.put_block(order, block)
        reports: dict[int, SessionReport] = {}
        for lane, client in enumerate(order):
            reports[client] = report = LaneReport(result, lane, state.flops)
            if watched:
                buffers.put(lane)
                reports[client] = self._end(sessions, contexts[lane], works[lane], report)
        if watched:
            state.live.restore()
            state.live.forget_views()
        return reports

    def _end(
        self, sessions: ClientSessions, s: SessionContext, work: Work, report: LaneReport
    ) -> SessionReport:
        try:
            sessions.end(s, work, report)
        except UserError:
            raise
        except Exception as error:
            return sessions.failed(s.client, error)
        self._fleet.row(s.client).copy_(s.row)
        return report


class _Buffers:
    """Buffers of a module that lie in no row: each client's own, or the same for all.

    An algorithm's `session_start` may write into them, as HeteroFL's does with the classes that a
    client lacks, and so may a user's steps. The module has a client's values again when its session
    ends.

    Attributes:
        own: (K, ...) values of every client, by name.
        shared: buffers that all have.
    """

    def __init__(self, state: GroupState, lanes: int, *, own: bool) -> None:
        layout, self._module = state.layout, state.module
        in_row = {entry.name for entry in [*layout.floats, *layout.integers]}
        state.live.restore()
        found = {n: b for n, b in self._module.named_buffers() if n not in in_row}
        self.own = {n: torch.stack([b] * lanes) for n, b in found.items()} if own else {}
        self.shared = {} if own else found

    def note(self, lane: int) -> None:
        """Take a client's values, after its session has started."""
        for name, values in self.own.items():
            values[lane].copy_(self._module.get_buffer(name))

    def put(self, lane: int) -> None:
        """Give the module a client's values, as they are after its training."""
        for name, values in self.own.items():
            self._module.get_buffer(name).copy_(values[lane])
