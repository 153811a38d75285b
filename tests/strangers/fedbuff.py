"""FedBuff: the server takes a step as soon as K of the clients that train have sent an update.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous
Aggregation. AISTATS 2022. https://arxiv.org/abs/2106.06639

    D = 1 / K sum_k (1 + tau_k)^-e (w_{s_k} - w_k),   b <- beta b + D,   w <- w - eta_g b

w_{s_k} is the version that client k received, and tau_k the number of server steps since. A round
is a server step. Clients start at a step: one that sends early waits for the next version.
BatchNorm statistics are means over the buffer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightfed import Algorithm, Fleet, ModelKind, Rows, ServerModel
from lightfed.local.hooks import SessionContext
from lightfed.simulation.clock import VirtualClock, check_waits, device_delays
from lightfed.simulation.delays import Delay, Exponential


class FedBuff(Algorithm):
    """Asynchronous averaging with a buffer of K updates, on a virtual clock."""

    stateful = True  # a client's update is under way for several rounds
    model: ServerModel
    version: Tensor  # (N,) s_k; -1 for an update that was lost
    momentum: Tensor  # (P,) b

    def __init__(
        self,
        buffer: int = 10,
        server_lr: float = 1.0,
        beta: float = 0.0,
        exponent: float = 0.5,
        delay: Delay | None = None,
    ) -> None:
        super().__init__()
        self.buffer, self.exponent = buffer, exponent
        self.server_lr, self.beta = server_lr, beta
        self.delay = delay or Exponential(1.0)

    @override
    def setup(self, fed: Fleet) -> None:
        layout = fed.one_layout("FedBuff needs one for all")
        check_waits("model.algorithm.init_args.buffer", [self.buffer], fed.clients)
        self.model = fed.new_model()
        self.clock = VirtualClock(fed.clients, self.buffer)
        self.deltas = fed.keep("delta")
        self.statistics = [entry.name for entry in layout.floats.entries[layout.parameters :]]
        self.register_buffer("version", torch.full((fed.clients,), -1))
        self.register_buffer("momentum", torch.zeros_like(self.model.parameters_row))

    @override
    def round(self, fed: Fleet, t: int) -> None:
        idle, w = self.clock.idle, self.model.parameters_row
        fed.send(self.model, idle)
        fed.train(idle, t)
        for k in idle:
            self.version[k] = t if fed.usable(k) else -1
        delays = device_delays(self.delay, idle, seed=fed.seed, t=t)
        arrived = [k for k in self.clock.advance(delays) if self.version[k] >= 0]
        fed.charge(arrived, up=4 * self.model.layout.parameter_numel)
        weights = {k: (1 + t - int(self.version[k])) ** -self.exponent for k in arrived}
        step = torch.zeros_like(w)
        fed.average({k: weights[k] * self.deltas[k] for k in fed.mine(arrived)}, arrived, into=step)
        if self.statistics:
            fed.merge(arrived, into=self.model, weights="uniform", tensors=self.statistics)
        w -= self.server_lr * self.momentum.mul_(self.beta).add_(step)

    @override
    def session_end(self, s: SessionContext) -> None:
        self.deltas[s.client] = s.received - s.parameters

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        if kind == "aggregated":  # clients hold the server's model
            return fed.server_rows(self.model, clients)
        return super().models(fed, kind, clients)
