"""Placement and contents of the clients: the part of a fleet for the engine and tests."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import lightning.pytorch as L
import numpy as np
import torch
from lightfed_kernels import popcount
from torch import Tensor

from lightfed.aggregation.coverage_cache import Nesting, Parts
from lightfed.distributed.collectives import Ranks
from lightfed.local.client_group import GroupState
from lightfed.local.hooks import Hooks
from lightfed.state.client_state import Kept
from lightfed.state.parts import put_integers
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


class Clients:
    """The part of a `Fleet` that is not for an algorithm's pseudo-code."""

    algorithm: Hooks
    ranks: Ranks
    device: torch.device
    clients: int
    cohorts: list[GroupState]
    kept: dict[str, Kept]
    masks: Kept | None
    _home_cohort: np.ndarray
    _assigned: dict[int, int]
    _owner: dict[int, int]
    _inbox: dict[int, Message]
    _nesting: Nesting

    def warn(self, text: str | None) -> None:
        """Log a warning on one rank; does nothing for None."""
        if text is not None and self.ranks.rank == 0:
            log.warning("%s", text)

    def one_layout(self, fix: str) -> ModelLayout:
        """The layout of all clients.

        Args:
            fix: advice for a user with several layouts.

        Raises:
            UserError: two cohorts have different architectures; names them.
        """
        first = self.cohorts[0]
        for state in self.cohorts:
            if state.layout != first.layout:
                found = f"cohorts {first.name} and {state.name} have different architectures"
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
        """The cohort of a client in this round."""
        return self.cohorts[self.cohort_of(client)]

    def cohort_of(self, client: int) -> int:
        return self._assigned.get(client, int(self._home_cohort[client]))

    def mine(self, clients: Sequence[int]) -> list[int]:
        """The given clients that are on this rank, in order."""
        return [k for k in clients if self._owner[k] == self.ranks.rank]

    def row(self, client: int) -> Row:
        """The client's own row, on the device of the store; the client must be on this rank."""
        self._deliver(client)
        return self.state(client).store.row(client)

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
        self._write(model, client, Parts(), row)
        module = state.live.bind(row)
        assert isinstance(module, L.LightningModule)
        return module

    def bind_model(self, model: ServerModel, cohort: int = 0) -> L.LightningModule:
        """A cohort's live module, bound to a server model of its layout."""
        module = self.cohorts[cohort].live.bind(model.row)
        assert isinstance(module, L.LightningModule)
        return module

    def home_cohort(self, client: int) -> int:
        """The configured cohort of a client, ignoring the round's assignment."""
        return int(self._home_cohort[client])

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
        self._write(model, client, Parts.of(buffers=buffers, tensors=tensors), self.row(client))

    def check_nested(self, model: ServerModel, cohort: int) -> None:
        """Reject a cohort whose rows do not fit into a server model.

        Raises:
            UserError: names the cohort and the layer.
        """
        self._nesting.fitting(model, cohort, Parts())

    def covered_row(self, model: ServerModel, client: int) -> Row:
        """The part of a server model that a client covers, as a row in the client's own layout."""
        cohort = self.home_cohort(client)
        state = self.cohorts[cohort]
        row = Row(
            state.initial.floats.to(self.device, copy=True),
            state.initial.integers.to(self.device, copy=True),
        )
        self._nesting.fitting(model, cohort, Parts()).take(model.floats, cohort, row.floats)
        row.integers.copy_(model.integers)
        return row

    def _row_here(self, client: int) -> Row:
        """The client's row on the device: its own, or a copy of a row on the host."""
        row, state = self.row(client), self.state(client)
        return row if state.staging is None else state.borrow(row)

    def _deliver(self, client: int) -> None:
        """Write a client's pending message into its row."""
        message = self._inbox.pop(client, None)
        if message is None:
            return
        model = message.model
        assert model.floats._version == message.version, "the server model changed after sending"
        self._write(model, client, message.parts, self.state(client).store.row(client))

    def _write(self, model: ServerModel, client: int, parts: Parts, row: Row) -> None:
        """Write the given parts of a server model into a client's row."""
        cohort = self.cohort_of(client)
        self._nesting.fitting(model, cohort, parts).take(model.floats, cohort, row.floats)
        if parts.integers and model.integers.numel():
            put_integers(model, cohort, self.state(client).layout, row)
