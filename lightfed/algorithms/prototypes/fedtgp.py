"""FedTGP: FedProto with prototypes that the server trains to keep their distance.

Zhang, Liu, Hua, Cao: FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive
Learning for Data and Model Heterogeneity in Federated Learning. AAAI 2024.
https://arxiv.org/abs/2401.03230

    min over P of  CE(-d_k^c, c),   d_k^c[c'] = || r_k^c - P^c' || + delta [c' = c]
    delta = min(tau, max_c min_{c' != c} || Q^c - Q^c' ||)

P are the outputs of an MLP for embeddings of the classes, which the server trains. r_k^c is client
k's mean of the features of class c after its session. Q^c is the clients' mean of r_k^c. Clients
train as in FedProto, with the prototypes P.

Read in the authors' code (TsingZ0/HtFLlib 43b4ff7, TsingZ0/FedTGP 11b2297): a class that nobody
holds has a prototype, too.
"""

from collections.abc import Sequence
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from lightfed.algorithms.class_means import ClassMeans, distances, mean_of_clients
from lightfed.algorithms.prototypes.fedproto import FedProto
from lightfed.algorithms.prototypes.prototype import Inference
from lightfed.algorithms.prototypes.prototypes import ServerSGD, trained_means
from lightfed.api.fleet import Fleet
from lightfed.utils.bounds import Count, Positive, Weight
from lightfed.utils.rng import derive_seed, seeded


class FedTGP(FedProto):
    """The server's prototypes attract the clients' of their class, and repel all others."""

    def __init__(
        self,
        weight: Weight = 10.0,
        margin: Weight = 100.0,
        lr: Positive = 0.01,
        epochs: Count = 100,
        inference: Inference = "prototypes",
    ) -> None:
        """Set the prototypes and how the server trains them.

        Args:
            weight: lambda, the weight of a client's distance to the prototype.
            margin: tau, the largest delta.
            lr: Learning rate of the server's SGD.
            epochs: The server's passes over a round's vectors.
            inference: Whether the nearest prototype or the head classifies.
        """
        super().__init__(weight, inference)
        self.margin = margin
        self.sgd = ServerSGD(lr, epochs)

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        classes, size = self.values.shape
        with seeded(derive_seed(fed.seed, "prototypes")):
            # The embedding is drawn last, though it is the first layer: this order fixes the bits.
            first = nn.Linear(size, size)
            last = nn.Linear(size, size)
            embedding = nn.Embedding(classes, size)
            self.prototypes = nn.Sequential(embedding, first, nn.ReLU(), last)

    @override
    def packages(self, fed: Fleet, clients: Sequence[int]) -> dict[int, ClassMeans]:
        return trained_means(fed, clients, "net.private")

    @override
    def learn(self, fed: Fleet, t: int, packages: Sequence[ClassMeans]) -> None:
        delta = adaptive_margin(mean_of_clients(packages), self.margin)
        classes = torch.arange(len(self.seen))
        network = self.prototypes.cpu()

        def loss(theta: dict[str, Tensor], r: Tensor, c: Tensor) -> Tensor:
            P = functional_call(network, theta, (classes,))
            d = distances(r, P)
            return F.cross_entropy(-d - delta * F.one_hot(c, len(classes)), c)

        network.load_state_dict(self.sgd.of(fed, t, packages, network.state_dict(), loss))
        [P] = fed.once([lambda: network(classes).detach()])
        self.take(ClassMeans(P, torch.ones_like(self.seen)))


def adaptive_margin(means: ClassMeans, largest: float) -> float:
    """Return delta: the largest distance of a class's vector from its nearest other one.

    Args:
        means: Q, of the classes that a client holds.
        largest: tau, which delta does not exceed.
    """
    values = means.values[means.seen]
    nearest = distances(values, values).fill_diagonal_(inf).min(1).values
    return min(largest, float(nearest.max()))
