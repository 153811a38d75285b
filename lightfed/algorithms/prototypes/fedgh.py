"""FedGH: the server trains one head for extractors of any architecture.

Yi, Wang, Liu, Shi, Yu: FedGH: Heterogeneous Federated Learning with Generalized Global Header. ACM
Multimedia 2023. https://arxiv.org/abs/2303.13137

    r_k^c = mean of F_k(x) over the client's samples x of class c, after its session
    theta <- theta - eta grad CE(H(theta; r_k^c), c),   over all k and c

All clients receive the head H; client k keeps its extractor F_k.

Read in the released code (LipingYi/FedGH 2a6a29d) and in TsingZ0/HtFLlib 09ec051. Deviation: in the
former the server's optimizer holds a client's network, so that the head keeps its first values.
Here the head learns, as in the latter.
"""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from typing_extensions import override

from lightfed.algorithms.class_means import ClassMeans
from lightfed.algorithms.prototypes.prototypes import ServerSGD, trained_means, uploads
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.models.build import DataSpec, blank
from lightfed.models.client_module import ClientModule
from lightfed.models.split import evaluating, split
from lightfed.state.rows import ModelKind, Rows
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Count, Positive


class FedGH(Algorithm):
    """Clients send mean features by class; the server's head learns to classify them."""

    stateful = True  # a client keeps its extractor
    no_late = "clients send vectors of classes, which are no changes of a model"
    no_server_step = "its server trains the head by SGD, at a rate of its own"
    moments = ("trained", "aggregated")
    holds = "its own extractor with the server's head"
    model: ServerModel  # the head

    def __init__(self, lr: Positive = 0.01, epochs: Count = 1) -> None:
        """Set how the server trains the head.

        Args:
            lr: eta.
            epochs: The server's passes over a round's vectors.
        """
        super().__init__()
        self.sgd = ServerSGD(lr, epochs)

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        client = ClientModule.of(module, method="FedGH")
        client.net = split(client.net, blank(data, samples=2), key="model.clients")

    @override
    def setup(self, fed: Fleet) -> None:
        self.model = fed.new_part("net.head.")  # theta

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        fed.send(self.model, clients)  # theta_k <- theta
        fed.train(clients, t)
        packages = uploads(fed, trained_means(fed, clients, "net"))  # r_k
        if packages:
            self._train_head(fed, packages, t)

    def _train_head(self, fed: Fleet, packages: Sequence[ClassMeans], t: int) -> None:
        """Set theta <- theta - eta grad CE(H(theta; r_k^c), c), over all k and c."""
        network: Any = fed.groups[0].module.net
        layout = self.model.layout
        views = layout.floats.views(self.model.floats)
        parameters = layout.floats.entries[: layout.parameters]
        theta = {entry.name: views[entry.name] for entry in parameters}

        def loss(theta: dict[str, Tensor], r: Tensor, c: Tensor) -> Tensor:
            of_head = {name.removeprefix("net.head."): value for name, value in theta.items()}
            with evaluating(network.head):
                logits = functional_call(network.head, of_head, (r,))
                return F.cross_entropy(logits, c)

        theta = self.sgd.of(fed, t, packages, theta, loss)
        for name, value in theta.items():
            views[name].copy_(value)

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        if kind not in self.moments:
            return None
        return fed.rows(clients, given=self.model if kind == "aggregated" else None)
