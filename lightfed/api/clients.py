"""The clients of a federation: their groups, their ranks and their rows."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Required, TypedDict

import lightning.pytorch as L
from lightfed_kernels import popcount
from torch import Tensor

from lightfed.aggregation.slice_cache import Coverages, Parts
from lightfed.distributed.collectives import Ranks
from lightfed.distributed.placement import Rates, place
from lightfed.local.client_group import ClientGroup, GroupState, group_names
from lightfed.local.hooks import Hooks
from lightfed.local.local_work import ClientData, LocalWork
from lightfed.state.client_state import Kept
from lightfed.state.rows import ModelLayout, Row
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Message:
    """A message from the server to a client on this rank, with the model's version."""

    model: ServerModel
    parts: Parts
    version: int


class Settings(TypedDict, total=False):
    """Keyword arguments of `Clients`."""

    ranks: Required[Ranks]
    work: LocalWork | None
    seed: int
    host_rows: bool
    rates: Rates | None


class Clients:
    """The clients, numbered 0 .. N-1 in the order of the groups, and where they are.

    Args:
        groups: one architecture each.
        algorithm: prepares the modules, and decides whether clients keep their rows.
        data: the clients' samples.
        ranks: of the run.
        work: local work and sampling.
        seed: of the whole run.
        host_rows: keep client rows in host memory.
        rates: session times that the run has measured before.
    """

    def __init__(
        self,
        groups: Sequence[ClientGroup],
        algorithm: Hooks,
        data: ClientData,
        *,
        ranks: Ranks,
        work: LocalWork | None = None,
        seed: int = 0,
        host_rows: bool = False,
        rates: Rates | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.rates = Rates() if rates is None else rates
        self.host_rows = host_rows
        self.data = data
        data.reserve(algorithm.hold_out)
        self.ranks = ranks
        self.device = ranks.device
        self.work = work or LocalWork()
        self.seed = seed
        self.clients = sum(group.count for group in groups)
        self.kept: dict[str, Kept] = {}
        self.masks: Kept | None = None
        self.groups = [
            GroupState.build(
                group,
                data,
                name=name,
                position=position,
                seed=seed,
                device=self.device,
                host_rows=host_rows,
                prepare=algorithm.prepare_module,
            )
            for position, (group, name) in enumerate(zip(groups, group_names(groups), strict=True))
        ]
        self._home_group = [i for i, group in enumerate(groups) for _ in range(group.count)]
        self._assigned: dict[int, int] = {}
        self._owner: dict[int, int] = {}
        self._inbox: dict[int, Message] = {}
        output = self.groups[0].output_layer(data.num_classes) if algorithm.label_rows else None
        self._coverages = Coverages(
            [state.layout for state in self.groups],
            [state.name for state in self.groups],
            label_rows=output,
            depths=algorithm.depths,
            method=type(algorithm).__name__,
            device=self.device,
        )
        if algorithm.stateful:
            self._settle()

    def _settle(self) -> None:
        """Assign all stateful clients a home rank and open their rows, once."""
        self._owner = self._placed(range(self.clients))
        for index, state in enumerate(self.groups):
            mine = [k for k in self.mine(range(self.clients)) if self._home_group[k] == index]
            state.open(mine, keep=True)
            for client in mine:
                state.store.row(client).copy_(state.initial)

    def warn(self, text: str | None) -> None:
        """Log a warning on one rank; does nothing for None."""
        if text is not None and self.ranks.rank == 0:
            log.warning("%s", text)

    def one_layout(self, fix: str) -> ModelLayout:
        """The layout of all clients.

        Args:
            fix: advice for a user with several layouts.

        Raises:
            UserError: two groups have different architectures; names them.
        """
        first = self.groups[0]
        for state in self.groups:
            if state.layout != first.layout:
                found = f"groups {first.name} and {state.name} have different architectures"
                raise UserError("model.clients", found, fix)
        return first.layout

    def one_after_the_other(self, key: str, found: str, fix: str) -> None:
        """Reject several ranks, which train clients in parallel.

        Raises:
            UserError: there are several ranks.
        """
        if self.ranks.world > 1:
            raise UserError(key, f"{found}, on {self.ranks.world} ranks", fix)

    def state(self, client: int) -> GroupState:
        """The group of a client in this round."""
        return self.groups[self.group_of(client)]

    def group_of(self, client: int) -> int:
        return self._assigned.get(client, self._home_group[client])

    def mine(self, clients: Sequence[int]) -> list[int]:
        """The given clients that are on this rank, in order."""
        return [k for k in clients if self._owner[k] == self.ranks.rank]

    def _placed(self, clients: Sequence[int]) -> dict[int, int]:
        """The rank of each client in its next session."""
        if self.ranks.world == 1:
            return dict.fromkeys(clients, 0)
        return place(self._costs(clients), ranks=self.ranks.world)

    def row(self, client: int) -> Row:
        """The client's own row, on the device of the store; the client must be on this rank."""
        if client in self._inbox:
            self.deliver([client])
        return self.state(client).store.row(client)

    def block(self, clients: Sequence[int]) -> Row:
        """(K, P) and (K, Q), on the device of the store: rows of one group's clients on this rank.

        They are views if the rows follow each other in the store.
        """
        self.deliver(clients)
        return self.state(clients[0]).store.block(clients)

    def _view(self, clients: Sequence[int]) -> Row | None:
        """`block`, if it is a view of rows of one group."""
        self.deliver(clients)
        groups = {self.group_of(client) for client in clients}
        return self.groups[groups.pop()].store.view(clients) if len(groups) == 1 else None

    def deliver(self, clients: Collection[int]) -> bool:
        """Write what servers have sent into the rows of clients of this rank.

        Returns whether all of them have received the same whole row.
        """
        waiting: dict[tuple[int, int], tuple[Message, list[int]]] = {}
        for client in clients:
            message = self._inbox.pop(client, None)
            if message is not None:
                key = id(message), self.group_of(client)
                waiting.setdefault(key, (message, []))[1].append(client)
        same = False
        for (_, group), (message, receivers) in waiting.items():
            model, parts, store = message.model, message.parts, self.groups[group].store
            assert model.floats._version == message.version, (
                "the server model changed after sending"
            )
            block = store.view(receivers)
            for rows in [store.row(k) for k in receivers] if block is None else [block]:
                self._coverages.take(model, group, parts, rows)
            everyone = len(receivers) == len(clients)
            same = everyone and self._coverages.is_whole(model, group, parts)
        return same

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
        module = self.state(client).live.bind(self._row_here(client))
        assert isinstance(module, L.LightningModule)
        return module

    def bind_with(self, model: ServerModel, client: int) -> L.LightningModule:
        """The client's live module, bound to a copy of its row with its part of a model loaded.

        The client must be on this rank; its own row is unchanged.
        """
        state = self.state(client)
        row = state.borrow(self.row(client))
        self._coverages.take(model, self.group_of(client), Parts(), row)
        module = state.live.bind(row)
        assert isinstance(module, L.LightningModule)
        return module

    def bind_model(self, model: ServerModel, group: int = 0) -> L.LightningModule:
        """A group's live module, bound to a server model of its layout."""
        assert self.groups[group].layout == model.layout, "the model of another group"
        module = self.groups[group].live.bind(model.row)
        assert isinstance(module, L.LightningModule)
        return module

    def home_group(self, client: int) -> int:
        """The configured group of a client, ignoring the round's assignment."""
        return self._home_group[client]

    def home(self, client: int) -> int:
        """The rank of a stateful client."""
        return self._owner[client]

    def load_parameters(self, model: ServerModel, client: int) -> None:
        """Copy a server's parameters, without buffers, into a client's row.

        This is not a message: the ledger does not count it.
        """
        self.load(model, client, buffers=False)

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
        """Reject a group whose rows do not fit into a server model.

        Raises:
            UserError: names the group and the layer.
        """
        self._coverages.fitting(model, group, Parts())

    def covered_row(self, model: ServerModel, client: int) -> Row:
        """The part of a server model that a client covers, as a row in the client's own layout."""
        group = self.home_group(client)
        state = self.groups[group]
        row = Row(
            state.initial.floats.to(self.device, copy=True),
            state.initial.integers.to(self.device, copy=True),
        )
        self._coverages.take(model, group, Parts(), row)
        return row

    def _row_here(self, client: int) -> Row:
        """The client's row on the device: its own, or a copy of a row on the host."""
        row, state = self.row(client), self.state(client)
        return row if state.staging is None else state.borrow(row)

    def _open(self, clients: Sequence[int]) -> None:
        """Assign ranks and slots to a round's participants, if they are stateless."""
        if self.algorithm.stateful or all(k in self._owner for k in clients):
            return
        self._owner = self._placed(clients)
        mine = self.mine(clients)
        for index, state in enumerate(self.groups):
            state.open([k for k in mine if self.group_of(k) == index], keep=False)

    def _costs(
        self, clients: Iterable[int], steps: Mapping[int, int] | None = None
    ) -> dict[int, float]:
        """Costs of sessions: seconds if all the clients' groups have been timed, else FLOPs.

        Args:
            clients: clients of the sessions.
            steps: batches per session by client; as configured by default.
        """
        groups = {k: self.group_of(k) for k in clients}
        rates = self.rates.of(groups.values())
        if rates is None:  # only samples if a module's FLOPs are unknown
            rates = {c: max(self.groups[c].flops, 1.0) for c in groups.values()}
        given = steps or {}
        return {
            k: rates[c] * self.work.samples(self.data, k, given.get(k)) for k, c in groups.items()
        }
