"""Two levels: cloud servers and their devices (clients); which are active, and for how long."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightfed.data.datamodule import FederatedDataModule
from lightfed.devices.delays import Delay
from lightfed.local.local_work import LocalWork
from lightfed.utils.errors import require
from lightfed.utils.rng import numpy_generator

Activation = Literal["uniform", "first"]
Unit = Literal["step", "epoch"]

_KEY = "model.algorithm.init_args"


@dataclass(frozen=True)
class Phase:
    """A server's response phase: from its first round to the round that waits for it.

    Attributes:
        active: devices that communicate with the server, ascending.
        available: devices that train, including the active ones; ascending.
        units: device -> K, steps or epochs of its session.
        delays: active device -> virtual seconds, besides what it computes and sends.
    """

    active: list[int]
    available: list[int]
    units: dict[int, int]
    delays: dict[int, float]


@dataclass(frozen=True)
class Hierarchy:
    """Servers 0 .. N-1; server n has the devices n D .. (n + 1) D - 1.

    Attributes:
        servers: N.
        active: number of devices per server that communicate with it in a phase.
        available: number of devices that train, including the active ones.
        steps: bounds of K, which is uniform between them.
        unit: what K counts.
        delay: of a device; none by default.
        step_delay: of each of its K units; none by default.
        activation: random devices, or those whose delays end first, as in the released code.
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
        require(self.servers >= 1, f"{_KEY}.servers", self.servers, "give at least 1")
        require(self.active >= 1, f"{_KEY}.active", self.active, "give at least 1")
        found, fits = f"{self.available}, with {self.active} active", self.available >= self.active
        require(fits, f"{_KEY}.available", found, "give at least as many")
        low, high = self.steps
        require(1 <= low <= high, f"{_KEY}.steps", [low, high], "give 1 <= low <= high")

    def check(self, clients: int, work: LocalWork) -> None:
        """Reject settings that do not fit, and settings of the work that have no effect."""
        self._check_work(work)
        devices, rest = divmod(clients, self.servers)
        found = f"{self.servers} servers for {clients} clients"
        require(rest == 0, f"{_KEY}.servers", found, "give a divisor of the number of clients")
        for name, count in (("active", self.active), ("available", self.available)):
            found = f"{count} of the {devices} devices of a server"
            require(count <= devices, f"{_KEY}.{name}", found, f"give at most {devices}")

    def _check_work(self, work: LocalWork) -> None:
        many, long = "says how many devices of a server train", "says how long their sessions are"
        for name, given, argument, what in (
            ("fraction", work.fraction != 1.0, "active", many),
            ("clients_per_round", work.clients_per_round is not None, "active", many),
            ("local_epochs", work.epochs != 1, "steps", long),
            ("local_steps", work.steps is not None, "steps", long),
        ):
            fix = f"leave it out: {_KEY}.{argument} {what}"
            require(not given, f"model.{name}", "given", fix)

    def devices(self, server: int, clients: int) -> range:
        """The devices of a server."""
        each = clients // self.servers
        return range(server * each, (server + 1) * each)

    def server_of(self, client: int, clients: int) -> int:
        return client * self.servers // clients

    def messages(self, first: Sequence[int]) -> int:
        """Models between a coordinator, if there are servers, and those it waits for: up, down."""
        return 2 * len(first) if self.servers > 1 else 0

    def batches(self, units: dict[int, int], data: FederatedDataModule, t: int) -> dict[int, int]:
        """Lengths of sessions of round t in batches, by device."""
        if self.unit == "step":
            return units
        return {i: k * data.num_batches(i, t) for i, k in units.items()}

    def phase(self, server: int, t: int, *, clients: int, seed: int) -> Phase:
        """The phase that a server starts in round t.

        Draws are named by (seed, purpose, t); a device has that of its number.
        """
        devices, delays = self.devices(server, clients), np.zeros(clients)
        if self.delay is not None:
            delays = self.delay.draw(numpy_generator(seed, "delay", t), clients)
        if self.activation == "first" and self.delay is not None:
            order = np.argsort(delays[devices], kind="stable")  # ties go to the lower number
        else:
            order = numpy_generator(seed, "active", t, server).permutation(len(devices))
        active = sorted(devices[i] for i in order[: self.active])
        available = sorted(devices[i] for i in order[: self.available])
        low, high = self.steps
        units = {
            i: int(numpy_generator(seed, "steps", t, i).integers(low, high + 1)) for i in available
        }
        if self.step_delay is not None:
            each = self.step_delay.draw(numpy_generator(seed, "step-delay", t), clients)
            delays[available] += each[available] * [*units.values()]
        return Phase(active, available, units, {i: float(delays[i]) for i in active})
