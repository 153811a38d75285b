"""Two levels, servers and their devices: which devices are active, and for how long they train.

A device is a client. Virtual time is that of `lightfed.devices`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightfed.data.datamodule import FederatedDataModule
from lightfed.devices.delays import Delay
from lightfed.local.local_work import LocalWork
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator

Activation = Literal["uniform", "first"]
Unit = Literal["step", "epoch"]

_KEY = "model.algorithm.init_args"


@dataclass(frozen=True)
class Phase:
    """A server's response phase: from the round in which it starts to the one that waits for it.

    Attributes:
        active: Devices that communicate with the server, ascending.
        available: Devices that train, including the active ones, ascending.
        units: K by device: the steps or epochs of its session.
        delays: Virtual seconds by active device, besides what it computes and sends.
    """

    active: list[int]
    available: list[int]
    units: dict[int, int]
    delays: dict[int, float]


@dataclass(frozen=True)
class Hierarchy:
    """Servers 0 .. N-1, each with D devices; server n has the devices n D .. (n + 1) D - 1.

    Attributes:
        servers: N.
        active: Number of devices per server that communicate with it in a phase.
        available: Number of devices per server that train in a phase, including the active ones.
        steps: Bounds of K, which is uniform between them.
        unit: What K counts.
        delay: Delay of a device's session; none by default.
        step_delay: Delay of each of its K units; none by default.
        activation: Whether the active devices are drawn, or are those whose delays end first, as in
            the released code.
    """

    servers: int
    active: int
    available: int
    steps: tuple[int, int]
    unit: Unit
    delay: Delay | None = None
    step_delay: Delay | None = None
    activation: Activation = "uniform"

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise UserError(f"{_KEY}.servers", str(self.servers), "give at least 1")
        if self.active < 1:
            raise UserError(f"{_KEY}.active", str(self.active), "give at least 1")
        if self.available < self.active:
            raise UserError(
                f"{_KEY}.available",
                f"{self.available}, with {self.active} active",
                "give at least as many",
            )

        low, high = self.steps
        if not 1 <= low <= high:
            raise UserError(f"{_KEY}.steps", str([low, high]), "give 1 <= low <= high")

    def check(self, clients: int, work: LocalWork) -> None:
        """Refuse settings that do not fit the clients, and settings of the work without effect.

        Raises:
            UserError: It names the setting.
        """
        _check_work(work)

        devices, rest = divmod(clients, self.servers)
        if rest != 0:
            raise UserError(
                f"{_KEY}.servers",
                f"{self.servers} servers for {clients} clients",
                "give a divisor of the number of clients",
            )

        for name, count in (("active", self.active), ("available", self.available)):
            if count > devices:
                raise UserError(
                    f"{_KEY}.{name}",
                    f"{count} of the {devices} devices of a server",
                    f"give at most {devices}",
                )

    def devices(self, server: int, clients: int) -> range:
        """Return the devices of a server."""
        count = clients // self.servers
        return range(server * count, (server + 1) * count)

    def server_of(self, client: int, clients: int) -> int:
        """Return the server of a device."""
        return client * self.servers // clients

    def messages(self, first: Sequence[int]) -> int:
        """Return the number of models that servers exchange with a coordinator in a round.

        Each of the servers that it waits for, `first`, sends one up and receives one. A single
        server needs no coordinator.
        """
        return 2 * len(first) if self.servers > 1 else 0

    def batches(self, units: dict[int, int], data: FederatedDataModule, t: int) -> dict[int, int]:
        """Return the lengths of sessions of round t in batches, by device, from their K."""
        if self.unit == "step":
            return units
        return {device: k * data.num_batches(device, t) for device, k in units.items()}

    def phase(self, server: int, t: int, *, clients: int, seed: int) -> Phase:
        """Return the phase that a server starts in round t.

        Draws are named by (seed, purpose, t). A device has the draw at its number, so that it does
        not depend on which other servers start a phase.
        """
        devices = self.devices(server, clients)
        delays = np.zeros(clients)
        if self.delay is not None:
            delays = self.delay.draw(numpy_generator(seed, "delay", t), clients)

        if self.activation == "first" and self.delay is not None:
            order = np.argsort(delays[devices], kind="stable")  # ties go to the lower number
        else:
            order = numpy_generator(seed, "active", t, server).permutation(len(devices))
        active = sorted(devices[position] for position in order[: self.active])
        available = sorted(devices[position] for position in order[: self.available])

        low, high = self.steps
        units = {}
        for device in available:
            rng = numpy_generator(seed, "steps", t, device)
            units[device] = int(rng.integers(low, high + 1))

        if self.step_delay is not None:
            rng = numpy_generator(seed, "step-delay", t)
            step_delays = self.step_delay.draw(rng, clients)
            delays[available] += step_delays[available] * list(units.values())

        return Phase(active, available, units, {device: float(delays[device]) for device in active})


def _check_work(work: LocalWork) -> None:
    """Refuse settings of a session's length and of participation that the hierarchy overrides."""
    says_how_many = f"leave it out: {_KEY}.active says how many devices of a server train"
    says_how_long = f"leave it out: {_KEY}.steps says how long their sessions are"
    if work.fraction != 1.0:
        raise UserError("model.fraction", "given", says_how_many)
    if work.clients_per_round is not None:
        raise UserError("model.clients_per_round", "given", says_how_many)
    if work.epochs != 1:
        raise UserError("model.local_epochs", "given", says_how_long)
    if work.steps is not None:
        raise UserError("model.local_steps", "given", says_how_long)
    if work.seconds is not None:
        raise UserError("model.local_seconds", "given", says_how_long)
