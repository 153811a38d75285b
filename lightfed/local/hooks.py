"""The hooks of an algorithm, and the session context passed to them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor, nn

from lightfed.data.datamodule import FederatedDataModule
from lightfed.distributed.collectives import Ranks
from lightfed.local.client_group import GroupState
from lightfed.local.local_work import LocalWork, RoundPlan
from lightfed.local.optimizer import Proximal
from lightfed.models.build import DataSpec
from lightfed.state.client_state import Kept, KeptStates
from lightfed.state.rows import ModelKind, Moment, Row, Rows
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import check_arguments
from lightfed.utils.recorded import Recorded

_NOTHING = torch.empty(0)
SESSION_HOOKS = (
    "session_start",
    "session_end",
    "local_gradient",
    "proximal",
    "decay_after_clipping",
)


@dataclass(eq=False)
class SessionContext:
    """One client's local training in one round, on the client's rank.

    Attributes:
        fed: the `lightfed.api.fleet.Fleet`.
        client: number of the client.
        round: t; -1 for a session that only serves an evaluation.
        group: the client's group in this round.
        row: of the client, on the device; the module is bound to it.
        received: (P,) the parameters at the start of the session, after `session_start`; only where
            a hook is about gradients, or the end of a session.
        lr: learning rate of the round; None if the optimiser uses its own.
        step: number of finished batches.
        proximal: the session's pull towards another model.
    """

    fed: Any
    client: int
    round: int
    group: GroupState
    row: Row
    received: Tensor = _NOTHING
    lr: float | None = None
    step: int = 0
    proximal: Proximal | None = None

    @property
    def module(self) -> L.LightningModule:
        """The group's live module."""
        return self.group.module

    @cached_property
    def parameters(self) -> Tensor:
        """(P,) the leading part of the row, without buffers; a view."""
        layout = self.group.layout
        return self.row.floats[: layout.parameter_size]


class SessionHooks:
    """What is called in the sessions of clients; all of it does nothing by default.

    Attributes:
        side_by_side: sessions may run in packs. `session_start`, `proximal`, `local_gradient` and
            `session_end` then use the row, not the parameters of the module, keep nothing of a
            client in Python attributes, and draw from generators that they name. They may be called
            again after a failure. A class that overrides one of them has to declare it.
    """

    side_by_side: bool | None = None

    def overrides(self, name: str) -> bool:
        """Whether there is a hook of its own, of the class or the object."""
        own = getattr(type(self), name) is not getattr(SessionHooks, name)
        return own or name in vars(self)

    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        """Modify a newly built client module, before its layout is determined.

        Draws from torch's default generator are the same for all groups.
        """

    def session_start(self, s: SessionContext) -> None:
        """Called before a client's session, with its module bound to its row."""

    def session_end(self, s: SessionContext) -> None:
        """Called after a client's session, on its trained row, if overridden."""

    def proximal(self, s: SessionContext) -> Proximal | None:
        """The model that a session is pulled towards; None for no pull."""
        return None

    def decay_after_clipping(self, s: SessionContext) -> float:
        """The weight of a decay of this session: times the parameters, it joins the gradient.

        It does so after clipping, as the weight decay of an optimizer does.
        """
        return 0.0

    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        """Change the gradient of a batch in place; called only if overridden, before clipping.

        Args:
            s: the session; the gradient was taken at `s.parameters`.
            gradient: (P,) in the order of the row; 0 for parameters that the loss does not use.
        """


class LocalPenalty(SessionHooks, Recorded):
    """A term of the clients' objective besides their loss, under any method.

    `fed` is the `lightfed.api.fleet.Fleet`. The hooks of a session come after the method's own.

    Attributes:
        stateful: clients keep something from round to round (`fed.keep`).
    """

    stateful: bool = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments by their annotated bounds, before the constructor runs."""
        check_arguments(cls, args, kwargs, "model.local_penalty.init_args")
        return super().__new__(cls, *args, **kwargs)

    def setup(self, fed: Any) -> None:
        """Declare what clients keep; reject a federation that the penalty does not fit."""

    def trained(self, fed: Any, clients: Sequence[int], t: int) -> None:
        """Called after the sessions of these clients, on all ranks; their updates are finite."""

    def counted(self, fed: Any, clients: Sequence[int], t: int) -> None:
        """Called once for each session that the server uses, on all ranks.

        A policy may drop sessions that come too late: then this is called at the end of a round,
        without them. What a client remembers of a session, if the server remembers it too, is
        changed here, so that both change together.
        """


class Hooks(SessionHooks, Recorded, nn.Module, ABC):
    """Declarations and hooks of an algorithm; all have a default.

    `fed` is the `lightfed.api.fleet.Fleet`, which this room cannot import.

    Attributes:
        stateful: clients keep their rows from round to round.
        label_rows: a client's row covers only the class-label rows of the labels it holds
            (HeteroFL).
        depths: a client may lack layers of a server's model; its row covers the tensors that it has
            (DepthFL).
        surplus_rows: rows of these tensors beyond the classes, such as a mask token's, are covered
            by all clients.
        hold_out: share of every client's training samples that no session trains on.
        moments: of which `models` has the clients' models between rounds; a model of another moment
            is tested in its session. The first is the default of `model.evaluate_at`.
        tests_both: every evaluation tests clients at both moments, as the paper reports them.
        no_server_step: why no optimiser can step for the server; empty if one can.
        no_personal: why clients cannot keep some tensors to themselves (`model.personal`); empty if
            they can. None: they can unless the class is `stateful`.
        no_policy: why the server cannot merge before all have sent; empty if it can.
        takes_late: an update that arrives in a later round fits into the mean of that round. Every
            class has to declare it of itself.
        parts: shares of the model that clients hold, client i the entry i mod length; with
            `model.assign` the largest that its device can train.
        timing: makes the clock of a Fleet whose clients have devices, unless `model.devices` names
            some: a `lightfed.devices.timing.Timing`. None: rounds take no time.
        carries: clients keep the state of their optimiser in any case (`fed.optimizers`).
        no_memory: why clients cannot keep models or parts of an update from session to session, as
            `LinearTerm` and `Contrast` do; empty if they can.
        no_kept_optimizer: why clients cannot keep it (`model.keep_optimizer`); empty if they can.
        holds: short description of the client's own model, for the run's page; by default that of
            the model that `models` gives by default.
        deployed_with: what a reader of an exported file does besides loading it, where the method
            tests models that differ from the user's network with the file's tensors.
        local_penalty: the method's own, besides `model.local_penalty`.
    """

    stateful: bool = False
    label_rows: bool = False
    depths: bool = False
    surplus_rows: bool = True
    hold_out: float = 0.0
    moments: tuple[Moment, ...] = ("aggregated",)
    tests_both: bool = False
    no_server_step: str = ""
    no_personal: str | None = None
    no_policy: str = ""
    takes_late: bool = False
    parts: Sequence[float] = ()
    timing: Callable[[Any], Any] | None = None
    carries: bool = False
    no_kept_optimizer: str = ""
    no_memory: str = ""
    holds: str = ""
    deployed_with: str = ""
    local_penalty: LocalPenalty | None = None

    @abstractmethod
    def setup(self, fed: Any) -> None:
        """Create the server state; reject a federation that the algorithm cannot train."""

    @abstractmethod
    def round(self, fed: Any, t: int) -> None:
        """One round, t = 0, 1, ..."""

    def personal(self, module: L.LightningModule) -> set[str]:
        """Names of the tensors that stay with their client: no message has them."""
        return set()

    def environment(self, fed: Any) -> dict[str, Any]:
        """Entries about the algorithm for the run's environment.json, besides its name."""
        return {}

    def lr_factors(self, module: L.LightningModule) -> Mapping[str, float]:
        """Learning rates of a client's parts, relative to the configured one, by name prefix."""
        return {}

    def evaluation_start(self, fed: Any) -> None:
        """Called before an evaluation, on every rank."""

    def evaluation_end(self, fed: Any) -> Mapping[str, Mapping[str, Tensor]]:
        """Called after an evaluation, on every rank.

        Returns arrays for the run folder, by file and name.
        """
        return {}

    def models(self, fed: Any, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        """The models to test, export, fine-tune or predict with; None if there are none.

        By default the global model is the server's `model`, if it is a whole one. Clients hold the
        rows that they keep (`stateful`), or their parts of that model.

        Args:
            fed: `fed.rows` and `fed.server_rows` make the result; nothing is read or copied yet.
            kind: "global": the server's models, whose metrics are averaged; "local": the server's
                model for each client's data, if clients hold another; "aggregated" or "trained":
                the client's own after the last aggregation, or as its last session left it. In a
                session `fed.rows` gives the model that is in it.
            clients: of one group, perhaps on other ranks; none for "global".
        """
        if kind == "trained" or (kind == "aggregated" and self.stateful):
            return fed.rows(clients)
        model = getattr(self, "model", None)
        if kind == "local" or not isinstance(model, ServerModel) or model.part:
            return None
        return fed.server_rows(model, clients)

    def reset_client(self, fed: Any, client: int) -> None:
        """Reset a stateful client of this rank, whose row is not finite, to its initial values."""
        fed.row(client).copy_(fed.state(client).initial)


class SessionFleet(Protocol):
    """The part of the federation that sessions use; `lightfed.api.fleet.Fleet` implements it."""

    algorithm: Hooks
    hooks: Sequence[SessionHooks]
    personal: frozenset[str]
    clients: int
    stateful: bool
    groups: list[GroupState]
    data: FederatedDataModule
    device: torch.device
    kept: KeptStates
    optimizers: Kept | None
    attributes: Kept | None
    updates: np.ndarray
    ranks: Ranks
    seed: int
    work: LocalWork
    plan: RoundPlan

    def mine(self, clients: Sequence[int]) -> list[int]: ...
    def row(self, client: int) -> Row: ...
    def state(self, client: int) -> GroupState: ...
    def group_of(self, client: int) -> int: ...
    def home_group(self, client: int) -> int: ...
    def pack_of(self, client: int) -> int: ...
    def stored_bytes(self, client: int) -> int: ...
    def in_session(self, session: SessionContext) -> Any: ...
