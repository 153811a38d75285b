"""FedBuff: the server takes a step as soon as K updates have arrived, on a virtual clock.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous
Aggregation. AISTATS 2022. https://arxiv.org/abs/2106.06639

    D = 1 / K sum_k (1 + tau_k)^-e (w_{s_k} - w_k),   b <- beta b + D,   w <- w - eta_g b

w_{s_k} is the version that client k received, and tau_k the number of server steps since. A round
is a server step; K = 1 is FedAsync. BatchNorm statistics are means over the buffer.
"""

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.one_model import OneModel
from lightfed.api.algorithm import KEY
from lightfed.api.fleet import Fleet, Weights
from lightfed.devices.delays import Exponential
from lightfed.devices.devices import Devices
from lightfed.devices.event_clock import VirtualClock, check_waits
from lightfed.devices.timing import Timing, clock_of
from lightfed.local.hooks import SessionContext
from lightfed.utils.bounds import Count, Momentum, Positive, Weight


class FedBuff(OneModel):
    """Asynchronous averaging with a buffer of K updates."""

    side_by_side = True
    no_personal = "the server steps to updates of whole models"
    no_server_step = "FedBuff has a step of its own, server_lr and beta"
    no_policy = "FedBuff's server waits for a buffer of its own"
    timing = Timing(Devices(delay=Exponential(1.0)))
    version: Tensor  # (N,) s_k; -1 for an update that was lost
    momentum: Tensor  # (P,) b

    def __init__(
        self,
        buffer: Count = 10,
        server_lr: Positive = 1.0,
        beta: Momentum = 0.0,
        exponent: Weight = 0.5,
        weights: Weights = "uniform",
        at_once: bool = False,
    ) -> None:
        """Set the buffer and the server's step.

        Args:
            buffer: K. All clients are always at work, whatever the fraction in a round is. Sessions
                last as `model.devices` say; by default Exponential(mean=1) virtual seconds.
            server_lr: eta_g.
            beta: Momentum of the server.
            exponent: e; 0 weighs old updates like new ones.
            weights: Uniform; or samples: D is a mean, with weights n_k (1 + tau_k)^-e.
            at_once: Do not wait for the next version; a version twice gives the same update twice.
        """
        super().__init__()
        self.buffer, self.server_lr, self.beta, self.exponent = buffer, server_lr, beta, exponent
        self.weights, self.at_once = weights, at_once

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        check_waits(f"{KEY}.buffer", [self.buffer], fed.clients)
        self.clock = VirtualClock(fed.clients, 1 if self.at_once else self.buffer)
        self.updates = fed.keep("update")  # w_{s_k} - w_k, and statistics
        self.register_buffer("version", torch.full((fed.clients,), -1))
        self.register_buffer("momentum", torch.zeros_like(self.model.parameters_row))

    @override
    def round(self, fed: Fleet, t: int) -> None:
        w, total, mass = self.model.floats, torch.zeros_like(self.model.floats), 0.0
        row_bytes = 4 * self.model.layout.floats.numel
        for part in range(self.buffer // self.clock.wait):
            fed.send(self.model, idle := self.clock.idle)
            fed.train(idle, t)
            took = clock_of(fed).session_seconds(idle, up=row_bytes, purpose=f"delay {part}")
            for k in idle:
                self.version[k] = t if fed.usable(k) else -1
            arrived = [k for k in self.clock.advance(took) if self.version[k] >= 0]
            fed.charge(arrived, up=row_bytes)
            n = {k: fed.data.num_samples(k) if self.weights == "samples" else 1 for k in arrived}
            a = {k: n[k] * (1 + t - int(self.version[k])) ** -self.exponent for k in arrived}
            fed.average(self.updates, arrived, into=(mean := torch.zeros_like(w)), weights=a)
            total, mass = total + sum(a.values()) * mean, mass + sum(a.values())
        clock_of(fed).advance_to(self.clock.now)
        if mass:
            size = mass if self.weights == "samples" else self.buffer
            b = self.momentum.mul_(self.beta).add_(total[: len(self.momentum)], alpha=1 / size)
            w.copy_(torch.cat([w[: len(b)] - self.server_lr * b, total[len(b) :] / mass]))

    @override
    def session_end(self, s: SessionContext) -> None:
        statistics = s.row.floats[len(s.received) :]
        self.updates[s.client] = torch.cat([s.received - s.parameters, statistics])
