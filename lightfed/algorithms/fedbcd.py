"""FedBCD: block coordinate descent over devices' personal models and clouds' global ones.

Wu, Scaglione, Wai, Karakoc, Hreinsson, Ma: Federated Block Coordinate Descent Scheme for Learning
Global and Personalized Models. AAAI 2021. https://arxiv.org/abs/2012.13900

    min  sum_n sum_{i in Q_n}  g_i(x_i) + gamma_i / 2 ||x_i - z_n||^2,   z_n = z_m              (2)

Devices keep personal models x_i and take steps of ASPG (`lightfed.algorithms._shared.aspg`; eq. 4)
on their own block of (2); servers keep z_n and step towards the devices' models, all together
(sync, eq. 5) or the first B that are done (async, eq. 6). With `mixing`, servers do decentralised
gradient descent over a graph of their own. A device that is not active keeps its model, and its
server a copy.

What the paper leaves open, and what is chosen here: eta_z = .5 with a hundred devices diverges in
eq. (5) as written, so the step is divided by the sum of gamma by default (`server_step`); BatchNorm
statistics are averaged, not pulled and not projected; a device's momentum, zeta (x^K - x^{K-1}) or
the buffer of SGD, is carried to its next session. `compatibility` is the released code: twice the
pull, and a server rate that falls by 1e-4 a round; its other differences are settings: SGD with
momentum and weight decay for ASPG, activation by who wakes up first, and in its notebooks, which
have one optimiser, momentum that passes from device to device in their order (`momentum: shared`).
In its version for several processes every device has its own, as here.

Between servers and coordinator a model goes up and one comes back for every server that is waited
for, sum_i gamma_i x_i and z in (5), z_n and w_n in (6); the released code sends all devices' models
up in (5). With `mixing` a model goes along every edge of the graph.

A phase's training is computed when it starts, in which its server's model does not change until it
is done: of that only tests of personal models can tell. A device whose update is not finite starts
anew, and is left out of the step of a server that starts and ends its phase in that round.
"""

import logging
from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Literal

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.local.hooks import Moment
from lightfed.local.optimizer import Proximal
from lightfed.simulation.clock import VirtualClock, check_waits
from lightfed.simulation.delays import Delay, Exponential
from lightfed.simulation.hierarchy import Activation, Hierarchy, Phase, Unit
from lightfed.state.rows import Row
from lightfed.state.server_model import ServerModel
from lightfed.topology.matrices import read_mixing
from lightfed.utils.errors import UserError

log = logging.getLogger(__name__)

_KEY = "model.algorithm.init_args"
DECAY = 1 - 1e-4  # of the released code's server rate, a round
_WHOLE = 2**16  # largest weight of a device in a sum: small ones leave room for exact sums
Momentum = Literal["device", "shared", "session"]


class FedBCD(Algorithm):
    """Personal models at the devices, global ones at the servers, sync or async."""

    stateful = True
    # Servers step towards the devices, which keep their models.
    moments: tuple[Moment, ...] = ("aggregated", "trained")
    holds = "the device's own model, x_i"
    models: nn.ModuleList  # z_n; of sync servers, which have the same, one
    queue: Tensor
    now: Tensor
    finish: Tensor
    idle: Tensor

    def __init__(
        self,
        servers: int = 10,
        active: int = 3,
        wait: int | None = None,
        gamma: float | list[float] = 1.0,
        server_lr: float = 0.5,
        server_step: Literal["mean", "sum"] = "mean",
        steps: tuple[int, int] = (1, 5),
        unit: Unit = "step",
        delay: Delay | None = None,
        step_delay: Delay | None = None,
        activation: Activation = "uniform",
        mixing: list[list[float]] | str | None = None,
        momentum: Momentum = "device",
        compatibility: bool = False,
    ) -> None:
        """The clouds, and how they step.

        Args:
            servers: N; every one has as many of the clients for devices, in their order.
            active: |Q_n|, devices of a server that hear it in a phase.
            wait: B, servers that the coordinator waits for; less than all is the async protocol.
                All by default: the sync one.
            gamma: Weight of the pull between a device and its server; of a list, device i has
                entry i mod length. A device of 0 trains alone, and nothing is sent; where all do,
                there is no global model.
            server_lr: eta_z.
            server_step: Divide the server's step by the sum of gamma (mean), or not (sum), as
                eq. (5) and (6) are written.
            steps: Bounds of K, the length of a session, drawn anew for every activation.
            unit: What K counts: steps (mini-batches) or epochs.
            delay: Virtual seconds of a device's phase; Exponential(mean=1) by default.
            step_delay: Virtual seconds of each of its K units, in addition.
            activation: Active devices by chance, or those that wake up first (delay is when), as in
                the released code's second experiment.
            mixing: (N, N) doubly stochastic weights of the servers' models, eq. (6a), as a list of
                rows or a .npy or .csv file; all servers take part in every round then.
            momentum: What a session's momentum begins with: what the device's last session ended
                with (device), what the last session of any device ended with, by device and in
                one rank (shared), as in the released notebooks, or nothing (session).
            compatibility: Twice the pull, and eta_z falls by 1e-4 of itself a round, as in the
                released code.
        """
        super().__init__()
        self.hierarchy = Hierarchy(
            servers, active, active, (steps[0], steps[1]), unit, delay or Exponential(1.0),
            step_delay, activation,
        )  # fmt: skip
        self.wait = servers if wait is None else wait
        check_waits(f"{_KEY}.wait", [self.wait], servers)
        self.gammas = [gamma] if isinstance(gamma, int | float) else list(gamma)
        if not self.gammas or not all(0 <= g < float("inf") for g in self.gammas):
            raise UserError(f"{_KEY}.gamma", str(gamma), "give numbers of 0 or more")
        if not any(self.gammas):
            log.warning("%s with gamma = 0: every device trains alone", type(self).__name__)
        if not 0 < server_lr < float("inf"):
            raise UserError(f"{_KEY}.server_lr", str(server_lr), "give a number above 0")
        self.server_lr = server_lr
        self.server_step = server_step
        self.mixing = self._read(mixing)
        self.momentum = momentum
        self.compatibility = compatibility
        self.momenta: dict[int, Tensor] = {}  # of this rank's devices, or of the one that has it
        self._phases: dict[int, Phase] = {}  # by server, those that start in this round
        self._pulls: dict[int, Proximal] = {}  # of the sessions under way
        self._scratch: list[ServerModel] = []  # not state

    def _read(self, mixing: list[list[float]] | str | None) -> np.ndarray | None:
        """The servers' own weights, if there are any."""
        if mixing is None:
            return None
        servers = self.hierarchy.servers
        if self.wait != servers:
            found = f"given, and wait: {self.wait} of {servers} servers"
            raise UserError(
                f"{_KEY}.mixing", found, "leave one out: such servers all take part in every round"
            )
        return read_mixing(mixing, servers, key=f"{_KEY}.mixing")

    @property
    def _global(self) -> bool:
        """Whether all servers have one model: sync clouds."""
        return self.wait == self.hierarchy.servers and self.mixing is None

    @override
    def setup(self, fed: Fleet) -> None:
        fed.one_layout(f"{type(self).__name__} needs one for all")
        self.hierarchy.check(fed.clients, fed.work)
        self._check_step(fed)
        if self.momentum == "shared":
            fix = "set trainer.devices: 1, or momentum: device"
            fed.one_after_the_other(f"{_KEY}.momentum", "shared, by devices in turn", fix)
        servers = self.hierarchy.servers
        self.models = nn.ModuleList(fed.new_model() for _ in range(1 if self._global else servers))
        self.global_models = len(self.models)
        self._scratch = [fed.new_model()]
        self.register_buffer("queue", torch.full((servers, self.hierarchy.active), -1))
        self.register_buffer("now", torch.zeros((), dtype=torch.float64))
        self.register_buffer("finish", torch.zeros(servers, dtype=torch.float64))
        self.register_buffer("idle", torch.ones(servers, dtype=torch.bool))

    def _check_step(self, fed: Fleet) -> None:
        """Refuse a server step that diverges."""
        if self.server_step == "mean":
            if self.server_lr >= 2:
                fix = "give less than 2: z moves that far towards the devices' mean"
                raise UserError(f"{_KEY}.server_lr", str(self.server_lr), fix)
            return
        sums = [
            sum(sorted((self.gamma(i) for i in devices), reverse=True)[: self._stepped(devices)])
            for n in range(self.hierarchy.servers)
            for devices in [self.hierarchy.devices(n, fed.clients)]
        ]
        together = sum(sums) if self._global else max(sums)
        product, bound = self.server_lr * together, "below 2" if self._global else "at most 1"
        if product >= 2 or (not self._global and product > 1):
            whose = "all devices" if self._global else "the largest server's devices"
            found = (
                f"{self.server_lr:g}, times the sum of gamma over {whose}, {together:g}, is "
                f"{product:g}"
            )
            raise UserError(f"{_KEY}.server_lr", found, f"it must be {bound}; or server_step: mean")

    def _stepped(self, devices: Sequence[int]) -> int:
        """How many devices of a server are in its step: all, by their last models."""
        return len(devices)

    def gamma(self, client: int) -> float:
        """gamma_i."""
        return self.gammas[client % len(self.gammas)]

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clock = self._clock()
        for server in clock.idle:
            self._phases[server] = phase = self.phase(fed, server, t)
            self.queue[server] = torch.tensor(phase.active)
            fed.show(self._model(server), self._pulled(phase.active))  # z_n
        self._devices(fed, t)  # eq. (4)
        first = clock.advance([self._phases[n].busy for n in clock.idle])  # V
        fed.relay(self._model(0), self._messages(first))
        self._servers(fed, first, t)  # eq. (5), or (6)
        self._keep(clock)
        self._phases = {}
        fed.metrics["virtual_time"] = clock.now

    def phase(self, fed: Fleet, server: int, t: int) -> Phase:
        """Q_n, K_i and how long it takes."""
        return self.hierarchy.phase(server, t, clients=fed.clients, seed=fed.seed)

    def _pulled(self, devices: Sequence[int]) -> list[int]:
        """Those that hear their server, and send to it: the others train alone."""
        return [i for i in devices if self.gamma(i) > 0]

    def _devices(self, fed: Fleet, t: int) -> None:
        """Sessions of the devices whose servers start a phase."""
        units = {i: k for phase in self._phases.values() for i, k in phase.units.items()}
        fed.train(sorted(units), t, steps=self._steps(fed, units, t))

    def _steps(self, fed: Fleet, units: dict[int, int], t: int) -> dict[int, int]:
        if self.hierarchy.unit == "step":
            return units
        return {i: k * fed.data.num_batches(i, t) for i, k in units.items()}

    def _messages(self, first: list[int]) -> int:
        """Models that travel between the servers, or to a coordinator and back."""
        if not any(self.gammas):
            return 0
        if self.mixing is not None:
            return int(np.count_nonzero(self.mixing - np.diag(np.diag(self.mixing))))
        return self.hierarchy.messages(first)

    def _servers(self, fed: Fleet, first: list[int], t: int) -> None:
        """z_n of the servers that were waited for."""
        rate = self.server_lr * (DECAY**t if self.compatibility else 1.0)
        if self._global:
            gap = self._step(fed, list(range(self.hierarchy.servers)), self._model(0), rate)
        else:
            gap = self._gap(fed)
            mixed = self._mixed(first)  # of what all had before any steps
            for server, w in zip(first, mixed, strict=True):
                self._model(server).floats.copy_(w)
                self._step(fed, [server], self._model(server), rate)
        fed.metrics["server_gap"] = float(gap.norm())
        fed.metrics["consensus"] = self._consensus()

    def _mixed(self, first: list[int]) -> list[Tensor]:
        """w_n = sum_m a_nm z_m (6a), a_nm = 1/B among those that were waited for, or as given."""
        models = self._stacked()
        if self.mixing is None:
            mean = models[first].mean(0).float()
            return [mean] * len(first)
        weights = torch.from_numpy(self.mixing).to(models.device)
        return list((weights @ models).float())

    def _step(self, fed: Fleet, servers: list[int], model: ServerModel, rate: float) -> Tensor:
        """Z <- w - eta_z sum_i gamma_i (w - x_i), divided by sum_i gamma_i or not; `model` holds w.

        Returns:
            (P,) sum_i gamma_i (w - x_i).
        """
        devices, sent = self._stored(fed, servers)
        total = sum(self._average(fed, devices, model, sent=sent).values())
        mean, w = self._scratch[0], parameters(model)
        away = w - parameters(mean)
        w.sub_(away, alpha=rate * (total if self.server_step == "sum" else 1.0))
        model.floats[len(w) :].copy_(mean.floats[len(w) :])  # statistics are averaged
        model.integers.copy_(mean.integers)
        return away * total

    def _average(
        self, fed: Fleet, devices: list[int], default: ServerModel, *, sent: list[int]
    ) -> dict[int, float]:
        """The scratch model becomes sum_i gamma_i x_i / sum_i gamma_i; where nobody pulls, default.

        Returns:
            gamma_i of the devices in these sums: whose models are finite.
        """
        mean = self._scratch[0]
        mean.row.copy_(default.row)
        gammas = {i: self.gamma(i) for i in self._pulled(devices)}
        pulling = fed.merge(list(gammas), into=mean, weights=_whole(gammas), sent=sent)
        return {i: gammas[i] for i in pulling}

    def _stored(self, fed: Fleet, servers: list[int]) -> tuple[list[int], list[int]]:
        """Devices of servers, whose models these know; and those of them that have just sent."""
        devices = [i for n in servers for i in self.hierarchy.devices(n, fed.clients)]
        return devices, self._pulled([i for n in servers for i in self.queue[n].tolist()])

    def _gap(self, fed: Fleet) -> Tensor:
        """(P,) float64: sum_n sum_i gamma_i (z_n - x_i) of theorem 1, over all servers."""
        devices, _ = self._stored(fed, list(range(self.hierarchy.servers)))
        gammas = self._average(fed, devices, self._model(0), sent=[])
        weights = torch.zeros(self.hierarchy.servers, dtype=torch.float64)
        for device, gamma in gammas.items():
            weights[self.hierarchy.server_of(device, fed.clients)] += gamma
        mean = parameters(self._scratch[0]).double()
        models = self._stacked()[:, : len(mean)]
        return weights.to(mean.device) @ models - weights.sum() * mean

    def _consensus(self) -> float:
        """mean_n ||z_n - mean z||."""
        models = self._stacked()[:, : len(parameters(self._model(0)))]
        return float((models - models.mean(0)).norm(dim=1).mean())

    def _stacked(self) -> Tensor:
        """(N, P) float64: the servers' rows, or the one of all."""
        return torch.stack([self._model(n).floats.double() for n in range(len(self.models))])

    def _model(self, server: int) -> ServerModel:
        model = self.models[0 if self._global else server]
        assert isinstance(model, ServerModel)
        return model

    def _clock(self) -> VirtualClock:
        """The coordinator's event queue, as it was left."""
        clock = VirtualClock(self.hierarchy.servers, self.wait)
        state = {"now": float(self.now), "finish": self.finish.cpu(), "idle": self.idle.cpu()}
        clock.load_state_dict(state)
        return clock

    def _keep(self, clock: VirtualClock) -> None:
        state = clock.state_dict()
        self.now.fill_(state["now"])
        self.finish.copy_(state["finish"])
        self.idle.copy_(state["idle"])

    def penalty(self, client: int) -> float:
        """Weight of a device's pull in its gradient."""
        return self.gamma(client) * (2 if self.compatibility else 1)

    @override
    def proximal(self, fed: Fleet, client: int) -> Proximal | None:
        model = self._model(self.hierarchy.server_of(client, fed.clients))
        carries = self.momentum != "session"
        pull = Proximal(parameters(model), self.penalty(client), carries, self._momentum_of(client))
        if pull.momentum is not None:
            pull.momentum = pull.momentum.to(fed.device)
        self._pulls[client] = pull
        return pull

    def _momentum_of(self, client: int) -> Tensor | None:
        """What a session begins with."""
        if self.momentum == "shared":
            return next(iter(self.momenta.values()), None)
        return self.momenta.get(client)

    @override
    def session_end(self, fed: Fleet, client: int, row: Row) -> None:
        momentum = self._pulls.pop(client).momentum
        if momentum is not None:  # lies where rows are kept, perhaps on the host
            self._hand_over(client, momentum.to(fed.row(client).floats.device))

    def _hand_over(self, client: int, momentum: Tensor) -> None:
        """Keep what a session ended with; a shared one that is not finite is dropped."""
        if self.momentum == "shared":
            self.momenta.clear()
            if not momentum.isfinite().all():  # the other devices' sessions would end so, too
                return
        self.momenta[client] = momentum

    @override
    def session_result(self, fed: Fleet, client: int) -> dict[str, Tensor]:
        return {"momentum": self.momenta[client]} if client in self.momenta else {}

    @override
    def load_session_result(self, fed: Fleet, client: int, result: dict[str, Tensor]) -> None:
        if "momentum" in result:
            momentum = result["momentum"].to(fed.row(client).floats.device, copy=True)
            self._hand_over(client, momentum)

    @override
    def evaluated(self, fed: Fleet, client: int | None) -> L.LightningModule | None:
        return self.evaluated_server(fed, 0) if client is None else fed.bind(client)

    @override
    def local(self, fed: Fleet, client: int) -> L.LightningModule | None:
        return self.evaluated_server(fed, self.hierarchy.server_of(client, fed.clients))

    @override
    def evaluated_server(self, fed: Fleet, server: int) -> L.LightningModule | None:
        return fed.bind_model(self._model(server)) if any(self.gammas) else None

    @override
    def client_state(self, fed: Fleet, client: int) -> dict[str, Tensor]:
        return super().client_state(fed, client) | self.session_result(fed, client)

    @override
    def load_client_state(self, fed: Fleet, client: int, state: dict[str, Tensor]) -> None:
        super().load_client_state(fed, client, state)
        self.load_session_result(fed, client, state)

    @override
    def stored_bytes(self, fed: Fleet, client: int) -> int:
        momentum = self.momenta.get(client)
        return super().stored_bytes(fed, client) + (0 if momentum is None else 4 * len(momentum))

    @override
    def start_anew(self, fed: Fleet, client: int) -> None:
        super().start_anew(fed, client)
        self.momenta.pop(client, None)


def parameters(model: ServerModel) -> Tensor:
    """(P,) the leading part of a model's row, without statistics: z."""
    return model.floats[: model.layout.floats.span(model.layout.parameters)]


def _whole(gammas: dict[int, float]) -> dict[int, int]:
    """Whole numbers in the same proportions, so that sums over devices are exact.

    Where that takes numbers above `_WHOLE`, they are rounded.
    """
    if not gammas:
        return {}
    shares = {i: Fraction(repr(float(g))) for i, g in gammas.items()}
    denominator = lcm(*(share.denominator for share in shares.values()))
    numerator = gcd(*(share.numerator for share in shares.values()))
    scale = min(Fraction(denominator, numerator), _WHOLE / max(shares.values()))
    return {i: max(1, round(share * scale)) for i, share in shares.items()}
