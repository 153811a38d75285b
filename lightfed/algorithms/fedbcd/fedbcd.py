"""FedBCD: block coordinate descent over devices' personal models and clouds' global ones.

Wu, Scaglione, Wai, Karakoc, Hreinsson, Ma: Federated Block Coordinate Descent Scheme for Learning
Global and Personalized Models. AAAI 2021. https://arxiv.org/abs/2012.13900. The
problem, and the steps by its equations::

    min  sum_n sum_{i in Q_n}  g_i(x_i) + gamma_i / 2 ||x_i - z_n||^2,   z_n = z_m              (2)

    devices:        K ASPG steps on x_i (`lightfed.algorithms.fedbcd.aspg`)                     (4)
    sync servers:   z <- z - eta_z sum_n sum_i gamma_i (z - x_i)                                (5)
    async servers:  w_n = sum_m a_nm z_m                                                       (6a)
                    z_n <- w_n - eta_z sum_i gamma_i (w_n - x_i),  for the first B to finish   (6b)

Devices keep personal models x_i and step on their own block of (2). Servers keep z_n and step
towards the devices' models. With `mixing`, servers do decentralized gradient descent over a graph
of their own. A device that is not active keeps its model, and its server has a copy of it.

Choices where the paper is silent:

- eta_z = .5 with a hundred devices diverges in eq. (5) as written. So the step is divided by the
  sum of gamma by default (`server_step`).
- BatchNorm statistics are averaged, and neither pulled nor projected.
- A device's momentum, zeta (x^K - x^{K-1}) or SGD's buffer, is carried to its next session.

`compatibility` follows the released code: twice the pull, and a server rate that decays by 1e-4 per
round. Its other differences are settings: SGD with momentum and weight decay instead of ASPG,
activation by the first to wake up, and, in its notebooks with a single optimizer, momentum that
passes from device to device in order (`momentum: shared`). In its multi-process version every
device has its own momentum, as here.

For every server that is waited for, one model goes up to the coordinator and one comes back:
sum_i gamma_i x_i and z in (5), z_n and w_n in (6). The released code sends all devices' models up
in (5). With `mixing` one model is sent along every edge of the graph.

A phase is trained when it starts. Its server's model does not change until it ends, so only tests
of personal models can notice this. A device whose update is not finite is reset, and is left out of
the step of a server that starts and ends its phase in that round.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.fedbcd.clouds import CloudModels, Hierarchical, relay, show
from lightfed.algorithms.fedbcd.hierarchy import Phase
from lightfed.algorithms.topology.matrices import count_edges, read_mixing
from lightfed.api.algorithm import KEY
from lightfed.api.fleet import Fleet
from lightfed.devices.event_clock import VirtualClock, check_waits
from lightfed.devices.timing import clock_of
from lightfed.local.hooks import SessionContext
from lightfed.local.optimizer import Proximal
from lightfed.state.rows import ModelKind, Moment, Rows
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Count, Positive, Weight
from lightfed.utils.errors import UserError

# The factor of the released code's server rate per round.
DECAY = 1 - 1e-4


class FedBCD(Hierarchical):
    """Personal models at the devices, global ones at the servers, sync or async."""

    stateful = True
    no_server_step = "FedBCD mixes the models of clouds"
    side_by_side = True
    # Servers step towards the devices; these keep their models.
    moments: tuple[Moment, ...] = ("aggregated", "trained")
    holds = "the device's own model, x_i"
    queue: Tensor  # (servers, active) the devices of each server's phase

    def __init__(
        self,
        servers: Count = 10,
        active: Count = 3,
        wait: Count | None = None,
        gamma: Weight | list[Weight] = 1.0,
        server_lr: Positive = 0.5,
        server_step: Literal["mean", "sum"] = "mean",
        mixing: list[list[float]] | str | None = None,
        momentum: Literal["device", "shared", "session"] = "device",
        compatibility: bool = False,
        **hierarchy: Any,
    ) -> None:
        """Set the clouds and their steps.

        Args:
            servers: N; the clients are split among them equally, in order, as devices.
            active: |Q_n|, number of devices per server that communicate with it in a phase.
            wait: B, number of servers that the coordinator waits for; fewer than all is the async
                protocol. All by default: the sync one.
            gamma: Weight of the pull between a device and its server; with a list, device i has
                entry i mod length. A device with 0 trains alone and sends nothing; if all do, there
                is no global model.
            server_lr: eta_z.
            server_step: A server's step divided by the sum of gamma (mean), or not (sum: (5), (6)).
            mixing: (N, N) doubly stochastic weights of the servers' models, eq. (6a), as a list of
                rows or a .npy or .csv file; then all servers take part in every round.
            momentum: Where a session's momentum starts: from the device's last session (device);
                from the last session of any device, in order and on one rank (shared), as in the
                released notebooks; or from 0 (session).
            compatibility: Twice the pull, and eta_z decays by a factor of 1 - 1e-4 per round, as in
                the released code.
            **hierarchy: See Hierarchical.
        """
        super().__init__(servers, active, **hierarchy)
        self.wait = servers if wait is None else wait
        check_waits(f"{KEY}.wait", [self.wait], servers)

        self.gammas = [gamma] if isinstance(gamma, int | float) else list(gamma)
        if not self.gammas:
            raise UserError(
                f"{KEY}.gamma",
                "an empty list",
                "give one number for all devices, or a list of them",
            )

        self.server_lr = server_lr
        self.server_step = server_step
        self.mixing = None
        if mixing is not None:
            self.mixing = read_mixing(mixing, servers, key=f"{KEY}.mixing", wait=self.wait)

        self.momentum = momentum
        self.carries = momentum != "session"
        # With "shared" momentum a session starts from the one before: none can run beside another.
        self.side_by_side = momentum != "shared"
        self.compatibility = compatibility

        # No state of the algorithm: the phases that start in this round, by server, and memory for
        # a mean of models.
        self._phases: dict[int, Phase] = {}
        self._scratch: list[ServerModel] = []

    @property
    def _servers_share_z(self) -> bool:
        """Whether all servers have one model, as in the sync protocol without a graph."""
        return self.wait == self.hierarchy.servers and self.mixing is None

    @override
    def setup(self, fed: Fleet) -> None:
        fed.one_layout(f"{type(self).__name__} needs one for all")
        self.set_up_clouds(fed)
        self._check_step(fed)

        servers = self.hierarchy.servers
        self.clouds = CloudModels(fed, 1 if self._servers_share_z else servers)
        self._scratch = [fed.new_model()]
        self.register_buffer("queue", torch.full((servers, self.hierarchy.active), -1))
        self.clock = VirtualClock(servers, self.wait)

        if self.momentum == "shared" and fed.ranks.world > 1:
            raise UserError(
                f"{KEY}.momentum",
                f"shared, by devices in turn, on {fed.ranks.world} ranks",
                "set trainer.devices: 1, or momentum: device",
            )

    def _check_step(self, fed: Fleet) -> None:
        """Refuse a step along sum_i gamma_i (w - x_i) that diverges.

        With the devices' models fixed, the step multiplies the distance of w from their mean by
        1 - eta_z sum_i gamma_i, whose magnitude has to be below 1. If every server has a model of
        its own, the bound is tighter: a step must not pass the mean.
        """
        sum_of_gamma = 1.0
        if self.server_step == "sum":
            sums = [self._largest_sum_of_gamma(fed, n) for n in range(self.hierarchy.servers)]
            sum_of_gamma = sum(sums) if self._servers_share_z else max(sums)

        step = self.server_lr * sum_of_gamma
        if self.server_step == "sum" and not self._servers_share_z:
            fits = step <= 1
            bound = "at most 1"
        else:
            fits = step < 2
            bound = "less than 2"
        if not fits:
            raise UserError(
                f"{KEY}.server_lr",
                f"{self.server_lr:g}, times the sum of gamma, {sum_of_gamma:g}, is {step:g}",
                f"it must be {bound}; or server_step: mean",
            )

    def _largest_sum_of_gamma(self, fed: Fleet, server: int) -> float:
        """Return the largest sum of gamma_i that a step of a server can have."""
        devices = self.hierarchy.devices(server, fed.clients)
        gammas = sorted((self.gamma(device) for device in devices), reverse=True)
        return sum(gammas[: self._devices_in_a_step(fed)])

    def _devices_in_a_step(self, fed: Fleet) -> int:
        """Return the number of devices in a server's step: all, with their last models."""
        return fed.clients // self.hierarchy.servers

    def gamma(self, client: int) -> float:
        """Return gamma_i."""
        return float(self.gammas[client % len(self.gammas)])

    @override
    def sends(self, client: int) -> bool:
        return self.gamma(client) > 0

    @override
    def round(self, fed: Fleet, t: int) -> None:
        starting = self.clock.idle
        for n in starting:
            phase = self.phase(fed, n, t)
            self._phases[n] = phase
            self.queue[n] = torch.tensor(phase.active)
            show(fed, self.clouds.of(n), self._pulled(phase.active))  # z_n

        self._train_devices(fed, t)  # eq. (4)
        durations = self.busy(fed, [self._phases[n] for n in starting], t)
        first = self.clock.advance(durations)  # V(t), the first B servers
        relay(fed, self.clouds.of(0), self._messages(first))
        self._step_servers(fed, first, t)  # eq. (5), or (6)

        self._phases = {}
        clock_of(fed).advance_to(self.clock.now)

    def _pulled(self, devices: Sequence[int]) -> list[int]:
        """Return the devices that communicate with their server; the others train alone."""
        return [device for device in devices if self.sends(device)]

    def _train_devices(self, fed: Fleet, t: int) -> None:
        """Run the sessions of the devices whose servers start a phase (eq. 4)."""
        units: dict[int, int] = {}  # K_i by device
        for phase in self._phases.values():
            units |= phase.units
        fed.train(sorted(units), t, steps=self.hierarchy.batches(units, fed.data, t))

    def _messages(self, first: list[int]) -> int:
        """Return the number of models sent between servers, or to a coordinator and back."""
        if not any(self.gammas):
            return 0
        if self.mixing is not None:
            return count_edges(self.mixing)
        return self.hierarchy.messages(first)

    def _step_servers(self, fed: Fleet, first: list[int], t: int) -> None:
        """Update z_n of the servers that were waited for (eq. 5 or 6)."""
        rate = self.server_lr
        if self.compatibility:
            rate *= DECAY**t

        steps = []
        if self._servers_share_z:
            every_server = list(range(self.hierarchy.servers))
            steps.append(self._step(fed, every_server, self.clouds.of(0), rate))  # (5)
        else:
            # All means before any step: a server's w_n is made of the others' z_m of this round.
            mixed = self.clouds.mixed(first, self.mixing)  # (6a)
            for server, w in zip(first, mixed, strict=True):
                self.clouds.of(server).floats.copy_(w)
                steps.append(self._step(fed, [server], self.clouds.of(server), rate))  # (6b)

        if any(self.gammas):
            self._report(fed, first, steps)

    def _report(self, fed: Fleet, first: list[int], steps: list[Tensor]) -> None:
        """Report two measures that theorem 1 bounds, and which servers were waited for, V(t)."""
        # || sum_n sum_i gamma_i (w_n - x_i) ||^2, over the devices of a server's step
        gradient = torch.stack(steps).sum(0).double()
        fed.report("server_gradient", float(gradient.square().sum()))

        if not self._servers_share_z:
            parameters = steps[0].numel()  # statistics are no parameters
            z = self.clouds.stacked()[:, :parameters]
            distances = (z.mean(0) - z).norm(dim=1)  # || z - z_n ||
            fed.report("consensus", float(distances.max()))
            for n in range(len(z)):
                fed.metrics[f"mixed/{n}"] = float(n in first)

    def _step(self, fed: Fleet, servers: list[int], model: ServerModel, rate: float) -> Tensor:
        """Set z <- w - eta_z sum_i gamma_i (w - x_i), with or without division by sum_i gamma_i.

        Args:
            fed: The federation.
            servers: The servers whose devices are in the step.
            model: Holds w before the step, and z afterwards.
            rate: eta_z.

        Returns:
            sum_i gamma_i (w - x_i), (P,).
        """
        devices, sent = self._stored(fed, servers)
        gammas = {device: self.gamma(device) for device in self._pulled(devices)}
        mean = self._scratch[0]
        w = model.parameters_row
        mean.row.copy_(model.row)
        merged = fed.merge(list(gammas), into=mean, weights=gammas, sent=sent)

        # Devices whose models are not finite are left out.
        sum_of_gamma = sum(gammas[device] for device in merged)
        difference = w - mean.parameters_row
        w.sub_(difference, alpha=rate * (sum_of_gamma if self.server_step == "sum" else 1.0))

        # Statistics are averaged.
        model.floats[len(w) :].copy_(mean.floats[len(w) :])
        model.integers.copy_(mean.integers)
        return difference * sum_of_gamma

    def _stored(self, fed: Fleet, servers: list[int]) -> tuple[list[int], list[int]]:
        """Return the devices in a step of some servers, and those among them that have just sent.

        A server knows the last models of all its devices.
        """
        devices: list[int] = []
        active: list[int] = []
        for n in servers:
            devices.extend(self.hierarchy.devices(n, fed.clients))
            active.extend(self.queue[n].tolist())
        return devices, self._pulled(active)

    def penalty(self, client: int) -> float:
        """Return the weight of a device's pull in its gradient."""
        return self.gamma(client) * (2 if self.compatibility else 1)

    @override
    def proximal(self, s: SessionContext) -> Proximal | None:
        model = self.clouds.of(self.hierarchy.server_of(s.client, s.fed.clients))
        return Proximal(model.parameters_row, self.penalty(s.client))

    @override
    def session_start(self, s: SessionContext) -> None:
        if self.momentum != "shared" or not s.fed.optimizers:
            return

        # The momentum of the last session, whichever device had it. One that is not finite would
        # spoil all later sessions.
        *_, state = s.fed.optimizers.values()
        s.fed.optimizers.clear()
        if state.isfinite().all():
            s.fed.optimizers[s.client] = state

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        if kind not in ("global", "local"):
            return fed.rows(clients)  # x_i
        if not any(self.gammas):
            return None

        servers = [self.hierarchy.server_of(client, fed.clients) for client in clients]
        if not servers:  # the global test set: all models
            servers = list(range(len(self.clouds)))
        return fed.server_rows([self.clouds.of(n) for n in servers], clients)  # z_n
