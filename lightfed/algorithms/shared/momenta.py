"""Momentum that outlives a client's session."""

from typing import Literal

from torch import Tensor

from lightfed.api.fleet import Fleet
from lightfed.local.hooks import SessionContext
from lightfed.local.optimizer import Proximal

Momentum = Literal["device", "shared", "session"]


class Momenta:
    """What a session's momentum begins with.

    Args:
        fed: the clients.
        kind: what the client's last session ended with (device), what the last session of any
            client ended with, in their order and on one rank (shared), or nothing (session).
        key: of the kind in a configuration.

    Raises:
        UserError: a shared one on several ranks.
    """

    def __init__(self, fed: Fleet, kind: Momentum, *, key: str) -> None:
        if kind == "shared":
            fix = "set trainer.devices: 1, or momentum: device"
            fed.one_after_the_other(key, "shared, by devices in turn", fix)
        self.kind = kind
        self.kept = fed.keep("momentum")  # of all clients, or of the one that has it

    def pull(self, s: SessionContext, anchor: Tensor, weight: float) -> Proximal:
        """A session's pull, with the momentum that it begins with."""
        begin = self.kept.get(s.client)
        if self.kind == "shared" and self.kept:
            begin = self.kept[[*self.kept][-1]]  # of the last session
        return Proximal(anchor, weight, self.kind != "session", begin)

    def keep(self, client: int, momentum: Tensor | None) -> None:
        """Keep what a session ended with."""
        if self.kind == "shared":
            self.kept.clear()
            if momentum is not None and not momentum.isfinite().all():
                return  # the other clients' sessions would end so, too
        if momentum is not None:
            self.kept[client] = momentum
