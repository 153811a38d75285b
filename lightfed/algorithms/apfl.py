"""APFL: every client mixes a personal model with its copy of the global one.

Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning. 2020.
https://arxiv.org/abs/2003.13461

    w_i <- w_i - eta grad f_i(w_i),   v_i <- v_i - eta grad_v f_i(alpha_i v_i + (1 - alpha_i) w_i)
    alpha_i <- alpha_i - eta <v_i - w_i, grad f_i(alpha_i v_i + (1 - alpha_i) w_i)>

As in the released code, outputs are mixed instead of parameters. On each batch v_i learns after
w_i. alpha_i learns after the first batch of a round, with a decay of 0.02.
"""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.interpolated import Interpolated
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.hooks import SessionContext
from lightfed.models.build import DataSpec
from lightfed.models.client_module import ClientModule
from lightfed.state.rows import ModelKind, Moment, Rows
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Part
from lightfed.utils.errors import require


class APFL(Algorithm):
    """The server averages w_i; v_i and alpha_i stay with their client."""

    stateful = True
    moments: tuple[Moment, ...] = ("trained", "aggregated")
    holds = "its mixture of two models"
    model: ServerModel

    def __init__(
        self, alpha: Part = 0.5, adaptive: bool = False, weights: Weights = "uniform"
    ) -> None:
        """Set the mixture.

        Args:
            alpha: Share of the personal model, at first.
            adaptive: Clients learn their alpha.
            weights: Of the participants in the mean: uniform, or by samples.
        """
        super().__init__()
        self.alpha, self.adaptive, self.weights = alpha, adaptive, weights

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        client = ClientModule.of(module, method="APFL")
        client.net = Interpolated(client.net, self.alpha)

    @override
    def setup(self, fed: Fleet) -> None:
        self.model = fed.new_part("net.w.")
        for state in fed.groups:
            state.set_flops(1.5 * state.flops)  # a step of w calls one network, one of v both

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        fed.send(self.model, clients)  # w_i <- w
        fed.train(clients, t, repeat=2)  # w_i, then v_i
        fed.merge(clients, into=self.model, weights=self.weights)

    @override
    def session_start(self, s: SessionContext) -> None:
        fits = s.lr is not None or not self.adaptive
        require(fits, "model.optimizer", "none of known rate", "name one, or adaptive: false")
        vars(s.module.net).update(turn="w", adapts=self.adaptive)

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        if s.step == 2:  # after the first batch
            self.session_end(s)

    @override
    def session_end(self, s: SessionContext) -> None:
        net: Any = s.module.net
        net.adapt(s.group.layout.floats.views(s.row.floats), s.lr)

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        given = self.model if kind == "aggregated" else None
        return fed.rows(clients, given=given) if kind in self.moments else None
