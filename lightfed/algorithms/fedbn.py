"""FedBN: all but the normalisation layers is averaged; these stay with their client.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization. ICLR 2021. https://arxiv.org/abs/2102.07623

Layers are chosen by their type. The released code takes names with "bn" in them, which leaves out
a normalisation within a shortcut. Deviation: layers of the other kinds stay with the client too.
"""

import lightning.pytorch as L
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.api.fleet import Weights
from lightfed.models.personal import personal_tensors


class FedBN(FedAvg):
    """FedAvg of the other layers: scales, shifts and statistics are a client's own."""

    def __init__(self, weights: Weights = "uniform") -> None:
        """Set the weights of clients.

        Args:
            weights: Of the participants in the mean: uniform, as in the paper, or by samples.
        """
        super().__init__(weights)

    @override
    def personal(self, module: L.LightningModule) -> set[str]:
        return personal_tensors(module, ["norms"], key="model.clients")
