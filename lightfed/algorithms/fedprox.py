"""FedProx: federated averaging with a proximal term in the clients' objective.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks. MLSys
2020. https://arxiv.org/abs/1812.06127

    h_k(w; w_t) = F_k(w) + mu / 2 ||w - w_t||^2                                    (eq. 2)

The number of local epochs or steps sets how inexact the paper's gamma-inexact solutions are, as in
its experiments. The proximal gradient is added before clipping: what is clipped is the gradient of
the whole local objective h_k.

Deviation, as in the released code: clients are drawn uniformly and weighted by samples. Algorithm 2
draws them with probability p_k and takes the plain mean.
"""

from lightfed.algorithms.fedavg import FedAvg
from lightfed.api.fleet import Weights
from lightfed.local.penalties import Pull
from lightfed.utils.bounds import Weight


class FedProx(FedAvg):
    """Every client minimizes h_k(w; w_t) = F_k(w) + mu / 2 ||w - w_t||^2 (eq. 2)."""

    takes_late = True

    def __init__(self, mu: Weight, weights: Weights = "samples") -> None:
        """Set how strongly clients are pulled to the server's model.

        Args:
            mu: Proximal weight, eq. (2); 0 is FedAvg.
            weights: Weigh the participants by their number of samples, or all alike (uniform).
        """
        super().__init__(weights)
        self.local_penalty = Pull(mu)  # grad h_k = grad F_k + mu (w - w_t)
