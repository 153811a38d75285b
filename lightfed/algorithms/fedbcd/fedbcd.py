"""FedBCD: block coordinate descent over devices' personal models and clouds' global ones.

Wu, Scaglione, Wai, Karakoc, Hreinsson, Ma: Federated Block Coordinate Descent Scheme for Learning
Global and Personalized Models. AAAI 2021. https://arxiv.org/abs/2012.13900

    min  sum_n sum_{i in Q_n}  g_i(x_i) + gamma_i / 2 ||x_i - z_n||^2,   z_n = z_m              (2)

Devices keep personal models x_i and take ASPG steps (`lightfed.algorithms.fedbcd.aspg`; eq. 4) on
their own block of (2). Servers keep z_n and step towards the devices' models: all together (sync,
eq. 5), or the first B to finish (async, eq. 6). With `mixing`, servers do decentralised gradient
descent over their own graph. A device that is not active keeps its model, and its server a copy.

Choices where the paper is silent: eta_z = .5 with a hundred devices diverges in eq. (5) as written,
so the step is divided by the sum of gamma by default (`server_step`). BatchNorm statistics are
averaged, neither pulled nor projected. A device's momentum, zeta (x^K - x^{K-1}) or SGD's buffer,
is carried to its next session. `compatibility` follows the released code: twice the pull, and a
server rate that decays by 1e-4 per round. Its other differences are settings: SGD with momentum and
weight decay instead of ASPG, activation by the first to wake up, and, in its notebooks with a
single optimiser, momentum that passes from device to device in order (`momentum: shared`). In its
multi-process version every device has its own momentum, as here.

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
from lightfed.api.algorithm import KEY, require_argument
from lightfed.api.fleet import Fleet
from lightfed.devices.event_clock import VirtualClock, check_waits
from lightfed.devices.timing import clock_of
from lightfed.local.hooks import SessionContext
from lightfed.local.optimizer import Proximal
from lightfed.state.rows import ModelKind, Moment, Rows
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Count, Positive, Weight

DECAY = 1 - 1e-4  # of the released code's server rate, per round


class FedBCD(Hierarchical):
    """Personal models at the devices, global ones at the servers, sync or async."""

    stateful = True
    no_server_step = "FedBCD mixes the models of clouds"
    side_by_side = True
    # Servers step towards the devices; these keep their models.
    moments: tuple[Moment, ...] = ("aggregated", "trained")
    holds = "the device's own model, x_i"
    queue: Tensor

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
        fix = "give one number for all devices, or a list of them"
        require_argument(bool(self.gammas), "gamma", "an empty list", fix)
        self.server_lr, self.server_step = server_lr, server_step
        self.mixing = None
        if mixing is not None:
            self.mixing = read_mixing(mixing, servers, key=f"{KEY}.mixing", wait=self.wait)
        self.momentum, self.carries = momentum, momentum != "session"
        self.side_by_side = momentum != "shared"  # then a session starts from the one before
        self.compatibility = compatibility
        self._phases: dict[int, Phase] = {}  # by server, phases that start in this round
        self._scratch: list[ServerModel] = []  # not state

    @property
    def _global(self) -> bool:
        """Whether all servers have one model: sync clouds."""
        return self.wait == self.hierarchy.servers and self.mixing is None

    @override
    def setup(self, fed: Fleet) -> None:
        fed.one_layout(f"{type(self).__name__} needs one for all")
        self.set_up_clouds(fed)
        self._check_step(fed)
        servers = self.hierarchy.servers
        self.clouds = CloudModels(fed, 1 if self._global else servers)
        self._scratch = [fed.new_model()]
        self.register_buffer("queue", torch.full((servers, self.hierarchy.active), -1))
        self.clock = VirtualClock(servers, self.wait)
        found = f"shared, by devices in turn, on {fed.ranks.world} ranks"
        fits, fix = fed.ranks.world == 1, "set trainer.devices: 1, or momentum: device"
        require_argument(fits or self.momentum != "shared", "momentum", found, fix)

    def _check_step(self, fed: Fleet) -> None:
        """Reject a step along sum_i gamma_i (w - x_i) that diverges."""
        total = 1.0  # of gamma, by which the step is divided
        if self.server_step == "sum":
            clouds = [self.hierarchy.devices(n, fed.clients) for n in range(self.hierarchy.servers)]
            gammas = [sorted(map(self.gamma, cloud), reverse=True) for cloud in clouds]
            sums = [sum(cloud[: self._stepped(fed)]) for cloud in gammas]
            total = sum(sums) if self._global else max(sums)
        step = self.server_lr * total
        found = f"{self.server_lr:g}, times the sum of gamma, {total:g}, is {step:g}"
        alone = self.server_step == "sum" and not self._global
        fits = step <= 1 if alone else step < 2
        fix = f"it must be {'at most 1' if alone else 'less than 2'}; or server_step: mean"
        require_argument(fits, "server_lr", found, fix)

    def _stepped(self, fed: Fleet) -> int:
        """Number of devices in a server's step: all, with their last models."""
        return fed.clients // self.hierarchy.servers

    def gamma(self, client: int) -> float:
        """gamma_i."""
        return float(self.gammas[client % len(self.gammas)])

    @override
    def sends(self, client: int) -> bool:
        return self.gamma(client) > 0

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clock = self.clock
        for server in clock.idle:
            self._phases[server] = phase = self.phase(fed, server, t)
            self.queue[server] = torch.tensor(phase.active)
            show(fed, self.clouds.of(server), self._pulled(phase.active))  # z_n
        self._devices(fed, t)  # eq. (4)
        first = clock.advance(self.busy(fed, [self._phases[n] for n in clock.idle], t))  # V
        relay(fed, self.clouds.of(0), self._messages(first))
        self._servers(fed, first, t)  # eq. (5), or (6)
        self._phases = {}
        clock_of(fed).advance_to(clock.now)

    def _pulled(self, devices: Sequence[int]) -> list[int]:
        """The devices that communicate with their server; the others train alone."""
        return [i for i in devices if self.sends(i)]

    def _devices(self, fed: Fleet, t: int) -> None:
        """Sessions of the devices whose servers start a phase."""
        units = {i: k for phase in self._phases.values() for i, k in phase.units.items()}
        fed.train(sorted(units), t, steps=self.hierarchy.batches(units, fed.data, t))

    def _messages(self, first: list[int]) -> int:
        """Count models sent between the servers, or to a coordinator and back."""
        if not any(self.gammas):
            return 0
        if self.mixing is not None:
            return count_edges(self.mixing)
        return self.hierarchy.messages(first)

    def _servers(self, fed: Fleet, first: list[int], t: int) -> None:
        """Update z_n of the servers that were waited for."""
        rate = self.server_lr * (DECAY**t if self.compatibility else 1.0)
        if self._global:
            steps = [self._step(fed, list(range(self.hierarchy.servers)), self.clouds.of(0), rate)]
        else:
            mixed, steps = self.clouds.mixed(first, self.mixing), []  # all models before any steps
            for server, w in zip(first, mixed, strict=True):
                self.clouds.of(server).floats.copy_(w)
                steps.append(self._step(fed, [server], self.clouds.of(server), rate))
        if any(self.gammas):
            self._measure(fed, first, steps)

    def _measure(self, fed: Fleet, first: list[int], steps: list[Tensor]) -> None:
        """Two measures that theorem 1 bounds, of this round's servers; and who these are, V(t)."""
        # || sum_n sum_i gamma_i (w_n - x_i) ||^2, over the devices of a server's step
        gradient = torch.stack(steps).sum(0).double()
        fed.report("server_gradient", float(gradient.square().sum()))
        if not self._global:
            z = self.clouds.stacked()[:, : steps[0].numel()]  # without statistics
            fed.report("consensus", float((z.mean(0) - z).norm(dim=1).max()))  # max_n ||z - z_n||
            fed.metrics |= {f"mixed/{n}": float(n in first) for n in range(len(z))}

    def _step(self, fed: Fleet, servers: list[int], model: ServerModel, rate: float) -> Tensor:
        """Set z <- w - eta_z sum_i gamma_i (w - x_i), with or without division by sum_i gamma_i.

        `model` holds w before and z afterwards. Returns (P,) sum_i gamma_i (w - x_i).
        """
        devices, sent = self._stored(fed, servers)
        mean, w = self._scratch[0], model.parameters_row
        mean.row.copy_(model.row)
        gammas = {i: self.gamma(i) for i in self._pulled(devices)}
        merged = fed.merge(list(gammas), into=mean, weights=gammas, sent=sent)
        total = sum(gammas[i] for i in merged)  # of the devices with finite models
        away = w - mean.parameters_row
        w.sub_(away, alpha=rate * (total if self.server_step == "sum" else 1.0))
        model.floats[len(w) :].copy_(mean.floats[len(w) :])  # statistics are averaged
        model.integers.copy_(mean.integers)
        return away * total

    def _stored(self, fed: Fleet, servers: list[int]) -> tuple[list[int], list[int]]:
        """All devices of some servers, which know their last models, and those that just sent."""
        devices = [i for n in servers for i in self.hierarchy.devices(n, fed.clients)]
        return devices, self._pulled([i for n in servers for i in self.queue[n].tolist()])

    def penalty(self, client: int) -> float:
        """Weight of a device's pull in its gradient."""
        return self.gamma(client) * (2 if self.compatibility else 1)

    @override
    def proximal(self, s: SessionContext) -> Proximal | None:
        model = self.clouds.of(self.hierarchy.server_of(s.client, s.fed.clients))
        return Proximal(model.parameters_row, self.penalty(s.client))

    @override
    def session_start(self, s: SessionContext) -> None:
        if self.momentum == "shared" and s.fed.optimizers:  # of the last session
            *_, state = s.fed.optimizers.values()
            s.fed.optimizers.clear()
            if state.isfinite().all():  # else all sessions would end the same way
                s.fed.optimizers[s.client] = state

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        if kind not in ("global", "local"):
            return fed.rows(clients)  # x_i
        if not any(self.gammas):
            return None
        every = range(len(self.clouds))
        servers = [self.hierarchy.server_of(i, fed.clients) for i in clients] or every
        return fed.server_rows([self.clouds.of(n) for n in servers], clients)  # z_n
