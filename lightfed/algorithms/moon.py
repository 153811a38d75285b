"""MOON: a client's representations stay near the received model's, and leave its previous one's.

Li, He, Song: Model-Contrastive Federated Learning. CVPR 2021. https://arxiv.org/abs/2103.16257

    L = CE(head(z), y) - mu log [ e^(cos(z, z_g) / tau) / (e^(cos(z, z_g) / tau)
                                                           + sum_p e^(cos(z, z_p) / tau)) ]

It is FedAvg with the penalty `Contrast`, which says what z is. The paper's networks end with two
linear layers and a ReLU in between, the projection, below the linear layer that gives the logits.

As in the released code, clients are weighted by samples, and with more than one previous model a
client's last one counts again for each round that it has missed; one that has never trained has the
initial model. Deviation: a pool of three or more
holds the last models; there all but one are the same.
"""

from lightfed.algorithms.fedavg import FedAvg
from lightfed.local.penalties import Contrast
from lightfed.utils.bounds import Count, Positive, Weight


class MOON(FedAvg):
    """FedAvg of clients that contrast their representations with their previous model's."""

    def __init__(self, mu: Weight = 1.0, temperature: Positive = 0.5, pool: Count = 1) -> None:
        """Set the contrast.

        Args:
            mu: Its weight in a client's loss.
            temperature: tau.
            pool: Number of previous models that a client keeps.
        """
        super().__init__()
        self.local_penalty = Contrast(mu, temperature, pool)
