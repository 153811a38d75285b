"""FedPer: clients share a body, and each has a head of its own; both are trained together.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers. 2019.
https://arxiv.org/abs/1912.00818

Clients are weighted by samples, as in the paper. What the code released with FedRep calls FedPer is
`FedRep` with `head_epochs: 0`: there the head is averaged too, and trained after the last round.
"""

import lightning.pytorch as L
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.api.algorithm import KEY
from lightfed.api.fleet import Weights
from lightfed.models.personal import personal_tensors


class FedPer(FedAvg):
    """FedAvg of the body: a client's head is its own."""

    takes_late = True

    def __init__(self, head: str | list[str], weights: Weights = "samples") -> None:
        """Set what is a head.

        Args:
            head: Prefix of the names of the head's tensors, such as net.fc, or several prefixes.
            weights: Weigh the participants by their number of samples, or all alike (uniform).
        """
        super().__init__(weights)
        self.heads = [head] if isinstance(head, str) else list(head)

    @override
    def personal(self, module: L.LightningModule) -> set[str]:
        return personal_tensors(module, self.heads, key=f"{KEY}.head")
