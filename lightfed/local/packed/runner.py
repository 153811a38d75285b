"""Forms packs of a rank's clients and runs their sessions side by side."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from lightfed.local.client_group import GroupState
from lightfed.local.packed.pack import AnyReport, Pack
from lightfed.local.packed.session import PackedSession
from lightfed.local.packed.steps.packing import Packing
from lightfed.local.session import Autocast
from lightfed.local.sessions.around import AroundSessions
from lightfed.state.rows import Row
from lightfed.utils.errors import UserError

log = logging.getLogger(__name__)


class Fleet(Protocol):
    """The part of the federation that packs use."""

    groups: list[GroupState]

    def group_of(self, client: int) -> int: ...
    def groups_of(self, clients: Iterable[int]) -> list[int]: ...
    def row(self, client: int) -> Row: ...
    def deliver(self, clients: Collection[int]) -> bool: ...


class PackRunner:
    """The packs of this rank."""

    def __init__(self, fleet: Fleet, sessions: AroundSessions) -> None:
        self._fleet, self._sessions = fleet, sessions
        self._most: dict[int, int] = {}  # by group
        self._trainers: dict[int, PackedSession] = {}
        self._packs: dict[int, list[int]] = {}  # by client
        self._results: dict[int, AnyReport] = {}
        self._steps: dict[int, int] = {}  # of a session, by client
        self._same = False  # whether the clients of the pack have started from the same row

    def attach(self, packings: Sequence[Packing], context: Autocast | None) -> None:
        """Create the packed sessions of the groups that have a stepper."""
        self._most, self._trainers = {}, {}
        for group, packing in enumerate(packings):
            if packing.stepper is None:
                continue
            self._most[group] = packing.most
            state = self._fleet.groups[group]
            self._trainers[group] = PackedSession(
                state.live, packing, context=context, name=state.name
            )

    def form(self, clients: Sequence[int], t: int) -> None:
        """Decide which of this rank's clients train side by side in a call of `train`."""
        self._packs, self._results = {}, {}
        if not self._most:
            return
        groups = dict(zip(clients, self._fleet.groups_of(clients), strict=True))
        lengths = {client: self._sessions.plans.lengths(client, t) for client in clients}
        self._steps = {client: sum(parts) for client, parts in lengths.items()}
        for pack in form(clients, groups, lengths, self._most):
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
        without the failure. A UserError if a session rejects a user's setting.
        """
        clients = self._packs[client]
        self._same = self._fleet.deliver(clients)
        try:
            self._results |= self._pack(clients, t).run(same=self._same)
        except UserError:
            raise
        except Exception as error:
            self._results |= self._after(error, clients, t)
        return client in self._results

    def _pack(self, clients: Sequence[int], t: int) -> Pack:
        group = self._fleet.group_of(clients[0])
        state, trainer = self._fleet.groups[group], self._trainers[group]
        steps = {client: self._steps[client] for client in clients}
        return Pack(steps, state, trainer, self._sessions, t)

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
                return failed | self._pack(others, t).run(same=self._same)
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
        if state.staging is not None:
            row = state.staging.get(client)
        before = row.clone()
        try:
            s = self._sessions.begin(client, state, row, t)
            state.session.train(row, self._sessions.work(s))
        except UserError:
            raise
        except Exception as error:
            return error
        row.copy_(before)
        if state.staging is not None:
            state.staging.put_back(client)
        return None


def form(
    clients: Sequence[int],
    groups: Mapping[int, int],
    lengths: Mapping[int, Sequence[int]],
    most: Mapping[int, int],
) -> list[list[int]]:
    """Cut clients into packs of one group each.

    A pack holds clients of about as many batches, so that few wait for the longest session. Their
    phases start with the same batches. `lengths` are the numbers of batches of each part of a
    client's session. `most` gives the largest pack of a group; groups that are not packed are left
    out.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for client in clients:
        if groups[client] in most:
            *before_the_last, _ = lengths[client]
            members.setdefault((groups[client], *before_the_last), []).append(client)
    return [
        longest_first[start : start + most[group]]
        for (group, *_), theirs in members.items()
        for longest_first in [sorted(theirs, key=lambda client: -sum(lengths[client]))]
        for start in range(0, len(theirs), most[group])
    ]
