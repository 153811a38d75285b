"""Federated averaging.

McMahan, Moore, Ramage, Hampson, Agueera y Arcas: Communication-Efficient Learning of Deep Networks
from Decentralized Data. AISTATS 2017. https://arxiv.org/abs/1602.05629

Algorithm 1 of the paper, with BatchNorm buffers averaged like weights. The paper's models have no
such buffers; `buffers` offers two other readings.
"""

from typing import Literal

import lightning.pytorch as L
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
            weights: By the number of samples (n_k / n), or uniform.
            buffers: BatchNorm statistics: `average` them like weights; keep them `local`, so that
                they are never sent and the server has none; or `drop` them, that is normalise by
                the batch in training and evaluation.
        """
        super().__init__()
        self.weights: Weights = weights
        self.statistics = buffers
        if buffers == "drop":
            self.deployed_with = (
                "set track_running_stats to False and running_mean and running_var to None in its "
                "BatchNorm layers: they normalise by the batch in evaluation, too"
            )

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        if self.statistics == "drop":
            drop_statistics(module)

    @override
    def personal(self, module: L.LightningModule) -> set[str]:
        return {n for n, _ in module.named_buffers()} if self.statistics == "local" else set()

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


def drop_statistics(module: L.LightningModule) -> None:
    """Make every BatchNorm normalise by the batch, in training and evaluation."""
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            part.track_running_stats = False
            part.running_mean = part.running_var = part.num_batches_tracked = None
