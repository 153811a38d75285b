"""FML: federated mutual learning of a private network and a shared one.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu: Federated Mutual Learning. 2020.
https://arxiv.org/abs/2006.16765

Both networks learn from the labels and from each other; the small one is sent and averaged by
samples. The other network's output is a constant target, and a divergence is the mean over samples,
as in the paper's formulas; `form: htfllib` follows the HtFLlib library. The private network is
evaluated.
"""

from torch import nn
from typing_extensions import override

from lightfed.algorithms.pfedmoe import mutual
from lightfed.algorithms.pfedmoe.personal_shared import NetworkFactory, PersonalShared
from lightfed.api.fleet import Weights
from lightfed.models.build import DataSpec
from lightfed.utils.bounds import Part


class FML(PersonalShared):
    """L_F = alpha CE(F) + (1 - alpha) KL(G || F), and likewise L_G with beta."""

    holds = "its private network"

    def __init__(
        self,
        shared: NetworkFactory,
        alpha: Part = 0.5,
        beta: Part = 0.5,
        weights: Weights = "samples",
        form: mutual.Form = "separate",
    ) -> None:
        """Mutual learning.

        Args:
            shared: G, the network that is sent.
            alpha: Weight of the labels in the private network's loss.
            beta: Weight of the labels in the shared network's loss.
            weights: Of the participants in the mean: by samples, or uniform.
            form: Of mutual learning: separate losses, or htfllib's.
        """
        super().__init__(shared, weights)
        self.alpha, self.beta = alpha, beta
        self.form: mutual.Form = form

    @override
    def composite(self, private: nn.Module, shared: nn.Module, data: DataSpec) -> nn.Module:
        return mutual.FML(private, shared, alpha=self.alpha, beta=self.beta, form=self.form)
