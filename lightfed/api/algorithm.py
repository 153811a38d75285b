"""What an algorithm file fills in."""

from abc import abstractmethod

from lightfed.api.fleet import Fleet
from lightfed.local.hooks import Hooks


class Algorithm(Hooks):
    """A federated algorithm: its `round` reads as the paper's pseudo-code.

    The server state is what the algorithm registers: `ServerModel`s and buffers. It is the same on
    every rank, and with the clients' rows of a `stateful` algorithm and the counters it is the
    whole checkpoint. An algorithm never names a rank, a device or a collective.

    What it declares, and the hooks it may override, are those of `lightfed.local.hooks.Hooks`.
    """

    @abstractmethod
    def setup(self, fed: Fleet) -> None:
        """Create the server state; refuse a federation that the algorithm cannot train."""

    @abstractmethod
    def round(self, fed: Fleet, t: int) -> None:
        """One round, t = 0, 1, ..."""
