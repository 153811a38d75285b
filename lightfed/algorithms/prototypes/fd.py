"""FD: federated distillation; clients exchange the mean logits of each class.

Jeong, Oh, Kim, Park, Bennis, Kim: Communication-Efficient On-Device Machine Learning: Federated
Distillation and Augmentation under Non-IID Private Data. 2018. https://arxiv.org/abs/1811.11479

    L = CE(logits, y) + lambda CE(logits, softmax(F_y))
    F_c <- mean over the participants that hold class c of their mean logits of that class

The mean teaches all participants in the next round. A class that no participant holds keeps its
logits.

Deviations: the mean is over all participants, while the paper leaves out the one that learns from
it. The target is the softmax of the mean logits (`target: raw` is HtFLlib's code). Data
augmentation by a generative model, the paper's second part, is not implemented.
"""

from typing import Any

from torch import nn
from typing_extensions import override

from lightfed.algorithms.prototypes.prototype import ClassClient, FDClient, Target
from lightfed.algorithms.prototypes.prototypes import ByClass
from lightfed.models.build import DataSpec
from lightfed.utils.bounds import Weight


class FD(ByClass):
    """L = CE(logits, y) + weight CE(logits, softmax(mean logits of y))."""

    moments = ("trained", "aggregated")  # the same model: logits teach, but do not classify

    def __init__(self, weight: Weight = 1.0, target: Target = "softmax", **by_class: Any) -> None:
        """Set the distillation.

        Args:
            weight: lambda, the weight of the distillation.
            target: The softmax of the mean logits, or the logits themselves, as in HtFLlib.
            **by_class: See ByClass.
        """
        super().__init__(weight, **by_class)
        self.target: Target = target

    @override
    def client(self, net: nn.Module, data: DataSpec) -> ClassClient:
        return FDClient(net, data.num_classes, weight=self.weight, target=self.target)
