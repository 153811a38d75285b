"""What a federation asks of its algorithm, and a session as the algorithm's hooks see it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightfed.local.client_group import CohortState, DataSpec
from lightfed.local.optimizer import Proximal
from lightfed.state.rows import ModelLayout, Row

# When a client is tested: with what the last aggregation gave it, or as its last session left it.
Moment = Literal["aggregated", "trained"]


@dataclass(eq=False)
class SessionContext:
    """One client's local training in one round, on the rank it lies on.

    Attributes:
        fed: the `lightfed.api.fleet.Fleet`.
        client: whose session it is.
        round: t; -1 for one that only an evaluation asks for.
        group: the client's group in this round.
        row: of the client, on the device; the module is bound to it.
        received: (P,) what the parameters were when the session began; only for algorithms with a
            `local_gradient` or a `session_end`.
        lr: learning rate of the round; None where the optimiser keeps its own.
        step: batches that are done.
    """

    fed: Any
    client: int
    round: int
    group: CohortState
    row: Row
    received: Tensor = field(default_factory=lambda: torch.empty(0))
    lr: float | None = None
    step: int = 0

    @property
    def module(self) -> L.LightningModule:
        """The group's live module."""
        return self.group.module

    @cached_property
    def parameters(self) -> Tensor:
        """(P,) the leading part of the row, without buffers; a view."""
        layout = self.group.layout
        return self.row.floats[: layout.floats.span(layout.parameters)]


class Hooks(nn.Module, ABC):
    """Declarations and hooks of an algorithm; all have a default.

    `fed` is the `lightfed.api.fleet.Fleet`, which stands above this room.

    Attributes:
        stateful: clients keep their rows from round to round.
        label_rows: a client's row covers only the class-label rows of the labels it holds
            (HeteroFL).
        surplus_rows: rows of such tensors beyond the classes, as a mask token's, are everybody's.
        global_models: how many models are tested as global ones; the figures are their means.
        hold_out: share of every client's training samples that no session trains on.
        moments: when `evaluated` tests a client; both where aggregation does not change what it
            holds. The first is the default of `model.evaluate_at`.
        tests_both: the paper reports clients at both moments, and so does every evaluation.
        holds: what a client tests as its own, in a few words, for the run's page.
    """

    stateful: bool = False
    label_rows: bool = False
    surplus_rows: bool = True
    global_models: int = 1
    hold_out: float = 0.0
    moments: tuple[Moment, ...] = ("aggregated",)
    tests_both: bool = False
    holds: str = "the model that it keeps"

    @abstractmethod
    def setup(self, fed: Any) -> None:
        """Create the server state; refuse a federation that the algorithm cannot train."""

    @abstractmethod
    def round(self, fed: Any, t: int) -> None:
        """One round, t = 0, 1, ..."""

    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        """Change a freshly built client module, before its layout is taken.

        What it draws from torch's default generator is the same for all cohorts.
        """

    def session_start(self, s: SessionContext) -> None:
        """Before a client's session, its module bound to its row."""

    def session_end(self, s: SessionContext) -> None:
        """After a client's session, on its trained row; called only if overridden."""

    def facts(self, fed: Any) -> dict[str, Any]:
        """What the run's environment.json says of the algorithm beside its name."""
        return {}

    def lr_factors(self, module: L.LightningModule) -> Mapping[str, float]:
        """Learning rates of parts of a client, relative to the configured one, by their prefix."""
        return {}

    def proximal(self, s: SessionContext) -> Proximal | None:
        """What a session is pulled to."""
        return None

    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        """Change the gradient of a batch in place; called only if overridden, before clipping.

        Args:
            s: the session; `s.parameters` are the values that the gradient was taken at.
            gradient: (P,) as the parameters lie in a row; 0 where the loss depends on none.
        """

    def evaluation_start(self, fed: Any) -> None:
        """Before an evaluation, on every rank."""

    def evaluation_end(self, fed: Any) -> Mapping[str, Mapping[str, Tensor]]:
        """After an evaluation, on every rank: arrays for the run folder, by file and name."""
        return {}

    def evaluated_server(self, fed: Any, server: int) -> L.LightningModule | None:
        """The module, bound to the values, that is tested as one of `global_models`."""
        return self.evaluated(fed, None)

    def evaluated(self, fed: Any, client: int | None) -> L.LightningModule | None:
        """The module, bound to the values, that is tested for a client (None: as the global model).

        None where the algorithm has no such model. By default the model that a stateful client
        keeps, and none of a server.
        """
        return fed.bind(client) if self.stateful and client is not None else None

    def aggregated(self, fed: Any, client: int) -> L.LightningModule | None:
        """As `evaluated`, for an algorithm whose `moments` lack "aggregated".

        If it is not overridden, what aggregation gives a client is known only when its next session
        starts, and the client is tested there.
        """
        return None

    def local(self, fed: Any, client: int) -> L.LightningModule | None:
        """The global model, to be tested on a client's data.

        None where there is none, or where it is what the client holds.
        """
        return None

    def tested(self, s: SessionContext) -> L.LightningModule:
        """The module that tests a row that a session has trained, or will train."""
        module = s.group.live.bind(s.row)
        assert isinstance(module, L.LightningModule)
        return module

    def client_row(self, fed: Any, client: int) -> tuple[ModelLayout, Row]:
        """The weights that a client would deploy, for export: by default the row that it keeps.

        A stateful client lies on this rank.
        """
        assert self.stateful, "a client that keeps nothing deploys what its algorithm says"
        return fed.state(client).layout, fed.row(client)

    def reset_client(self, fed: Any, client: int) -> None:
        """A stateful client of this rank, back to its initial values: its row is not finite."""
        fed.row(client).copy_(fed.state(client).initial)
