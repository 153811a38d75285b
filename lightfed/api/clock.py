"""Virtual time as a Fleet sees it. Without devices no time passes, and nothing is late."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from lightfed.api.places import participants


class Clock:
    """The clock of a fleet whose clients have no devices: a round takes no time.

    A clock of devices derives from it, as `lightfed.devices.device_clock.DeviceClock` does.

    Args:
        sampled: Number of clients in a round.
        clients: Number of clients of the fleet.
        seed: Seed of the run.
        seen: The clients that can take part, ascending; all by default.

    Attributes:
        now: Virtual seconds from the start of the run to the end of the last round.
        arrived: For each kept update that arrives in this round, by client, how many rounds it is
            late.
        begun: For the same updates, the rounds of their sessions, by client.
        late: The clients of this round whose updates come too late to count in it.
        keeps_late: Whether a late update is merged in the round in which it arrives.
        drops_late: Whether a session may come to nothing because it takes too long.
        loses_partial: Whether the work of a client that leaves during its session is lost.
        delays_steps: Whether every step takes longer than its computation.
    """

    now: float = 0.0
    keeps_late: bool = False
    drops_late: bool = False
    loses_partial: bool = False
    delays_steps: bool = False

    def __init__(
        self, sampled: int, clients: int, seed: int, seen: Sequence[int] | None = None
    ) -> None:
        self.sampled = sampled
        self.clients = clients
        self.seed = seed
        self.seen: Sequence[int] = range(clients) if seen is None else seen
        self.arrived: dict[int, int] = {}
        self.begun: dict[int, int] = {}
        self.late: set[int] = set()

    @property
    def under_way(self) -> list[int]:
        """Clients whose updates are kept until they arrive, ascending."""
        return []

    def open(self) -> None:
        """Begin a round."""

    def participants(self, t: int) -> list[int]:
        """Return the clients of round t, drawn without replacement, ascending."""
        return participants(self.sampled, self.seen, seed=self.seed, t=t)

    def leaving(self, clients: Sequence[int], t: int) -> dict[int, float]:
        """Return the share of its session that each client completes which leaves during it."""
        return {}

    def step_seconds(
        self, clients: Sequence[int], flops: Sequence[float], t: int | None = None
    ) -> np.ndarray:
        """Return the virtual seconds that a step of each client takes, (C,).

        Args:
            clients: Numbers of the clients.
            flops: Of a step of each client, (C,).
            t: The round whose delays to add; None for no delays.
        """
        return np.zeros(len(clients))

    def meet(self, senders: Mapping[int, Sequence[int]]) -> None:
        """Let each client wait for the clients that it receives from."""

    def trained(self, steps: Mapping[int, int], t: int) -> None:
        """Record the number of steps of each session of round t, by client."""

    def close(self, silent: Collection[int], usable: Mapping[int, bool]) -> None:
        """End the server's wait, at the first merge of a round.

        Args:
            silent: Clients that have left without sending anything.
            usable: Whether each client's update can count in any round.
        """

    def close_round(self, silent: Collection[int], usable: Mapping[int, bool]) -> dict[str, float]:
        """End a round and return its metrics; the arguments are those of `close`."""
        return {}

    def discount(self, client: int) -> float:
        """Return the factor of a client's weight in a mean: below 1 if its update comes late."""
        return 1.0

    def times(self) -> np.ndarray | None:
        """Return the virtual seconds that each client has worked and idled since the start.

        Returns:
            An array of shape (N, 2); None if no time passes.
        """
        return None

    def joules(self) -> np.ndarray | None:
        """Return the joules that each client's device has spent since the start.

        Returns:
            An array of shape (N,); None if devices spend nothing.
        """
        return None

    def state_dict(self) -> dict[str, Any] | None:
        """Return what survives a round, for a checkpoint; None for nothing."""
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` returned."""
