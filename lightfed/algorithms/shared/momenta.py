"""Momentum that outlives a client's session."""

from typing import Literal

from torch import Tensor

from lightfed.api.fleet import Fleet
from lightfed.local.hooks import SessionContext
from lightfed.local.optimizer import Proximal

Momentum = Literal["device", "shared", "session"]


class Momenta:
    """The initial momentum of sessions.

    Args:
        fed: the clients.
        kind: the final momentum of the client's last session (device); that of the last session of
            any client, in order and on one rank (shared); or 0 (session).
        key: configuration key of the kind.

    Raises:
        UserError: a shared one on several ranks.
    """

    def __init__(self, fed: Fleet, kind: Momentum, *, key: str) -> None:
        if kind == "shared":
            fix = "set trainer.devices: 1, or momentum: device"
            fed.one_after_the_other(key, "shared, by devices in turn", fix)
        self.kind = kind
        self.kept = fed.keep("momentum")  # of all clients, or of the last one

    def pull(self, s: SessionContext, anchor: Tensor, weight: float) -> Proximal:
        """A session's pull, with its initial momentum."""
        begin = self.kept.get(s.client)
        if self.kind == "shared" and self.kept:
            begin = self.kept[[*self.kept][-1]]  # of the last session
        return Proximal(anchor, weight, self.kind != "session", begin)

    def keep(self, client: int, momentum: Tensor | None) -> None:
        """Keep a session's final momentum."""
        if self.kind == "shared":
            self.kept.clear()
            if momentum is not None and not momentum.isfinite().all():
                return  # the other clients' sessions would end the same way
        if momentum is not None:
            self.kept[client] = momentum
