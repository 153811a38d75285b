"""Forms packs of a rank's clients and runs their sessions side by side."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from lightfed.local.client_group import GroupState
from lightfed.local.hooks import SessionContext
from lightfed.local.local_work import ClientData
from lightfed.local.packed.forward import Views
from lightfed.local.packed.rules import Packing
from lightfed.local.packed.session import Member, PackedReport, PackedSession
from lightfed.local.session import Autocast, Known, PendingReport, Work
from lightfed.state.rows import Row
from lightfed.utils.errors import UserError

log = logging.getLogger(__name__)

_OWN = 1 << 16  # elements of a buffer that each client may have its own values of


AnyReport = PackedReport | PendingReport | Known


class Sessions(Protocol):
    """What happens around the steps of a session; `rank_sessions.Training` implements it."""

    def batches(self, client: int, t: int) -> int: ...
    def plans(self, client: int, t: int, left: int) -> Iterable[Any]: ...
    def begin(self, client: int, state: GroupState, row: Row, t: int) -> SessionContext: ...
    def work(self, s: SessionContext) -> Work: ...
    def end(self, s: SessionContext, work: Work, report: PendingReport | PackedReport) -> None: ...
    def failed(self, client: int, error: Exception) -> Known: ...
    def forget_tests(self, clients: Collection[int]) -> None: ...


class Fleet(Protocol):
    """The part of the federation that packs use."""

    groups: list[GroupState]
    data: ClientData

    def group_of(self, client: int) -> int: ...
    def row(self, client: int) -> Row: ...


class PackRunner:
    """The packs of this rank.

    Args:
        fleet: the clients.
        sessions: what happens around the steps of a session.
    """

    def __init__(self, fleet: Fleet, sessions: Sessions) -> None:
        self._fleet, self._sessions = fleet, sessions
        self._most: dict[int, int] = {}  # by group
        self._trainers: dict[int, PackedSession] = {}
        self._packs: dict[int, list[int]] = {}  # by client
        self._results: dict[int, AnyReport] = {}

    def attach(self, packings: Sequence[Packing], context: Autocast | None) -> None:
        """Create the packed sessions of the groups that have a stepper."""
        self._most, self._trainers = {}, {}
        for group, packing in enumerate(packings):
            if packing.stepper is None:
                continue
            self._most[group] = packing.most
            self._trainers[group] = PackedSession(
                self._fleet.groups[group].live,
                packing.stepper,
                context=context,
                floor=packing.floor,
            )

    def form(self, clients: Sequence[int], t: int) -> None:
        """Decide which of this rank's clients train side by side in a call of `train`."""
        self._packs, self._results = {}, {}
        if not self._most:
            return
        groups = {client: self._fleet.group_of(client) for client in clients}
        batches = {client: self._sessions.batches(client, t) for client in clients}
        for pack in form(clients, groups, batches, self._most):
            self._packs.update(dict.fromkeys(pack, pack))

    def holds(self, client: int) -> bool:
        """Whether the client is in a pack."""
        return client in self._packs

    def has_run(self, client: int) -> bool:
        """Whether the client's pack has run."""
        return client in self._results

    def result(self, client: int) -> AnyReport:
        """The report of a client whose pack has run."""
        return self._results[client]

    def run(self, client: int, t: int) -> bool:
        """Run the pack of a client; False if its clients have to be trained one after the other.

        When it raises, its clients are trained one after the other to find those that fail. The
        others are trained again, as a pack, from where they started: their bits are those of a run
        without the failure.

        Raises:
            UserError: a session rejects a user's setting.
        """
        clients = self._packs[client]
        for member in clients:
            self._fleet.row(member)  # writes what the server has sent
        try:
            self._results |= self._pack(clients, t).run()
        except UserError:
            raise
        except Exception as error:
            self._results |= self._after(error, clients, t)
        return client in self._results

    def _pack(self, clients: Sequence[int], t: int) -> "Pack":
        group = self._fleet.group_of(clients[0])
        state, trainer = self._fleet.groups[group], self._trainers[group]
        return Pack(clients, state, trainer, self._sessions, self._fleet.data, t)

    def _after(self, error: Exception, clients: Sequence[int], t: int) -> dict[int, AnyReport]:
        """Results of a pack that has raised."""
        self._sessions.forget_tests(clients)
        failed: dict[int, AnyReport] = {}
        for client in clients:
            found = self._alone(client, t)
            if found is not None:
                failed[client] = self._sessions.failed(client, found)
        others = [client for client in clients if client not in failed]
        self._sessions.forget_tests(others)
        try:
            if failed and others:
                return failed | self._pack(others, t).run()
        except UserError:
            raise
        except Exception as again:
            error = again
        self._sessions.forget_tests(others)
        if others:  # the module trains one client, but not several
            log.warning("clients are not trained side by side in round %d", t, exc_info=error)
            for client in others:
                self._packs.pop(client)
        return failed

    def _alone(self, client: int, t: int) -> Exception | None:
        """What a client's session raises; without an error its row is left as it was."""
        state, row = self._fleet.groups[self._fleet.group_of(client)], self._fleet.row(client)
        assert state.session is not None, "sessions are attached before the first round"
        before = row.clone()
        try:
            s = self._sessions.begin(client, state, row, t)
            state.session.train(row, self._sessions.work(s))
        except UserError:
            raise
        except Exception as error:
            return error
        row.copy_(before)
        return None


class Pack:
    """The sessions of some clients of one group.

    Args:
        clients: of the group; those with the most batches first.
        state: the group.
        session: of the group's packs.
        sessions: what happens around the steps.
        data: the clients' samples.
        t: the round.
    """

    def __init__(
        self,
        clients: Sequence[int],
        state: GroupState,
        session: PackedSession,
        sessions: Sessions,
        data: ClientData,
        t: int,
    ) -> None:
        self.clients = list(clients)
        self._state, self._session, self._sessions = state, session, sessions
        self._data, self._t = data, t
        self._begun: Row | None = None

    def run(self) -> dict[int, AnyReport]:
        """Train the clients; a report of each.

        Raises:
            Exception: what one of the sessions raised; the rows are as before.
        """
        store = self._state.store
        block, is_view = store.block(self.clients)
        before = block.clone() if is_view else None
        try:
            contexts, works, reports = self._train(block)
        except Exception:
            if before is not None:
                block.copy_(before)
            raise
        if not is_view:
            store.put_block(self.clients, block)
            self._state.live.forget_views()
            for s in contexts:
                s.move(store.row(s.client))
        return {
            s.client: self._end(s, work, report)
            for s, work, report in zip(contexts, works, reports, strict=True)
        }

    def _end(self, s: SessionContext, work: Work, report: PackedReport) -> PackedReport | Known:
        try:
            self._sessions.end(s, work, report)
        except UserError:
            raise
        except Exception as error:
            return self._sessions.failed(s.client, error)
        return report

    def _train(self, block: Row) -> tuple[list[SessionContext], list[Work], list[PackedReport]]:
        buffers = ModuleBuffers(self._state)
        contexts = [
            self._begin(client, row, buffers)
            for client, row in zip(self.clients, block.each(), strict=True)
        ]
        works = [self._sessions.work(s) for s in contexts]
        values = buffers.by_client()
        members = [
            self._member(s, work, mine)
            for s, work, mine in zip(contexts, works, values, strict=True)
        ]
        result = self._session.train(
            block, members, partial(_gather, self._data), lr=works[0].lr, shared=buffers.shared()
        )
        return contexts, works, result.reports()

    def _begin(self, client: int, row: Row, buffers: "ModuleBuffers") -> SessionContext:
        s = self._sessions.begin(client, self._state, row, self._t)
        buffers.note()
        if self._state.live.is_bound:
            self._state.live.unbind()
        return s

    def _member(self, s: SessionContext, work: Work, buffers: Views) -> Member:
        left = self._sessions.batches(s.client, self._t)
        plans = self._sessions.plans(s.client, self._t, left)
        batches = [(plan, place) for plan in plans for place in range(len(plan.sizes))]
        sizes = [plan.sizes[place] for plan, place in batches]
        return Member(
            s.client, batches, sizes, work.seed, work.hook, work.mask, work.proximal, buffers
        )


class ModuleBuffers:
    """Buffers of a module that lie in no row: a client's own, or the same for all.

    An algorithm's `session_start` may write into small ones, as HeteroFL's does with the classes
    that a client lacks. What it writes belongs to the client.
    """

    def __init__(self, state: GroupState) -> None:
        in_row = {entry.name for entry in [*state.layout.floats, *state.layout.integers]}
        buffers = state.module.named_buffers()
        self._buffers = {name: buffer for name, buffer in buffers if name not in in_row}
        self._versions = {name: buffer._version for name, buffer in self._buffers.items()}
        self._values: list[Views] = []

    def note(self) -> None:
        """Keep a client's values, after its session has started."""
        small = {name: b for name, b in self._buffers.items() if b.numel() <= _OWN}
        self._values.append({name: buffer.clone() for name, buffer in small.items()})

    def by_client(self) -> list[Views]:
        """The values of every client, in the order of `note`."""
        own = self._written()
        for name in own:
            if self._buffers[name].numel() > _OWN:
                raise NotImplementedError(f"session_start writes {name}, a large buffer")
        return [{name: values[name] for name in own} for values in self._values]

    def shared(self) -> Views:
        """The buffers that no client has written."""
        own = self._written()
        return {name: b for name, b in self._buffers.items() if name not in own}

    def _written(self) -> list[str]:
        return [name for name, b in self._buffers.items() if b._version != self._versions[name]]


def form(
    clients: Sequence[int],
    groups: Mapping[int, int],
    batches: Mapping[int, int],
    most: Mapping[int, int],
) -> list[list[int]]:
    """Cut clients into packs of one group each.

    A pack holds clients of about as many batches, so that few wait for the longest session.

    Args:
        clients: of this rank.
        groups: client -> its group.
        batches: client -> number of batches of its session.
        most: group -> clients of its largest pack; groups that are not packed are left out.
    """
    members: dict[int, list[int]] = {}
    for client in clients:
        if groups[client] in most:
            members.setdefault(groups[client], []).append(client)
    return [
        longest_first[start : start + most[group]]
        for group, theirs in members.items()
        for longest_first in [sorted(theirs, key=lambda client: -batches[client])]
        for start in range(0, len(theirs), most[group])
    ]


def _gather(data: ClientData, batches: Sequence[tuple[Any, int]]) -> Sequence[Tensor]:
    """One batch of each client, (K, B, ...)."""
    plans, places = zip(*batches, strict=True)
    return data.side_by_side(plans, places)
