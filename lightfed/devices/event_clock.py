"""Virtual time of a cloud: when its servers would finish with real devices.

Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global and Personalized Models",
AAAI 2021, arXiv:2012.13900, the two protocols of its figure 2. A server works with its devices
until the slowest active one is done. The coordinator waits for the first B of N servers. In the
synchronous protocol it waits for all: B = N. In the asynchronous one, B < N, the first B servers
start again, and the others go on working across rounds. Communication and aggregation take no time.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from lightfed.utils.errors import UserError


class VirtualClock(nn.Module):
    """The event queue of a coordinator that waits for B of N servers.

    It is a module with buffers, so that an algorithm that holds it has it in its checkpoints. A
    round calls `first = clock.advance([delay(n) for n in clock.idle])`.

    Args:
        servers: N.
        wait: B.

    Attributes:
        seconds: Virtual seconds since the start of the first round, () float64.
        finish: When each server is done, (N,) float64.
        free: Which servers start with the next round, (N,) bool.
    """

    seconds: Tensor
    finish: Tensor
    free: Tensor

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
        """Do one round: start the idle servers, and advance time until B servers are done.

        Args:
            delays: Virtual seconds of the I idle servers, (I,) in the order of `idle`.

        Returns:
            The first B servers to finish, ascending; ties go to the lower number. They are idle.
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
    """Refuse to wait for fewer than one server or more than all.

    Raises:
        UserError: It names the key.
    """
    for wait in waits:
        if not 1 <= wait <= servers:
            noun = "server" if servers == 1 else "servers"
            raise UserError(
                key,
                f"wait for {wait} of {servers} {noun}",
                f"give at least 1 and at most {servers}",
            )
