"""The hooks that an author overrides, and the context of a session that is passed to them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Self

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor, nn

from lightfed.data.datamodule import FederatedDataModule
from lightfed.distributed.collectives import Ranks
from lightfed.local.group_state import GroupState
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
        fed: The `lightfed.api.fleet.Fleet`.
        client: Number of the client.
        round: The round t; -1 for a session that only serves an evaluation.
        group: The client's group in this round.
        row: Values of the client, on the device. The module is bound to them.
        received: The parameters at the start of the session, after `session_start`, of shape (P,).
            Empty unless a hook is overridden that needs them: `local_gradient`, `proximal` or
            `session_end`.
        lr: Learning rate of the round; None if the optimizer uses its own.
        step: Number of finished batches.
        proximal: The pull of the session towards another model; None for none.
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
        """The parameters: a view of the leading part of the row, of shape (P,), without buffers."""
        layout = self.group.layout
        return self.row.floats[: layout.parameter_size]


class SessionHooks:
    """The hooks that are called within clients' sessions. By default they do nothing.

    Attributes:
        side_by_side: Whether sessions can run in packs. A class that overrides one of these hooks
            has to declare it. If it is True, the hooks must read and write the row and not the
            parameters of the module, must keep nothing about a client in Python attributes, and
            must draw from generators that they name. They may be called again after a pack has
            failed.
    """

    side_by_side: bool | None = None

    def overrides(self, name: str) -> bool:
        """Whether the class, or this object, overrides a hook."""
        class_overrides = getattr(type(self), name) is not getattr(SessionHooks, name)
        return class_overrides or name in vars(self)

    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        """Modify a newly built client module, before its layout is determined.

        Draws from torch's default generator are the same for all groups.
        """

    def pack_key(self, fed: Any, client: int, t: int) -> Hashable:
        """Return what a client must have in common with the others of its pack.

        Clients train side by side only if this is equal for all of them. So it can be kept in an
        attribute of the module during their sessions.

        Args:
            fed: The federation.
            client: A client of this rank, whose session has not begun.
            t: The round.
        """
        return None

    def session_start(self, s: SessionContext) -> None:
        """Called before a client's session, with its module bound to its row."""

    def session_end(self, s: SessionContext) -> None:
        """Called after a client's session, on its trained row, if overridden."""

    def proximal(self, s: SessionContext) -> Proximal | None:
        """Return the model that a session is pulled towards; None for no pull."""
        return None

    def decay_after_clipping(self, s: SessionContext) -> float:
        """Return the weight of a decay in this session.

        The weight times the parameters is added to the gradient after clipping, as the weight decay
        of an optimizer is.
        """
        return 0.0

    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        """Change the gradient of a batch in place, before it is clipped.

        Args:
            s: The session. The gradient was taken at `s.parameters`.
            gradient: The gradient in the order of the row, of shape (P,); 0 for parameters that the
                loss does not use.
        """


class LocalPenalty(SessionHooks, Recorded):
    """A term that is added to the clients' loss, under any method.

    `fed` is the `lightfed.api.fleet.Fleet`. The session hooks of a penalty are called after those
    of the algorithm.

    Attributes:
        stateful: Whether clients keep something from round to round, by `fed.keep`.
    """

    stateful: bool = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments by their annotated bounds, before the constructor runs."""
        check_arguments(cls, args, kwargs, "model.local_penalty.init_args")
        return super().__new__(cls, *args, **kwargs)

    def setup(self, fed: Any) -> None:
        """Declare what clients keep, and refuse a federation that the penalty does not fit."""

    def trained(self, fed: Any, clients: Sequence[int], t: int) -> None:
        """Called on all ranks after sessions.

        Args:
            fed: The federation.
            clients: The clients whose sessions gave a finite update.
            t: The round.
        """

    def counted(self, fed: Any, clients: Sequence[int], t: int) -> None:
        """Called on all ranks, once for each session that the server uses.

        A policy may drop sessions that come too late. This is then called at the end of a round,
        without them. If the server remembers something about a session, too, change what the client
        remembers here, so that both change together.
        """


@dataclass(frozen=True)
class Newcomers:
    """What a method has for clients of one group that it has never met.

    Attributes:
        served: The server's model, as such a client gets it. None if the server has no whole model,
            because clients keep parts to themselves.
        start: The models that the clients' own training starts from.
        trained: Names of the parameters that the method leaves with its clients, which are all that
            their own training changes. Empty if clients have nothing of their own.
    """

    served: Rows | None
    start: Rows
    trained: Sequence[str] = ()


class Hooks(SessionHooks, Recorded, nn.Module, ABC):
    """The declarations and hooks of an algorithm. All but `setup` and `round` have a default.

    `fed` is the `lightfed.api.fleet.Fleet`, which this package cannot import.

    Attributes:
        stateful: Whether clients keep their rows from round to round.
        label_rows: Whether a client contributes only the rows of the output layer that belong to
            labels it has (HeteroFL's masked merge).
        depths: Whether a client may lack layers of a server model. Its row then covers the tensors
            that it has (DepthFL).
        surplus_rows: Whether all clients contribute the rows of such tensors beyond the classes,
            such as that of a mask token.
        hold_out: Share of every client's training samples that no session trains on.
        moments: The moments of which `models` has the clients' models between rounds. A model of
            another moment is tested in its session. The first is the default of
            `model.evaluate_at`.
        tests_both: Whether every evaluation tests clients at both moments, as the paper reports.
        no_server_step: Why no optimizer can step for the server; empty if one can.
        no_personal: Why clients cannot keep some tensors to themselves (`model.personal`); empty if
            they can. None: they can, unless the class is `stateful`.
        no_policy: Why the server cannot merge before all clients have sent; empty if it can.
        no_unseen: Why some clients cannot be left out of all rounds and then get a model
            (`data.unseen`); empty if they can.
        takes_late: Whether an update that arrives in a later round fits into the mean of that
            round. A class has to declare it for itself.
        no_late: Why it does not fit, also where the class says `takes_late`; empty if it does, or
            if the class says nothing.
        parts: Shares of the model that clients hold: client i holds entry i mod length. With
            `model.assign`, each holds the largest that its device can train.
        timing: Makes the clock of a fleet whose clients have devices, a
            `lightfed.devices.timing.Timing`, unless `model.devices` names devices. None: rounds
            take no time.
        carries: Whether clients keep the state of their optimizer in any case (`fed.optimizers`).
        no_kept_optimizer: Why clients cannot keep that state (`model.keep_optimizer`); empty if
            they can.
        no_memory: Why clients cannot remember models or parts of an update from session to session,
            as `LinearTerm` and `Contrast` do; empty if they can.
        holds: What a client holds, in a few words for the page of a run; by default that of the
            model that `models` gives by default.
        deployed_with: What a reader of an exported file has to do besides loading it, where the
            method tests models that differ from the user's network with the tensors of the file.
        local_penalty: A penalty that is part of the method. `model.local_penalty` can add another.
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
    no_unseen: str = ""
    takes_late: bool = False
    no_late: str = ""
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
        """Create the server state, and refuse a federation that the algorithm cannot train."""

    @abstractmethod
    def round(self, fed: Any, t: int) -> None:
        """Run round t = 0, 1, ..."""

    def personal(self, module: L.LightningModule) -> set[str]:
        """Return the names of the tensors that stay with their client: no message has them."""
        return set()

    def environment(self, fed: Any) -> dict[str, Any]:
        """Return what the run's environment.json says about the algorithm, besides its name."""
        return {}

    def lr_factors(self, module: L.LightningModule) -> Mapping[str, float]:
        """Return learning rates relative to the configured one, by prefix of parameters' names."""
        return {}

    def evaluation_start(self, fed: Any) -> None:
        """Called before an evaluation that tests a model, on every rank."""

    def evaluation_end(self, fed: Any) -> Mapping[str, Mapping[str, Tensor]]:
        """Called after an evaluation that tests a model, on every rank.

        Returns:
            Arrays to write to the run folder, by file and name.
        """
        return {}

    def models(self, fed: Any, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        """Return the models to test, export, fine-tune or predict with.

        By default the global model is the server's `model`, if it is a whole one. Clients hold the
        rows that they keep (`stateful`), or else their parts of that model.

        Args:
            fed: Makes the result, by `fed.rows` and `fed.server_rows`; nothing is read or copied
                yet. In a test within a session, `fed.rows` gives the model in that session.
            kind: Which models. "global": the server's, whose metrics are averaged. "local": the
                server's for each client's data, if clients hold another model. "aggregated" or
                "trained": the client's own after the last aggregation, or as its last session left
                it.
            clients: Clients of one group, perhaps on other ranks; none for "global".

        Returns:
            The models; None if there are none of this kind.
        """
        if kind == "trained" or (kind == "aggregated" and self.stateful):
            return fed.rows(clients)

        model = getattr(self, "model", None)
        is_whole = isinstance(model, ServerModel) and not model.part
        if kind == "local" or not is_whole:
            return None
        return fed.server_rows(model, clients)

    def model_to_write(self, fed: Any, model: ServerModel) -> Rows | None:
        """Return a server's model, which is not tested alone, as a module holds it, for its file.

        A method overrides this if the server holds other values than a module, such as factors of
        adapters that are multiplied by their scale.

        Args:
            fed: Makes the result, as in `models`.
            model: The server's model.

        Returns:
            One row, whose personal tensors are not written; by default None: the server's row.
        """
        return None

    def newcomers(self, fed: Any, clients: Sequence[int]) -> Newcomers | None:
        """Return what the method has for clients that never take part (`data.unseen`).

        They get the server's `model`. By default the parameters which it lacks, and personal ones,
        are the clients' own: they start from their initial values. If the server has all of the
        model, and clients keep models of their own nevertheless, their own training starts from the
        server's and changes all of it.

        Args:
            fed: Makes the models, as in `models`.
            clients: Clients of one group, perhaps on other ranks.

        Returns:
            None if the method has nothing for such clients.
        """
        model = getattr(self, "model", None)
        if not isinstance(model, ServerModel):
            return None

        group = fed.home_group(clients[0])
        layout = fed.groups[group].layout
        names = [entry.name for entry in layout.floats][: layout.parameters]
        of_server = set(model.aliases[group].values()) if model.part else set(names)
        own = [name for name in names if name not in of_server or name in fed.personal]
        if own:
            return Newcomers(None, fed.rows(clients, given=model), own)
        if fed.personal:
            return None  # statistics alone: a client that never trains has none

        keeps_models = self.stateful and type(self).models is Hooks.models
        if keeps_models:
            served = fed.server_rows(model, clients)
            return Newcomers(served, served, names)
        served = self.models(fed, "aggregated", clients)
        return None if served is None else Newcomers(served, served)

    def with_parts(self, parts: Sequence[float]) -> Self:
        """Return a copy whose clients hold these parts; for an algorithm before its `setup`."""
        algorithm = deepcopy(self)
        algorithm.parts = parts
        return algorithm

    def reset_client(self, fed: Any, client: int) -> None:
        """Reset a client of this rank, whose row is not finite, to its initial values."""
        fed.row(client).copy_(fed.state(client).initial)


class SessionFleet(Protocol):
    """The part of a federation that sessions use. `lightfed.api.fleet.Fleet` implements it.

    It is a protocol because a fleet lies above sessions, which cannot import it.
    """

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
