"""Clients that keep something from round to round, but hold the server's model."""

from collections.abc import Sequence

from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.state.rows import ModelKind, Rows
from lightfed.state.server_model import ServerModel


class OneModel(Algorithm):
    """Base of methods with one model for all, the server's.

    Clients keep something else, such as control variates. So they are stateful, but a client's row
    is only what its last session has left, and is not its model.
    """

    stateful = True
    no_personal = ""
    holds = "the server's model"
    model: ServerModel

    @override
    def setup(self, fed: Fleet) -> None:
        fed.one_layout(f"{type(self).__name__} needs one for all")
        self.model = fed.new_model()

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        if kind == "aggregated":
            return fed.server_rows(self.model, clients)
        return super().models(fed, kind, clients)
