"""FML: federated mutual learning of a private network and a shared one.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu: Federated Mutual Learning. 2020.
https://arxiv.org/abs/2006.16765

    L_F = alpha CE(F) + (1 - alpha) KL(G || F)
    L_G = beta CE(G) + (1 - beta) KL(F || G)
    G <- sum_k n_k / n G_k

The private network F and the shared one G learn from the labels and from each other. The shared one
is sent, and averaged by samples. The private one is evaluated. In a divergence the other network's
output is a constant target, and the divergence is the mean over samples, as in the paper's
formulas; `form: htfllib` follows the HtFLlib library.
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
    takes_late = True

    def __init__(
        self,
        shared: NetworkFactory,
        alpha: Part = 0.5,
        beta: Part = 0.5,
        weights: Weights = "samples",
        form: mutual.Form = "separate",
    ) -> None:
        """Set the mutual learning.

        Args:
            shared: G, the network that is sent.
            alpha: Weight of the labels in the private network's loss.
            beta: Weight of the labels in the shared network's loss.
            weights: Weights of the participants in the mean: by samples, or uniform.
            form: Form of mutual learning: separate losses, or htfllib's.
        """
        super().__init__(shared, weights)
        self.alpha = alpha
        self.beta = beta
        self.form: mutual.Form = form

    @override
    def composite(self, private: nn.Module, shared: nn.Module, data: DataSpec) -> nn.Module:
        return mutual.FML(private, shared, alpha=self.alpha, beta=self.beta, form=self.form)
