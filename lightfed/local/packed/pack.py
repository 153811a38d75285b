"""The sessions of some clients of one group, and the values that modules keep outside of rows."""

from collections.abc import Mapping

import torch

from lightfed.local.client_group import GroupState
from lightfed.local.hooks import SessionContext
from lightfed.local.packed.forward import OWN, Views
from lightfed.local.packed.session import PackedSession
from lightfed.local.packed.steps.report import PackedReport
from lightfed.local.packed.steps.tensors import Members
from lightfed.local.session import Known, PendingReport, Work
from lightfed.local.sessions.around import AroundSessions
from lightfed.state.rows import Row
from lightfed.utils.errors import UserError

AnyReport = PackedReport | PendingReport | Known


class Pack:
    """The sessions of some clients of one group; those with the most `steps` come first."""

    def __init__(
        self,
        steps: Mapping[int, int],
        state: GroupState,
        session: PackedSession,
        sessions: AroundSessions,
        t: int,
    ) -> None:
        self.clients, self._steps = [*steps], steps
        self._state, self._session, self._sessions = state, session, sessions
        self._t = t

    def run(self, *, same: bool) -> dict[int, AnyReport]:
        """Train the clients; a report of each. `same` says that their rows are the same.

        What one of the sessions raises is raised, and the rows are as before.
        """
        store = self._state.store
        is_view = not store.host and store.view(self.clients) is not None
        block = store.block(self.clients)
        if store.host:
            block = block.to(store.device)
        before = (block.first(1) if same else block).clone() if is_view else None
        try:
            contexts, works, reports, own = self._train(block)
        except Exception:
            if before is not None:
                block.copy_(before)
            raise
        if not is_view:
            store.put_block(self.clients, block)
            self._state.live.forget_views()
        if not is_view and not store.host:
            for s in contexts:
                s.move(store.row(s.client))
        ended: list[AnyReport] = [
            self._end(s, work, report, {name: values[i] for name, values in own.items()})
            for i, (s, work, report) in enumerate(zip(contexts, works, reports, strict=False))
        ]
        if store.host and ended:  # the sessions ended on rows of the device
            good = [i for i, report in enumerate(ended) if not isinstance(report, Known)]
            trained = Row(block.floats[good], block.integers[good])
            store.put_block([self.clients[i] for i in good], trained)
        return dict(zip(self.clients, ended or reports, strict=True))

    def _end(
        self, s: SessionContext, work: Work, report: PackedReport, own: Views
    ) -> PackedReport | Known:
        for name, value in own.items():
            s.module.get_buffer(name).copy_(value)
        try:
            self._sessions.end(s, work, report)
        except UserError:
            raise
        except Exception as error:
            return self._sessions.failed(s.client, error)
        return report

    def _train(
        self, block: Row
    ) -> tuple[list[SessionContext], list[Work], list[PackedReport], Views]:
        """What the sessions are given and asked, if something looks at single ones.

        And the reports, and the values (K, ...) of buffers that are a client's own.
        """
        sessions, t, none = self._sessions, self._t, [None] * len(self.clients)
        buffers, rows = ModuleBuffers(self._state), block.each() if sessions.watched else []
        contexts = [self._begin(*each, buffers) for each in zip(self.clients, rows, strict=False)]
        works = [sessions.work(s) for s in contexts]
        members = Members(
            self.clients,
            sessions.plans.side_by_side(self._steps, t),
            seed=lambda client: sessions.plans.seed(client, t),
            hooks=[work.hook for work in works] or none,
            masks=[work.mask for work in works] or none,
            proximals=[work.proximal for work in works] or none,
            buffers=buffers.stacked(),
            phases=sessions.plans.phases_of(self.clients[0], t, self._state.module),
            timings=sessions.plans.timings,
            device=block.floats.device,
        )
        lr = sessions.lr if self._state.takes_lr else None
        result = self._session.train(block, members, lr=lr, shared=buffers.shared())
        return contexts, works, result.reports(flops=self._state.flops), members.buffers

    def _begin(self, client: int, row: Row, buffers: "ModuleBuffers") -> SessionContext:
        s = self._sessions.begin(client, self._state, row, self._t)
        buffers.note()
        if self._state.live.is_bound:
            self._state.live.unbind()
        return s


class ModuleBuffers:
    """Buffers of a module that lie in no row: a client's own, or the same for all.

    An algorithm's `session_start` may write into small ones, as HeteroFL's does with the classes
    that a client lacks, or put others in their place. Such values belong to the client. The
    module has them again when the client's session ends.
    """

    def __init__(self, state: GroupState) -> None:
        self._module = state.module
        self._in_row = {entry.name for entry in [*state.layout.floats, *state.layout.integers]}
        self._before = {name: (b, b._version) for name, b in self._found().items()}
        self._own: set[str] = set()
        self._values: list[Views] = []

    def _found(self) -> Views:
        buffers = self._module.named_buffers()
        return {name: buffer for name, buffer in buffers if name not in self._in_row}

    def note(self) -> None:
        """Keep a client's values, after its session has started."""
        found = self._found()
        self._own |= self._before.keys() - found.keys()
        for name, buffer in found.items():
            first, version = self._before.get(name, (None, 0))
            if buffer is not first or buffer._version != version:
                self._own.add(name)
        small = {name: buffer for name, buffer in found.items() if buffer.numel() <= OWN}
        self._values.append({name: buffer.clone() for name, buffer in small.items()})

    def stacked(self) -> Views:
        """The values of every client, (K, ...) in the order of `note`.

        A NotImplementedError if a client's own buffer is large, or not every client has it.
        """
        for name in sorted(self._own):
            if not all(name in values for values in self._values):
                raise NotImplementedError(f"session_start writes {name}, a large or new buffer")
        return {name: torch.stack([v[name] for v in self._values]) for name in self._own}

    def shared(self) -> Views:
        """The buffers that no client has written."""
        return {name: b for name, b in self._found().items() if name not in self._own}
