"""Models fitted to devices: the largest that a client can train in time, or in its memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from typing_extensions import override

from lightfed.simulation.delays import Distribution, Size
from lightfed.simulation.devices import Devices, seconds
from lightfed.utils.errors import require
from lightfed.utils.recorded import named

KEY = "model.assign"


@dataclass(frozen=True)
class OfDevices(Distribution):
    """The numbers of devices that have been drawn or read already."""

    values: np.ndarray
    """(N,)"""

    @override
    def draw(self, rng: np.random.Generator, size: Size) -> np.ndarray:
        return self.values.copy()


@named
@dataclass(frozen=True)
class FastestFit:
    """Each client gets the first of the models whose session its device can do.

    A session is that of the mean number of samples: the model comes, is trained and goes. The
    groups are in order, the largest model first. Their counts only add up to the number of clients,
    which are numbered group by group; within a group in the order of the devices.

    Attributes:
        deadline: Virtual seconds that a session may take.
        memory: What a session holds must fit into the memory of the device.
    """

    deadline: float | None = None
    memory: bool = False

    def check(self, devices: Devices | None) -> None:
        """Reject a rule without effect."""
        none = self.deadline is None and not self.memory
        require(not none, KEY, "no limit", "give a deadline, or memory: true")
        fits, found = self.deadline is None or self.deadline > 0, self.deadline
        require(fits, f"{KEY}.deadline", found, "give seconds above 0")
        require(devices is not None, KEY, "given, and no devices to fit to", "give model.devices")

    def choose(
        self,
        values: dict[str, np.ndarray],
        work: np.ndarray,
        memory: Sequence[float],
        names: Sequence[str],
    ) -> np.ndarray:
        """(N,) the number of each client's model.

        Args:
            values: (N,) each, of the devices.
            work: (M, 3) bytes up, bytes down and FLOPs of a session with each model.
            memory: (M,) bytes that a session holds.
            names: of the models.

        Raises:
            UserError: a device can train none of them; says what the last one needs.
        """
        clients = len(values["flops"])
        took = np.stack([seconds(values, np.tile(each, (clients, 1))) for each in work])
        fits = np.ones_like(took, dtype=bool)
        if self.deadline is not None:
            fits &= took <= self.deadline
        if self.memory:
            fits &= np.array(memory)[:, None] <= values["memory"]
        without = np.flatnonzero(~fits.any(axis=0))
        if len(without):
            least = took[-1][without].max() if self.deadline is not None else 0.0
            needs = f"{least:.4g} virtual seconds" if least else f"{memory[-1]:.4g} bytes"
            found = f"{len(without)} clients can train none; {names[-1]} needs {needs}"
            key = f"{KEY}.{'memory' if self.deadline is None else 'deadline'}"
            require(False, key, found, "give more, or a smaller model as the last one")
        return fits.argmax(axis=0)


def in_order(devices: Devices, values: dict[str, np.ndarray], chosen: np.ndarray) -> Devices:
    """The devices with clients numbered by the models that they got."""
    order = np.argsort(chosen, kind="stable")
    given: dict[str, Any] = {name: OfDevices(own[order]) for name, own in values.items()}
    return replace(devices, table=None, **given)
