"""What a federation asks of its algorithm."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as L
from torch import Tensor, nn

from lightfed.local.client_group import DataSpec
from lightfed.local.optimizer import Proximal
from lightfed.state.rows import ModelLayout, Row

# When a client is tested: with what the last aggregation gave it, or as its last session left it.
Moment = Literal["aggregated", "trained"]


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

    def session_start(self, fed: Any, client: int, module: L.LightningModule, row: Row) -> None:
        """Before a client's session, its row (on the device) bound to `module`."""

    def session_end(self, fed: Any, client: int, row: Row) -> None:
        """After a client's session, on its trained row; called only if overridden."""

    def session_result(self, fed: Any, client: int) -> dict[str, Tensor]:
        """What a session has left that its round still reads, beside the client's row.

        A round that goes on after a restart does not run it again. Of a client of this rank.
        """
        return {}

    def load_session_result(self, fed: Any, client: int, result: dict[str, Tensor]) -> None:
        """The inverse of `session_result`; in place of session_start and session_end."""

    def facts(self, fed: Any) -> dict[str, Any]:
        """What the run's environment.json says of the algorithm beside its name."""
        return {}

    def lr_factors(self, module: L.LightningModule) -> Mapping[str, float]:
        """Learning rates of parts of a client, relative to the configured one, by their prefix."""
        return {}

    def proximal(self, fed: Any, client: int) -> Proximal | None:
        """What a session of a client of this rank is pulled to."""
        return None

    def trained_mask(self, fed: Any, client: int) -> Tensor | None:
        """(P / 32,) packed: what a client of this rank trains; the rest of its row stays 0."""
        return None

    def local_gradient(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """Change the gradients of a batch in place; called only if overridden."""

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

    def tested(self, fed: Any, client: int, cohort: int, row: Row) -> L.LightningModule:
        """The module that tests a row that a session of the client has trained, or will.

        Args:
            fed: the clients.
            client: on this rank.
            cohort: whose layout the row has.
            row: on the device.
        """
        module = fed.cohorts[cohort].live.bind(row)
        assert isinstance(module, L.LightningModule)
        return module

    def client_row(self, fed: Any, client: int) -> tuple[ModelLayout, Row]:
        """The weights that a client would deploy, for export: by default the row that it keeps.

        A stateful client lies on this rank.
        """
        assert self.stateful, "a client that keeps nothing deploys what its algorithm says"
        return fed.state(client).layout, fed.row(client)

    def client_state(self, fed: Any, client: int) -> dict[str, Tensor]:
        """What a stateful client of this rank keeps from round to round, for checkpoints."""
        row = fed.row(client)
        return {"floats": row.floats, "integers": row.integers}

    def load_client_state(self, fed: Any, client: int, state: dict[str, Tensor]) -> None:
        """The inverse of `client_state`."""
        fed.row(client).copy_(Row(state["floats"], state["integers"]))

    def stored_bytes(self, fed: Any, client: int) -> int:
        """Bytes that a client of this rank keeps; a stateless one keeps nothing."""
        if not self.stateful:
            return 0
        layout = fed.state(client).layout
        return 4 * layout.floats.numel + 8 * layout.integers.numel

    def start_anew(self, fed: Any, client: int) -> None:
        """A stateful client of this rank whose row is not finite: back to its initial values."""
        fed.row(client).copy_(fed.state(client).initial)
