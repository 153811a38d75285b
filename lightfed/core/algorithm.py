"""What an algorithm file fills in."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import lightning.pytorch as L
from torch import Tensor, nn

from lightfed.core.store import ModelLayout, Row

if TYPE_CHECKING:
    from lightfed.core.fleet import Fleet


class ServerModel(nn.Module):
    """A model that the server holds: a row, replicated on every rank, checkpointed as buffers."""

    floats: Tensor
    integers: Tensor

    def __init__(self, layout: ModelLayout, row: Row) -> None:
        super().__init__()
        self.layout = layout
        self.register_buffer("floats", row.floats)
        self.register_buffer("integers", row.integers)

    @property
    def row(self) -> Row:
        """(P,) parameters and float buffers, (Q,) integer buffers."""
        return Row(self.floats, self.integers)


class Algorithm(nn.Module, ABC):
    """A federated algorithm: its `round` reads as the paper's pseudo-code.

    The server state is what the algorithm registers: `ServerModel`s and buffers. It is the same on
    every rank, and with the clients' rows of a `stateful` algorithm and the counters it is the
    whole checkpoint. An algorithm never names a rank, a device or a collective.

    Attributes:
        stateful: clients keep their rows from round to round.
        label_rows: a client's row covers only the class-label rows of the labels it holds
            (HeteroFL).
        surplus_rows: rows of such tensors beyond the classes, as a mask token's, are everybody's.
    """

    stateful: bool = False
    label_rows: bool = False
    surplus_rows: bool = True

    @abstractmethod
    def setup(self, fed: "Fleet") -> None:
        """Create the server state; refuse a federation that the algorithm cannot train."""

    @abstractmethod
    def round(self, fed: "Fleet", t: int) -> None:
        """One round, t = 0, 1, ..."""

    def prepare_module(self, module: L.LightningModule) -> None:
        """Change a freshly built client module, before its layout is taken."""

    def session_start(self, fed: "Fleet", client: int, module: L.LightningModule) -> None:
        """Before a client's session, its row bound to `module`."""

    def local_gradient(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """Change the gradients of a batch in place; called only if overridden."""

    def evaluation_start(self, fed: "Fleet") -> None:
        """Before an evaluation, on every rank."""

    def evaluated(self, fed: "Fleet", client: int | None) -> L.LightningModule | None:
        """The module, bound to the values, that is tested for a client (None: as the global model).

        None where the algorithm has no such model: no global model without a server.
        """
        return None

    @abstractmethod
    def client_row(self, fed: "Fleet", client: int) -> tuple[ModelLayout, Row]:
        """The weights that a client would deploy, for export.

        A stateful client lies on this rank.
        """
