"""FedBN: all layers but the normalization layers are averaged; these stay with their client.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization. ICLR 2021. https://arxiv.org/abs/2102.07623

Layers are chosen by their type. The released code chooses tensors with "bn" in their name, which
misses a normalization layer within a shortcut.

Deviation: normalization layers of other kinds (layer, group, instance) stay with the client, too.
"""

import lightning.pytorch as L
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.api.fleet import Weights
from lightfed.models.personal import personal_tensors


class FedBN(FedAvg):
    """FedAvg of all other layers: a client keeps its own scales, shifts and statistics."""

    takes_late = True

    def __init__(self, weights: Weights = "uniform") -> None:
        """Set the weights of clients.

        Args:
            weights: Weigh all participants alike (uniform), as in the paper, or by their number of
                samples.
        """
        super().__init__(weights)

    @override
    def personal(self, module: L.LightningModule) -> set[str]:
        return personal_tensors(module, ["norms"], key="model.clients")
