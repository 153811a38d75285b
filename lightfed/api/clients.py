"""The rows of a federation's clients, and what servers send into them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from lightfed_kernels import popcount
from torch import Tensor

from lightfed.aggregation.coverage import Coverages, Parts
from lightfed.api.placed_clients import PlacedClients
from lightfed.local.hooks import SessionContext
from lightfed.state.rows import Row, Rows
from lightfed.state.server_model import ServerModel


@dataclass(frozen=True)
class Message:
    """A message from the server to a client on this rank, with the model's version."""

    model: ServerModel
    parts: Parts
    version: int


class Clients(PlacedClients):
    """The clients, their rows, and what servers send into them; arguments as `PlacedClients`.

    Attributes:
        session: under way, while its model is tested.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._inbox: dict[int, Message] = {}
        self.session: SessionContext | None = None
        labelled, classes = self.algorithm.label_rows, self.data.num_classes
        self._coverages = Coverages(
            [state.layout for state in self.groups],
            [state.name for state in self.groups],
            label_rows=self.groups[0].output_layer(classes) if labelled else None,
            depths=self.algorithm.depths,
            method=type(self.algorithm).__name__,
            device=self.device,
        )

    def row(self, client: int) -> Row:
        """The client's own row, on the device of the store; the client must be on this rank."""
        row = self.state(client).store.row(client)
        message = self._inbox.pop(client, None)
        if message is not None:
            self._write(message, self.group_of(client), row)
        return row

    def block(self, clients: Sequence[int]) -> Row:
        """(K, P) and (K, Q), on the device of the store: rows of one group's clients on this rank.

        They are views if the rows follow each other in the store.
        """
        self.deliver(clients)
        return self.state(clients[0]).store.block(clients)

    def _view(self, clients: Sequence[int]) -> Row | None:
        """`block`, if it is a view of rows of one group."""
        self.deliver(clients)
        groups = set(self.groups_of(clients))
        return self.groups[groups.pop()].store.view(clients) if len(groups) == 1 else None

    def deliver(self, clients: Collection[int]) -> None:
        """Write what servers have sent into the rows of clients of this rank."""
        waiting: dict[tuple[int, int], tuple[Message, list[int]]] = {}
        receiving = [client for client in clients if client in self._inbox]
        for client, group in zip(receiving, self.groups_of(receiving), strict=True):
            message = self._inbox.pop(client)
            waiting.setdefault((id(message), group), (message, []))[1].append(client)
        for (_, group), (message, receivers) in waiting.items():
            store = self.groups[group].store
            block = store.view(receivers)
            for rows in [store.row(k) for k in receivers] if block is None else [block]:
                self._write(message, group, rows)

    def _write(self, message: Message, group: int, row: Row) -> None:
        """Write what a server has sent into rows of a group."""
        model, version = message.model, message.version
        assert model.floats._version == version, "the server model changed after sending"
        self._coverages.take(model, group, message.parts, row)

    def rows(
        self,
        clients: Sequence[int],
        *,
        given: ServerModel | None = None,
        buffers: bool = True,
        tensors: Collection[str] | None = None,
    ) -> Rows:
        """The clients' own models; of a session under way, the model that is in it.

        Args:
            clients: of one group.
            given: take the part that they cover from this model instead; what they keep is not
                changed.
            buffers: take its BatchNorm statistics and other buffers too.
            tensors: names of the tensors to take; all by default.
        """
        s = self.session
        state = self.state(clients[0]) if s is None else s.group
        if given is None:
            return Rows(state.live, clients, self._read)
        parts, group = Parts.of(buffers=buffers, tensors=tensors), self.groups.index(state)

        def read(some: Sequence[int]) -> Row:
            rows = self._read(some)
            rows = rows.clone() if len(some) > 1 else state.borrow(rows.each()[0]).repeated(1)
            self._coverages.take(given, group, parts, rows)
            return rows

        return Rows(state.live, clients, read)

    def _read(self, clients: Sequence[int]) -> Row:
        """(K, P) and (K, Q) on the device: rows of one group's clients on this rank."""
        if self.session is not None:
            return self.session.row.repeated(1)
        if len(clients) == 1:
            return self._row_here(clients[0]).repeated(1)
        block = self.block(clients)
        return block if block.floats.device == self.device else block.to(self.device)

    def server_rows(
        self, models: ServerModel | Sequence[ServerModel], clients: Sequence[int]
    ) -> Rows:
        """What clients of one group cover of the server's model; they share one row.

        Args:
            models: of the server, or of each client's own server.
            clients: none for whole models, as the global ones.
        """
        given = [models] if isinstance(models, ServerModel) else models
        group = self._home_group[clients[0]] if clients else 0
        state, shared = self.groups[group], all(model is given[0] for model in given)
        whose = clients or range(len(given))
        of = dict(zip(whose, given, strict=False))

        def read(some: Sequence[int]) -> Row:
            if shared or len(some) == 1:
                return self._covered_row(of[some[0]] if not shared else given[0], group).repeated(1)
            rows = [self._covered_row(of[client], group).clone() for client in some]
            floats, integers = zip(*((row.floats, row.integers) for row in rows), strict=True)
            return Row(torch.stack(floats), torch.stack(integers))

        return Rows(state.live, whose, read, shared=shared)

    def _covered_row(self, model: ServerModel, group: int) -> Row:
        """The part of a server model that a group covers, in the group's layout, on the device."""
        state = self.groups[group]
        if state.layout == model.layout:
            return model.row
        row = state.borrow(state.initial)
        self._coverages.take(model, group, Parts(), row)
        return row

    def mask(self, client: int) -> Tensor | None:
        """(P / 32,) packed, on the device: the mask of a client of this rank; None for none."""
        return self.masks.get(client) if self.masks is not None else None

    def stored_bytes(self, client: int) -> int:
        """Bytes that a client of this rank keeps; 0 for a stateless one."""
        if not self.algorithm.stateful:
            return 0
        layout, mask = self.state(client).layout, self.mask(client)
        floats = layout.floats.numel if mask is None else int(popcount(mask))
        kept = sum(kept.bytes(client) for kept in self.kept.values())
        return 4 * floats + 8 * layout.integers.numel + kept

    def bind(self, client: int) -> L.LightningModule:
        """The client's live module, bound to its own row, or to a copy of a row on the host.

        The client must be on this rank.
        """
        return self.state(client).bind(self._row_here(client))

    def load(
        self,
        model: ServerModel,
        client: int,
        *,
        buffers: bool = True,
        tensors: Collection[str] | None = None,
    ) -> None:
        """Copy the part of a server model (or of the given tensors) into the row of a client.

        This is not a message: the ledger does not count it.
        """
        parts = Parts.of(buffers=buffers, tensors=tensors)
        self._coverages.take(model, self.group_of(client), parts, self.row(client))

    def check_nested(self, model: ServerModel, group: int) -> None:
        """Reject a group whose rows do not fit into a server model; names group and layer."""
        self._coverages.fitting(model, group, Parts())

    def _row_here(self, client: int) -> Row:
        """The client's row on the device: its own, or a copy of a row on the host."""
        row, state = self.row(client), self.state(client)
        return row if state.staging is None else state.borrow(row)
