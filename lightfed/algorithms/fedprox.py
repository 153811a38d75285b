"""FedProx: federated averaging with a proximal term in the clients' objective.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks. MLSys
2020. https://arxiv.org/abs/1812.06127

Clients are drawn uniformly and weighted by samples, as in the released code; algorithm 2 draws them
with probability p_k and takes the plain mean. The number of local epochs or steps sets the
inexactness of the paper's gamma-inexact solutions, as in its experiments. The proximal gradient is
added before clipping: clipping acts on the gradient of the local objective.
"""

from lightfed.algorithms.fedavg import FedAvg
from lightfed.api.fleet import Weights
from lightfed.local.penalties import Pull
from lightfed.utils.bounds import Weight


class FedProx(FedAvg):
    """Every client minimises h_k(w; w_t) = F_k(w) + mu / 2 ||w - w_t||^2 (eq. 2)."""

    takes_late = True

    def __init__(self, mu: Weight, weights: Weights = "samples") -> None:
        """Set how strongly clients are pulled to the server's model.

        Args:
            mu: Proximal weight, eq. (2); 0 is FedAvg.
            weights: By the number of samples, or uniform.
        """
        super().__init__(weights)
        self.local_penalty = Pull(mu)  # grad h_k = grad F_k + mu (w - w_t)
