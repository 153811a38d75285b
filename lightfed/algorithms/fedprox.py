"""FedProx: federated averaging with a proximal term in the clients' objective.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks. MLSys
2020. https://arxiv.org/abs/1812.06127

Clients are drawn uniformly and weighted by samples, as in the released code; algorithm 2 draws them
with probability p_k and takes the plain mean. The number of local epochs or steps sets the
inexactness of the paper's gamma-inexact solutions, as in its experiments. The proximal gradient is
added before clipping: clipping acts on the gradient of the local objective.
"""

from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.api.algorithm import require_argument
from lightfed.api.fleet import Weights
from lightfed.local.hooks import SessionContext


class FedProx(FedAvg):
    """Every client minimises h_k(w; w_t) = F_k(w) + mu / 2 ||w - w_t||^2 (eq. 2)."""

    side_by_side = True
    takes_late = True

    def __init__(self, mu: float, weights: Weights = "samples") -> None:
        """Set how strongly clients are pulled to the server's model.

        Args:
            mu: Proximal weight, eq. (2); 0 is FedAvg.
            weights: By the number of samples, or uniform.
        """
        super().__init__(weights)
        require_argument(mu >= 0, "mu", mu, "give a proximal weight of 0 or more")
        self.mu = mu

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        # grad h_k = grad F_k + mu (w - w_t)
        gradient.add_(s.parameters - s.received, alpha=self.mu)
