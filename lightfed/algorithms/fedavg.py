"""Federated averaging.

McMahan, Moore, Ramage, Hampson, Agueera y Arcas: Communication-Efficient Learning of Deep Networks
from Decentralized Data. AISTATS 2017. https://arxiv.org/abs/1602.05629

Algorithm 1 of the paper, with BatchNorm buffers averaged like weights. The paper's models have no
such buffers; `buffers` offers two other readings.
"""

from collections.abc import Sequence
from typing import Literal

import lightning.pytorch as L
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet, Weights
from lightfed.models.build import DataSpec
from lightfed.state.rows import ModelKind, Rows
from lightfed.state.server_model import ServerModel


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
        self.stateful = buffers == "local"  # a client keeps its statistics from round to round
        if self.stateful:
            self.holds = f"{self.holds}, with batch-norm statistics of its own"

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        if self.statistics == "drop":
            drop_statistics(module)

    @override
    def setup(self, fed: Fleet) -> None:
        fed.one_layout(f"{type(self).__name__} needs one for all; HeteroFL, for instance, does not")
        self.model = fed.new_model()  # w_0

    @override
    def round(self, fed: Fleet, t: int) -> None:
        averaged = self.statistics == "average"
        clients = fed.participants(t)  # S_t
        fed.send(self.model, clients, buffers=averaged)  # w_k <- w
        fed.train(clients, t)  # E local epochs of SGD on D_k
        # w <- sum_k n_k / n  w_k
        fed.merge(clients, into=self.model, weights=self.weights, buffers=averaged)

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        if not self.stateful:
            return super().models(fed, kind, clients)
        if kind in ("global", "local"):
            return None  # the server has no statistics to evaluate with
        if kind == "trained":
            return fed.rows(clients)
        return fed.rows(clients, given=self.model, buffers=False)


def drop_statistics(module: L.LightningModule) -> None:
    """Make every BatchNorm normalise by the batch, in training and evaluation."""
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            part.track_running_stats = False
            part.running_mean = part.running_var = part.num_batches_tracked = None
