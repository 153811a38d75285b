"""FedProto: clients exchange prototypes, the mean features of each class.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: Federated Prototype Learning across Heterogeneous
Clients. AAAI 2022. https://arxiv.org/abs/2105.00243

    L = CE(logits, y) + lambda MSE(z, C_y)
    C_c <- mean over the participants that hold class c of their mean features of that class

A client's features z are pulled towards the server's prototype C of their class. Clients may differ
in everything but the number of features. The nearest prototype or the client's own head classifies
a sample. An evaluation also reports the other rule's accuracy, as accuracy_head or
accuracy_prototypes.

Deviations: the server's mean is not weighted, as in the released code; eq. (6) of the paper weights
clients by their samples of the class. A prototype of a class that no participant holds stays as it
is. A client's own prototype is the mean over all batches of a session, each before its step, as in
HtFLlib.
"""

from typing import Any

from torch import nn
from typing_extensions import override

from lightfed.algorithms.prototypes.prototype import ClassClient, FedProtoClient, Inference
from lightfed.algorithms.prototypes.prototypes import ByClass
from lightfed.models.build import DataSpec, blank
from lightfed.models.split import split
from lightfed.utils.bounds import Weight


class FedProto(ByClass):
    """L = CE(logits, y) + weight MSE(z, prototype of y)."""

    deployed_with = (
        "with `inference: prototypes`, classify a sample by the nearest to its features, the input "
        "of the last linear layer, of the prototypes `common` that `common_seen` has, in the file "
        "`besides`"
    )

    def __init__(
        self, weight: Weight = 1.0, inference: Inference = "prototypes", **by_class: Any
    ) -> None:
        """Set the prototypes.

        Args:
            weight: lambda, the weight of the distance to the prototype.
            inference: Whether the nearest prototype or the head classifies.
            **by_class: See ByClass.
        """
        super().__init__(weight, **by_class)
        self.inference: Inference = inference

    @override
    def client(self, net: nn.Module, data: DataSpec) -> ClassClient:
        private = split(net, blank(data, samples=2))
        return FedProtoClient(
            private, data.num_classes, weight=self.weight, inference=self.inference
        )
