"""Federated averaging.

McMahan, Moore, Ramage, Hampson, Agueera y Arcas: Communication-Efficient Learning of Deep Networks
from Decentralized Data. AISTATS 2017. https://arxiv.org/abs/1602.05629

Algorithm 1 of the paper:

    S_t <- a random set of clients
    for each client k in S_t:  w_k <- E local epochs of SGD on D_k, from w
    w <- sum_{k in S_t} n_k / n w_k,                                  n = sum_{k in S_t} n_k

BatchNorm buffers are averaged like weights. The paper's models have no such buffers; `buffers`
offers two other ways to treat them.
"""

from typing import Literal

import lightning.pytorch as L
from torch import nn
from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet, Weights
from lightfed.models.build import DataSpec
from lightfed.state.server_model import ServerModel
from lightfed.utils.torch_private import _BatchNorm


class FedAvg(Algorithm):
    """The server's model is the mean of the participants' trained models."""

    takes_late = True
    holds = "the server's model"
    model: ServerModel

    def __init__(
        self, weights: Weights = "samples", buffers: Literal["average", "local", "drop"] = "average"
    ) -> None:
        """Set how clients are averaged.

        Args:
            weights: Weigh the participants by their number of samples (n_k / n), or all alike
                (uniform).
            buffers: What to do with BatchNorm statistics: `average` them like weights; keep them
                `local`, so that they are never sent and the server has none; or `drop` them, that
                is, normalize by the batch in training and in evaluation.
        """
        super().__init__()
        self.weights: Weights = weights
        self.statistics = buffers
        if buffers == "drop":
            self.deployed_with = (
                "set track_running_stats to False and running_mean and running_var to None in its "
                "BatchNorm layers: they normalize by the batch in evaluation, too"
            )

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        if self.statistics == "drop":
            drop_statistics(module)

    @override
    def personal(self, module: L.LightningModule) -> set[str]:
        if self.statistics != "local":
            return set()
        return {name for name, _ in module.named_buffers()}

    @override
    def setup(self, fed: Fleet) -> None:
        fed.one_layout(f"{type(self).__name__} needs one for all; HeteroFL, for instance, does not")
        self.model = fed.new_model()  # w_0

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)  # S_t
        fed.send(self.model, clients)  # w_k <- w
        fed.train(clients, t)  # E local epochs of SGD on D_k
        fed.merge(clients, into=self.model, weights=self.weights)  # w <- sum_k n_k / n  w_k


def drop_statistics(module: nn.Module) -> None:
    """Make every BatchNorm layer normalize by the batch, in training and in evaluation."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.track_running_stats = False
            layer.running_mean = None
            layer.running_var = None
            layer.num_batches_tracked = None
