"""FedBuff: the server takes a step as soon as K updates have arrived, on a virtual clock.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous
Aggregation. AISTATS 2022. https://arxiv.org/abs/2106.06639

    D = 1 / K sum_k (1 + tau_k)^-e (w_{s_k} - w_k),   b <- beta b + D,   w <- w - eta_g b

w_{s_k} is the version that client k received, and tau_k the number of server steps since then. A
round is a server step; K = 1 is FedAsync. BatchNorm statistics are means over the buffer.
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

LOST = -1  # instead of a version: the client's update cannot be used


class FedBuff(OneModel):
    """Asynchronous averaging with a buffer of K updates.

    Attributes:
        version: (N,) s_k, the round in which each client last received the model; `LOST` for an
            update that cannot be used.
        momentum: (P,) b.
    """

    side_by_side = True
    no_personal = "the server steps to updates of whole models"
    no_server_step = "FedBuff has a step of its own, server_lr and beta"
    no_policy = "FedBuff's server waits for a buffer of its own"
    no_unseen = "all clients of FedBuff train, each at its own pace"
    timing = Timing(Devices(delay=Exponential(1.0)))
    version: Tensor
    momentum: Tensor

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
            exponent: e; with 0 old updates weigh as much as new ones.
            weights: Uniform; or samples, then D is a mean with the weights n_k (1 + tau_k)^-e.
            at_once: A client that has sent its update starts again at once, without waiting for the
                next version. With the same version twice it sends the same update twice.
        """
        super().__init__()
        self.buffer = buffer
        self.server_lr = server_lr
        self.beta = beta
        self.exponent = exponent
        self.weights = weights
        self.at_once = at_once

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        check_waits(f"{KEY}.buffer", [self.buffer], fed.clients)
        self.clock = VirtualClock(fed.clients, 1 if self.at_once else self.buffer)
        self.updates = fed.keep("update")  # w_{s_k} - w_k, and statistics
        self.register_buffer("version", torch.full((fed.clients,), LOST))
        self.register_buffer("momentum", torch.zeros_like(self.model.parameters_row))

    @override
    def round(self, fed: Fleet, t: int) -> None:
        w = self.model.floats
        row_bytes = 4 * self.model.layout.floats.numel

        # The buffer: sum_k a_k (w_{s_k} - w_k), and sum_k a_k.
        update_sum = torch.zeros_like(w)
        weight_sum = 0.0
        # The clock hands out updates one by one if clients go on at once, otherwise K together.
        for wait in range(self.buffer // self.clock.wait):
            idle = self.clock.idle
            fed.send(self.model, idle)
            fed.train(idle, t)
            # This call first: it tells the clock that FedBuff itself decides how long to wait.
            seconds = clock_of(fed).session_seconds(idle, up=row_bytes, purpose=f"delay {wait}")
            for k in idle:
                self.version[k] = t if fed.usable(k) else LOST

            arrived = [k for k in self.clock.advance(seconds) if self.version[k] != LOST]
            fed.charge(arrived, up=row_bytes)

            weights = {k: self._weight(fed, k, t) for k in arrived}
            mean = torch.zeros_like(w)
            fed.average(self.updates, arrived, into=mean, weights=weights)
            update_sum = update_sum + sum(weights.values()) * mean
            weight_sum = weight_sum + sum(weights.values())

        clock_of(fed).advance_to(self.clock.now)
        if weight_sum:
            self._step(update_sum, weight_sum)

    def _weight(self, fed: Fleet, k: int, t: int) -> float:
        """Return a_k = n_k (1 + tau_k)^-e, with n_k = 1 for uniform weights."""
        samples = fed.data.num_samples(k) if self.weights == "samples" else 1
        tau = t - int(self.version[k])
        return samples * (1 + tau) ** -self.exponent

    def _step(self, update_sum: Tensor, weight_sum: float) -> None:
        """Move the server's model by the updates in the buffer.

        Args:
            update_sum: The weighted sum of updates; after the parameters, of BatchNorm statistics.
            weight_sum: The sum of the weights.
        """
        w = self.model.floats
        b = self.momentum
        size = weight_sum if self.weights == "samples" else self.buffer
        b.mul_(self.beta).add_(update_sum[: len(b)], alpha=1 / size)  # b <- beta b + D

        parameters = w[: len(b)] - self.server_lr * b  # w - eta_g b
        statistics = update_sum[len(b) :] / weight_sum
        w.copy_(torch.cat([parameters, statistics]))

    @override
    def session_end(self, s: SessionContext) -> None:
        statistics = s.row.floats[len(s.received) :]
        self.updates[s.client] = torch.cat([s.received - s.parameters, statistics])
