"""Virtual time: when the servers of a cloud would have been done, had their devices been real.

Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global and Personalized Models",
AAAI 2021, arXiv:2012.13900, the two protocols of its figure 2. A server responds to its devices
until the slowest active one is done. The coordinator waits for the first B of N servers: for all of
them in the sync protocol, B = N. In the async one, B < N, the others go on across rounds, and
whoever was waited for starts anew. Communication and aggregation take no time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lightfed.simulation.delays import Delay
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator


class VirtualClock:
    """The event queue of the coordinator.

    A round reads `first = clock.advance([... for n in clock.idle])`.

    Args:
        servers: N.
        wait: B, in 1 .. N; `check_waits` tells a user so.

    Attributes:
        now: virtual seconds since the first round began.
    """

    def __init__(self, servers: int, wait: int) -> None:
        assert 1 <= wait <= servers
        self.wait = wait
        self.now = 0.0
        self._finish = np.zeros(servers)
        self._idle = np.ones(servers, dtype=bool)

    @property
    def idle(self) -> list[int]:
        """Servers that start with the next round, ascending; the others are still busy."""
        return np.flatnonzero(self._idle).tolist()

    def advance(self, delays: Sequence[float] | np.ndarray) -> list[int]:
        """One round: the idle servers start, and time goes on until B servers are done.

        Args:
            delays: (I,) virtual seconds that each of the I idle servers will be busy, in the order
                of `idle`.

        Returns:
            The B servers that are done first, ascending; of those done at one time the ones with
            lower numbers. They are the idle ones now.
        """
        busy = np.asarray(delays, dtype=np.float64)
        assert busy.shape == (self._idle.sum(),)
        assert ((busy >= 0) & (busy < np.inf)).all()
        self._finish[self._idle] = self.now + busy
        first = np.argsort(self._finish, kind="stable")[: self.wait]
        self.now = float(self._finish[first[-1]])
        self._idle[:] = False
        self._idle[first] = True
        return self.idle

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: now, and of each server when it is done and whether it is idle."""
        finish, idle = torch.from_numpy(self._finish.copy()), torch.from_numpy(self._idle.copy())
        return {"now": self.now, "finish": finish, "idle": idle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises:
            UserError: it is of another number of servers.
        """
        if len(state["finish"]) != len(self._finish):
            found = f"a clock of {len(state['finish'])} servers, this run has {len(self._finish)}"
            raise UserError("ckpt_path", found, "go on with the configuration of that run")
        self.now = float(state["now"])
        self._finish = state["finish"].double().numpy().copy()
        self._idle = state["idle"].bool().numpy().copy()


def check_waits(key: str, waits: Sequence[int], servers: int) -> None:
    """Refuse to wait for fewer than one or for more servers than there are.

    Raises:
        UserError: naming the key.
    """
    for wait in waits:
        if not 1 <= wait <= servers:
            found = f"wait for {wait} of {servers} {'server' if servers == 1 else 'servers'}"
            raise UserError(key, found, f"give at least 1 and at most {servers}")


def device_delays(
    delay: Delay, devices: Sequence[int], *, seed: int, t: int, purpose: str = "delay"
) -> np.ndarray:
    """(D,) virtual seconds, one draw a device, each named by (seed, purpose, t, device).

    Args:
        delay: the distribution.
        devices: numbers of clients; what one draws does not depend on the others.
        seed: of the run.
        t: the round in which their server starts.
        purpose: another name for another quantity, as the time until a device wakes up.
    """
    return np.array(
        [delay.draw(numpy_generator(seed, purpose, t, device), 1)[0] for device in devices]
    )


def first_awake(wakes: np.ndarray, count: int) -> np.ndarray:
    """(count,) ascending places of the devices that ask for an update first; ties to the lower.

    The activation of the paper's second experiment, in its released code: all devices of a server
    draw when they wake up, the first are active and start then.

    Args:
        wakes: (D,) virtual seconds.
        count: of active devices, at most D.
    """
    assert 0 <= count <= len(wakes)
    return np.sort(np.argsort(wakes, kind="stable")[:count])
