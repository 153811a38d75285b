"""What a session works on, and how much: the data module for the fleet, local epochs and steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightfed.local.client_group import DataSpec
from lightfed.utils.counts import rounded_down
from lightfed.utils.errors import UserError


class ClientData(DataSpec, Protocol):
    """What the fleet asks of a data module."""

    @property
    def augments(self) -> bool: ...
    @property
    def class_names(self) -> tuple[str, ...]: ...
    def reserve(self, hold_out: float) -> None: ...
    def num_samples(self, client: int) -> int: ...
    def num_held_out(self, client: int) -> int: ...
    def held_out_batches(self, client: int) -> Iterator[Any]: ...
    def client_batches(self, client: int, batch_size: int) -> Iterator[Any]: ...
    def labels(self, client: int) -> Tensor: ...
    def num_batches(self, client: int, t: int = 0) -> int: ...
    def train_epoch(
        self,
        client: int,
        *,
        order: torch.Generator,
        augment: torch.Generator | None,
        limit: int | None,
        t: int,
    ) -> Iterator[Any]: ...
    def test_batches(self, client: int) -> Iterator[Any]: ...
    def train_batches(self, batch_size: int) -> int: ...
    def train_batch(self, index: int, batch_size: int) -> Any: ...


@dataclass(frozen=True)
class LocalWork:
    """How much a session trains, and how its clients are drawn.

    Attributes:
        fraction: of the clients that take part in a round (ceil), unless `clients_per_round` is
            set.
        clients_per_round: how many take part.
        epochs: local epochs of a session.
        steps: local steps instead of epochs.
        limit: at most so many batches a session (int), or such a share of them (float).
    """

    fraction: float = 1.0
    clients_per_round: int | None = None
    epochs: int = 1
    steps: int | None = None
    limit: int | float | None = None

    def check(self, clients: int) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: naming the key.
        """
        count = self.clients_per_round
        if not 0 < self.fraction <= 1:
            fix = "give the share of clients in a round"
            raise UserError("model.fraction", f"{self.fraction} is outside (0, 1]", fix)
        if count is not None and not 1 <= count <= clients:
            fix = "give a number from 1 to that"
            raise UserError("model.clients_per_round", f"{count} of {clients} clients", fix)
        if count is not None and self.fraction != 1.0:
            found = f"{count}, and fraction {self.fraction} too"
            raise UserError("model.clients_per_round", found, "give one of the two")
        if self.epochs < 1:
            raise UserError("model.local_epochs", str(self.epochs), "give at least 1")
        if self.steps is not None and self.steps < 1:
            raise UserError("model.local_steps", str(self.steps), "give at least 1")

    def batches(self, per_epoch: int) -> int:
        """Batches of a session whose client has `per_epoch` of them in an epoch."""
        return self.limited(self.steps if self.steps is not None else self.epochs * per_epoch)

    def limited(self, total: int) -> int:
        """So many batches of a session, or as many as the limit leaves."""
        if isinstance(self.limit, float):
            return max(1, rounded_down(total * self.limit))
        return total if self.limit is None else min(total, self.limit)
