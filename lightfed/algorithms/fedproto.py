"""FedProto: clients exchange prototypes, the mean features of each class.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: Federated Prototype Learning across Heterogeneous
Clients. AAAI 2022. https://arxiv.org/abs/2105.00243

A client's features are drawn to the server's prototype of their class; the server's are the plain
mean over the clients that hold the class. Clients may differ in all but the number of features. The
nearest prototype classifies a sample, or the client's own head.
"""

from torch import nn
from typing_extensions import override

from lightfed.core.classes import ByClass
from lightfed.core.cohort import DataSpec, blank
from lightfed.models.prototypes import ClassClient, FedProtoClient, Inference
from lightfed.models.split import split


class FedProto(ByClass):
    """L = CE(logits, y) + weight MSE(z, prototype of y)."""

    def __init__(self, weight: float = 1.0, inference: Inference = "prototypes") -> None:
        """Prototypes.

        Args:
            weight: lambda, of the distance to the prototype.
            inference: By the nearest prototype, or by the head.
        """
        super().__init__(weight)
        self.inference: Inference = inference

    @override
    def client(self, net: nn.Module, data: DataSpec) -> ClassClient:
        private = split(net, blank(data, samples=2))
        return FedProtoClient(
            private, data.num_classes, weight=self.weight, inference=self.inference
        )
