"""Virtual time: when the servers of a cloud would finish with real devices.

Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global and Personalized Models",
AAAI 2021, arXiv:2012.13900, the two protocols of its figure 2. A server responds to its devices
until the slowest active one is done. The coordinator waits for the first B of N servers. The sync
protocol waits for all: B = N. In the async one, B < N, the first B start again and the others
continue across rounds. Communication and aggregation take no time.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from lightfed.utils.errors import require


class VirtualClock(nn.Module):
    """The event queue of a coordinator that waits for B of N servers; state of an algorithm.

    A round reads `first = clock.advance([... for n in clock.idle])`.
    """

    seconds: Tensor  # () float64
    finish: Tensor  # (N,) float64, finish time of each server
    free: Tensor  # (N,) bool

    def __init__(self, servers: int, wait: int) -> None:
        super().__init__()
        assert 1 <= wait <= servers
        self.wait = wait
        self.register_buffer("seconds", torch.zeros((), dtype=torch.float64))
        self.register_buffer("finish", torch.zeros(servers, dtype=torch.float64))
        self.register_buffer("free", torch.ones(servers, dtype=torch.bool))

    @property
    def now(self) -> float:
        """Virtual seconds since the start of the first round."""
        return float(self.seconds)

    @property
    def idle(self) -> list[int]:
        """Servers that start with the next round, ascending; the others are still busy."""
        return self.free.nonzero().flatten().tolist()

    def advance(self, delays: Sequence[float] | np.ndarray) -> list[int]:
        """One round: start the idle servers and advance time until B servers are done.

        `delays` (I,) are virtual seconds of the I idle servers, in the order of `idle`. Returns the
        first B servers to finish, ascending; ties go to the lower number. They are now idle.
        """
        busy = torch.as_tensor(np.asarray(delays, dtype=np.float64)).to(self.finish.device)
        assert len(busy) == int(self.free.sum())
        assert bool(((busy >= 0) & (busy < np.inf)).all())
        self.finish[self.free] = self.seconds + busy
        first = torch.argsort(self.finish, stable=True)[: self.wait]
        self.seconds.copy_(self.finish[first[-1]])
        self.free.fill_(False)
        self.free[first] = True
        return self.idle


def check_waits(key: str, waits: Sequence[int], servers: int) -> None:
    """Reject waiting for fewer than one or more than all servers; a UserError names the key."""
    for wait in waits:
        found = f"wait for {wait} of {servers} {'server' if servers == 1 else 'servers'}"
        require(1 <= wait <= servers, key, found, f"give at least 1 and at most {servers}")
