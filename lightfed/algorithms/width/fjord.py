"""FjORD: clients train all widths up to their own, nested in each other.

Horvath, Laskaridis, Almeida, Leontiadis, Venieris, Lane: FjORD: Fair and Accurate Federated
Learning under Heterogeneous Targets with Ordered Dropout. NeurIPS 2021.
https://arxiv.org/abs/2102.13451

    p ~ U {p in P : p <= p_k} for each batch;   loss CE(net_p(x), y)
    with distillation:  CE(net_{p_k}(x), y) + CE(net_p(x), softmax(net_{p_k}(x)))
    w[e] <- sum n_k w_k[e] / sum n_k over the clients that own e

net_p has the leading ceil(p K) units of each layer; p_k is the rate of the client's group. A client
exchanges its block, and BatchNorm statistics of each of its widths. Weights outside the drawn width
have a gradient of 0, so that they decay and keep their momentum.

Deviation: distillation is that of Flower's baseline, where the drawn width learns from soft targets
alone.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as L
from typing_extensions import override

from lightfed.algorithms.width.ordered_dropout import OrderedDropout
from lightfed.api.algorithm import KEY, Algorithm
from lightfed.api.fleet import Fleet
from lightfed.local.hooks import SessionContext
from lightfed.models.build import DataSpec, blank
from lightfed.models.client_module import ClientModule
from lightfed.models.trials import on_trial
from lightfed.state.costs import forward_flops
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Share
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator


class FjORD(Algorithm):
    """Every element is the mean over the clients that own it; the first group is the widest."""

    depths = True  # narrow clients lack the statistics of larger widths
    takes_late = True
    deployed_with = (
        "call `nest` of the network with the algorithm's widths before you load the file"
    )
    model: ServerModel

    def __init__(
        self, widths: Sequence[Share] = (0.2, 0.4, 0.6, 0.8, 1.0), distil: bool = False
    ) -> None:
        """Set the widths.

        Args:
            widths: P. The rate of each client group is one of them.
            distil: The drawn width learns from the client's largest one.
        """
        super().__init__()
        if not widths:
            raise UserError(f"{KEY}.widths", "an empty list", "give at least one width")
        self.widths = list(widths)
        self.distil = distil

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        net = ClientModule.of(module, method="FjORD").net
        if not isinstance(net, OrderedDropout):
            raise UserError(
                key="model.clients",
                found=f"{type(net).__name__}, of one width",
                fix="name OrderedDropout, with this network as its argument",
            )
        if net.rate not in self.widths:
            raise UserError(
                key="model.clients",
                found=f"a rate of {net.rate:g}",
                fix=f"give one of the algorithm's widths, {self.widths}",
            )
        net.nest(self.widths)
        net.distil = self.distil

    @override
    def setup(self, fed: Fleet) -> None:
        self.model = fed.new_model()
        x = blank(fed.data, samples=2).to(fed.device)
        for group, state in enumerate(fed.groups):
            fed.check_nested(self.model, group)

            # A batch costs the mean over the widths, as they are drawn uniformly, and with
            # distillation the largest width besides.
            net: Any = state.module.net
            with on_trial(net, fed.device) as trial:
                flops = [forward_flops(trial, x, partial(trial.at, p)) for p in trial.widths]
            of_teacher = max(flops) if self.distil else 0
            state.set_flops(sum(flops) / len(flops) + of_teacher)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        fed.send(self.model, clients)  # w_k <- w, within the width p_k
        fed.train(clients, t)
        fed.merge(clients, into=self.model)  # w[e] <- sum n_k w_k[e] / sum n_k

    @override
    def session_start(self, s: SessionContext) -> None:
        net: Any = s.module.net
        net.draws = self.draws(s)

    def draws(self, s: SessionContext) -> Iterator[float]:
        """Yield p for each batch of a session."""
        net: Any = s.module.net
        rng = numpy_generator(s.fed.seed, "width", s.round, s.client)
        while True:
            yield net.widths[rng.integers(len(net.widths))]
