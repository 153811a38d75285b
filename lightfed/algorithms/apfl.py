"""APFL: every client mixes a personal model with its copy of the global one.

Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning. 2020.
https://arxiv.org/abs/2003.13461

    w_i <- w_i - eta grad f_i(w_i),   v_i <- v_i - eta grad_v f_i(alpha_i v_i + (1 - alpha_i) w_i)
    alpha_i <- alpha_i - eta <v_i - w_i, grad f_i(alpha_i v_i + (1 - alpha_i) w_i)>

Deviations, as in the released code: outputs are mixed instead of parameters. On each batch v_i
learns after w_i. alpha_i learns after the first batch of a round, with a decay of 0.02.

The client's network is in `interpolated.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as L
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.interpolated import Interpolated
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.hooks import Newcomers, SessionContext
from lightfed.models.build import DataSpec
from lightfed.models.client_module import ClientModule
from lightfed.state.rows import ModelKind, Moment, Row, Rows
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Part
from lightfed.utils.errors import UserError


class APFL(Algorithm):
    """The server averages w_i; v_i and alpha_i stay with their client."""

    stateful = True
    takes_late = True
    moments: tuple[Moment, ...] = ("trained", "aggregated")
    holds = "its mixture of two models"
    model: ServerModel

    def __init__(
        self, alpha: Part = 0.5, adaptive: bool = False, weights: Weights = "uniform"
    ) -> None:
        """Set the mixture.

        Args:
            alpha: The share that the personal model has at first.
            adaptive: Clients learn their alpha.
            weights: Weigh all participants alike (uniform), or by their number of samples.
        """
        super().__init__()
        self.alpha = alpha
        self.adaptive = adaptive
        self.weights = weights

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        client = ClientModule.of(module, method="APFL")
        client.net = Interpolated(client.net, self.alpha)

    @override
    def setup(self, fed: Fleet) -> None:
        self.model = fed.new_part("net.w.")
        for state in fed.groups:
            # A step of w calls one network and a step of v both: 1.5 on average.
            state.set_flops(1.5 * state.flops)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        fed.send(self.model, clients)  # w_i <- w
        fed.train(clients, t, repeat=2)  # on every batch a step of w_i, then one of v_i
        fed.merge(clients, into=self.model, weights=self.weights)  # w <- mean of w_i

    @override
    def session_start(self, s: SessionContext) -> None:
        if self.adaptive and s.lr is None:
            raise UserError(
                "model.optimizer",
                "an optimizer whose learning rate is unknown",
                "name one, or adaptive: false",
            )
        net: Any = s.module.net
        if s.round < 0:  # a client that is never met trains v_i alone
            net.train_only_v()
            return
        net.take_turns()
        net.adapts = self.adaptive

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        if s.step == 2:  # both have learned from the first batch
            self._adapt(s)

    @override
    def session_end(self, s: SessionContext) -> None:
        self._adapt(s)  # of a session with a single batch

    def _adapt(self, s: SessionContext) -> None:
        """Let alpha_i learn, once in a session."""
        net: Any = s.module.net
        net.adapt(s.group.layout.floats.views(s.row.floats), s.lr)

    @override
    def newcomers(self, fed: Fleet, clients: Sequence[int]) -> Newcomers:
        """Return w, and what a new device starts from in the paper: v_i = w.

        Its alpha is the initial one, also with `adaptive`.
        """
        with_w = fed.rows(clients, given=self.model)
        layout = fed.groups[fed.home_group(clients[0])].layout
        parameters = [entry.name for entry in layout.floats][: layout.parameters]

        def read(some: Sequence[int]) -> Row:
            rows = with_w.read(some)  # a copy
            for row in rows.each():
                tensors = layout.floats.views(row.floats)
                for name, value in tensors.items():
                    if name.startswith("net.v."):
                        value.copy_(tensors[name.replace("net.v.", "net.w.", 1)])
            return rows

        def read_w(some: Sequence[int]) -> Row:
            rows = read(some)
            for row in rows.each():
                layout.floats.views(row.floats)["net.alpha"].zero_()  # the output is that of w
            return rows

        return Newcomers(
            served=replace(with_w, read=read_w),
            start=replace(with_w, read=read),
            trained=[name for name in parameters if name.startswith("net.v.")],
        )

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        if kind == "aggregated":
            return fed.rows(clients, given=self.model)  # v_i with the server's w
        if kind == "trained":
            return fed.rows(clients)
        return None
