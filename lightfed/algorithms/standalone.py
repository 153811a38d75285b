"""Standalone: every client trains alone on its own data.

The floor that federated learning has to beat.

No exchange, so clients keep their rows from round to round; the optimiser is fresh in every round,
as in the federated methods it is compared with. All clients of a cohort start from the same values.
"""

import lightning.pytorch as L
from typing_extensions import override

from lightfed.core.algorithm import Algorithm
from lightfed.core.fleet import Fleet
from lightfed.core.store import ModelLayout, Row


class Standalone(Algorithm):
    """w_k <- E local epochs of SGD on D_k, from w_k."""

    stateful = True

    @override
    def setup(self, fed: Fleet) -> None:
        pass

    @override
    def round(self, fed: Fleet, t: int) -> None:
        fed.train(fed.participants(t), t)

    @override
    def evaluated(self, fed: Fleet, client: int | None) -> L.LightningModule | None:
        return None if client is None else fed.bind(client)

    @override
    def client_row(self, fed: Fleet, client: int) -> tuple[ModelLayout, Row]:
        return fed.state(client).layout, fed.row(client)
