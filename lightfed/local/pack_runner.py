"""Runs the sessions of packs: their start and end, and what becomes of those that fail."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from lightfed.local.client_group import GroupState
from lightfed.local.client_sessions import ClientSessions
from lightfed.local.hooks import SessionContext, SessionFleet
from lightfed.local.pack_rules import unknown
from lightfed.local.pack_session import LaneReport, PackResult, PackSession, PackWork
from lightfed.local.session import ReadyReport, Work
from lightfed.state.rows import Row
from lightfed.utils.errors import UserError

log = logging.getLogger(__name__)

PackReport = LaneReport | ReadyReport


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
        """Train a pack; None if its clients have to be trained one after the other.

        When it raises, its clients are tried one after the other to find those that fail. The
        others train again beside idle lanes: their bits are those of a run without the failure.

        Raises:
            UserError: a session rejects a user's setting.
        """
        pack = _Pack(clients, t, self._fleet, self._sessions, self.trainers)
        failed: dict[int, Exception] = {}
        for _ in range(2):
            try:
                return pack.run(failed)
            except UserError:
                raise
            except Exception as error:
                raised = error
            self._sessions.forget_tests(clients)
            if not failed:
                failed = self._failing(clients, t)
            if not failed:
                break
        log.warning("clients %s train one after the other", [*clients], exc_info=raised)
        return None

    def _failing(self, clients: Sequence[int], t: int) -> dict[int, Exception]:
        """What sessions of single clients raise."""
        found = {client: self._alone(client, t) for client in clients}
        self._sessions.forget_tests(clients)
        return {client: error for client, error in found.items() if error is not None}

    def _alone(self, client: int, t: int) -> Exception | None:
        """What a client's session raises; its row is left as it was."""
        state = self._fleet.state(client)
        row = self._fleet.row(client).clone()
        if state.staging is not None:
            row = row.to(state.store.device)
        try:
            s = self._sessions.begin(client, state, row, t)
            state.session.train(row, self._sessions.work(s))
        except UserError:
            raise
        except Exception as error:
            state.session.abandon()
            return error
        finally:
            state.live.forget_views()
        return None


class _Pack:
    """The sessions of some clients of one group."""

    def __init__(
        self,
        clients: Sequence[int],
        t: int,
        fleet: SessionFleet,
        sessions: ClientSessions,
        trainers: Mapping[int, PackSession],
    ) -> None:
        self._fleet, self._sessions, self._t = fleet, sessions, t
        group = fleet.group_of(clients[0])
        self._state, self._session = fleet.groups[group], trainers[group]
        steps = {client: sessions.plans.steps_of(client, t) for client in clients}
        self._steps = dict(sorted(steps.items(), key=lambda item: -item[1]))  # longest first
        self._clients = [*self._steps]
        fleet.deliver(clients)

    def run(self, failed: Mapping[int, Exception]) -> dict[int, PackReport]:
        """Train copies of the rows and write them back; a report of each client.

        The lanes of those that have `failed` are idle, and their rows stay as they are.
        """
        store, sessions = self._state.store, self._sessions
        clients = self._clients
        block = store.copy(clients)
        block = block.to(store.device) if store.host else block
        rows, watched = block.each(), sessions.watched
        lanes = [k for k, client in enumerate(clients) if client not in failed]
        own = watched or not self._state.packing.known
        buffers = _Buffers(self._state, len(clients), own=own)
        contexts: dict[int, SessionContext] = {}
        works: list[Work | None] = [None] * len(clients)
        for lane in lanes if watched else ():
            contexts[lane] = sessions.begin(clients[lane], self._state, rows[lane], self._t)
            works[lane] = sessions.work(contexts[lane])
            buffers.note(lane)
            self._state.live.unbind()
        result = self._train(block, works, buffers, {*range(len(clients))} - {*lanes})
        store.put_block([clients[k] for k in lanes], _some(block, lanes))
        reports: dict[int, PackReport] = {}
        for lane in lanes:
            report = LaneReport(result, lane, self._state.flops)
            reports[clients[lane]] = report
            if watched:
                buffers.put(lane)
                reports[clients[lane]] = self._end(contexts[lane], works[lane], report)
        if watched:
            good = [k for k in lanes if isinstance(reports[clients[k]], LaneReport)]
            store.put_block([clients[k] for k in good], _some(block, good))
            self._state.live.restore()
            self._state.live.forget_views()
        failures = {client: sessions.failed(client, error) for client, error in failed.items()}
        return {**reports, **failures}

    def _end(self, s: SessionContext, work: Work | None, report: LaneReport) -> PackReport:
        assert work is not None
        try:
            self._sessions.end(s, work, report)
        except UserError:
            raise
        except Exception as error:
            return self._sessions.failed(s.client, error)
        return report

    def _train(
        self, block: Row, works: list[Work | None], buffers: "_Buffers", idle: Collection[int]
    ) -> PackResult:
        plans, plan, t = self._sessions.plans, self._fleet.plan, self._t
        work = PackWork(
            self._clients,
            plans.side_by_side(self._steps, t, idle),
            works,
            seed=plans.seed(self._clients[0], t),
            lr=plan.lr if self._state.takes_lr else None,
            own=buffers.own,
            shared=buffers.shared,
            phases=plans.phases_of(self._clients[0], t, self._state.module),
            timings=plans.timings,
        )
        return self._session.train(block, work)


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


def _some(block: Row, lanes: Sequence[int]) -> Row:
    """Some rows of a block."""
    index = torch.tensor(lanes, dtype=torch.int64, device=block.floats.device)
    return Row(block.floats.index_select(0, index), block.integers.index_select(0, index))
