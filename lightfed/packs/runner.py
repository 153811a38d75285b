"""Runs the sessions of packs: their start, their training and their end."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from lightfed.local.client_group import GroupState
from lightfed.local.client_sessions import ClientSessions
from lightfed.local.hooks import SessionContext, SessionFleet
from lightfed.local.session import Report, Work
from lightfed.packs.packing import unknown
from lightfed.packs.session import LaneReport, PackSession, PackWork
from lightfed.utils.errors import UserError, reason

log = logging.getLogger(__name__)

PackReport = LaneReport | Report


class PackRunner:
    """The packs of this rank in a round."""

    def __init__(self, fleet: SessionFleet, sessions: ClientSessions) -> None:
        self._fleet, self._sessions = fleet, sessions
        self.trainers: dict[int, PackSession] = {}  # by group

    def form(self, clients: Sequence[int], t: int) -> list[list[int]]:
        """The packs that train side by side, of clients of this rank; others are alone."""
        fleet, plans = self._fleet, self._sessions.plans
        groups = {client: fleet.group_of(client) for client in clients}
        ready = [g for g in {*groups.values()} & self.trainers.keys() if not self._has_changed(g)]
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

    def run(self, clients: Sequence[int], t: int) -> dict[int, PackReport] | None:
        """Train a pack; None if it raises: its clients then have to train one after the other.

        Raises:
            UserError: a session rejects a user's setting.
        """
        try:
            return self._run(clients, t)
        except UserError:
            raise
        except Exception as error:
            log.warning("clients %s train one after the other: %s", [*clients], reason(error))
        state = self._fleet.state(clients[0])
        state.session.abandon()
        state.live.forget_views()
        self._sessions.forget_tests(clients)
        return None

    def _run(self, clients: Sequence[int], t: int) -> dict[int, PackReport]:
        """Train copies of the rows and write them back; a report of each client."""
        fleet, sessions, plans = self._fleet, self._sessions, self._sessions.plans
        group = fleet.group_of(clients[0])
        state, store = fleet.groups[group], fleet.groups[group].store
        lengths = {client: plans.steps_of(client, t) for client in clients}
        steps = dict(sorted(lengths.items(), key=lambda item: -item[1]))  # longest first
        order = [*steps]
        fleet.deliver(order)
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
        result = self.trainers[group].train(block, work)
        store.put_block(order, block)
        reports: dict[int, PackReport] = {}
        for lane, client in enumerate(order):
            reports[client] = report = LaneReport(result, lane, state.flops)
            if watched:
                buffers.put(lane)
                reports[client] = self._end(contexts[lane], works[lane], report)
        if watched:
            state.live.restore()
            state.live.forget_views()
        return reports

    def _end(self, s: SessionContext, work: Work, report: LaneReport) -> PackReport:
        try:
            self._sessions.end(s, work, report)
        except UserError:
            raise
        except Exception as error:
            return self._sessions.failed(s.client, error)
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
