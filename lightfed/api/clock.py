"""Virtual time as a Fleet sees it. Without devices no time passes, and nothing is late."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from lightfed.api.places import participants


class Clock:
    """The clock of a fleet whose clients have no devices: a round takes no time.

    A clock of devices derives from it, as `lightfed.devices.device_clock.DeviceClock` does.

    Args:
        sampled: Number of clients of a round.
        clients: Number of clients of the fleet.
        seed: Of the run.

    Attributes:
        now: Virtual seconds since the start; the end of the last round.
        arrived: For kept updates that arrive in this round, the rounds they come late, by client.
        late: The clients of this round whose updates do not count in it.
        keeps_late: Whether a late update is merged in the round in which it arrives.
        drops_late: Whether a session may come to nothing because it takes too long.
        loses_partial: Whether the work of a client that leaves during its session is lost.
    """

    now: float = 0.0
    keeps_late: bool = False
    drops_late: bool = False
    loses_partial: bool = False

    def __init__(self, sampled: int, clients: int, seed: int) -> None:
        self.sampled = sampled
        self.clients = clients
        self.seed = seed
        self.arrived: dict[int, int] = {}
        self.late: set[int] = set()

    @property
    def under_way(self) -> list[int]:
        """Clients whose updates are kept until they arrive, ascending."""
        return []

    def open(self) -> None:
        """Begin a round."""

    def participants(self, t: int) -> list[int]:
        """S_t: the clients of round t, drawn without replacement, ascending."""
        return participants(self.sampled, self.clients, seed=self.seed, t=t)

    def leaving(self, clients: Sequence[int], t: int) -> dict[int, float]:
        """The clients that leave during their session of round t, and the share of it they do."""
        return {}

    def meet(self, senders: Mapping[int, Sequence[int]]) -> None:
        """Let clients wait for those that they receive from, by client."""

    def trained(self, steps: Mapping[int, int], t: int) -> None:
        """Note the steps of the sessions of round t, by client."""

    def close(self, silent: Collection[int], usable: Mapping[int, bool]) -> None:
        """End the server's wait, at the first merge of a round.

        Args:
            silent: Clients that have left without a message.
            usable: By client, whether its update can count in any round.
        """

    def close_round(self, silent: Collection[int], usable: Mapping[int, bool]) -> dict[str, float]:
        """End a round and return its metrics; the arguments are those of `close`."""
        return {}

    def discount(self, client: int) -> float:
        """The factor of a client's weight in a mean, below 1 if its update comes late."""
        return 1.0

    def times(self) -> np.ndarray | None:
        """(N, 2) virtual seconds of each client since the start: at work, and idle.

        None if no time passes.
        """
        return None

    def state_dict(self) -> dict[str, Any] | None:
        """What survives a round."""
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` returned."""
