"""Terms of the clients' objective besides their loss, for `model.local_penalty`.

They go with any method that does not refuse them: where the parameters of a client change places
between rounds, what it remembers would belong to others. One of your own derives from
`LocalPenalty` and overrides the hooks that it needs.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightfed.local.hooks import LocalPenalty, SessionContext
from lightfed.local.optimizer import Proximal
from lightfed.utils.bounds import Positive, Weight


class Pull(LocalPenalty):
    """mu / 2 ||w - w_0||^2, w_0 the parameters at the start of the session (FedProx).

    The gradient of the pull is added before clipping.
    """

    side_by_side = True

    def __init__(self, mu: Weight) -> None:
        """Set the pull.

        Args:
            mu: Its weight; 0 is none.
        """
        self.mu = mu

    @override
    def proximal(self, s: SessionContext) -> Proximal | None:
        return Proximal(s.received, self.mu) if self.mu else None


class LinearTerm(LocalPenalty):
    """alpha_k <w, g_k> + alpha_k / 2 ||w - w_0||^2, then g_k <- g_k + w_k - w_0 (FedDyn).

    alpha_k = alpha mean(n) / n_k: clients with few samples are held more strongly. As in FedDyn's
    released code, alpha_k (g_k - w_0) joins the gradient before clipping and alpha_k w after it, as
    a weight decay. A session that the server does not use changes no g_k.
    """

    side_by_side = True
    stateful = True

    def __init__(self, alpha: Positive = 0.01) -> None:
        """Set the regularisation.

        Args:
            alpha: Of a client with as many samples as the mean client.
        """
        self.alpha = alpha

    @override
    def setup(self, fed: Any) -> None:
        # g_k, of which FedDyn's server has the mean.
        self.memories = fed.keep("memory", with_server=True)
        self.changes = fed.keep("memory change", durable=False)  # w_k - w_0
        self.mean_samples = sum(map(fed.data.num_samples, range(fed.clients))) / fed.clients

    def weight(self, s: SessionContext) -> float:
        """alpha_k."""
        of_mean_client: float = self.alpha * self.mean_samples
        return of_mean_client / float(s.fed.data.num_samples(s.client))

    @override
    def decay_after_clipping(self, s: SessionContext) -> float:
        return self.weight(s)  # alpha_k w

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        g = self.memories.get(s.client, 0.0)
        gradient.add_(g - s.received, alpha=self.weight(s))

    @override
    def session_end(self, s: SessionContext) -> None:
        self.changes[s.client] = s.parameters - s.received

    @override
    def counted(self, fed: Any, clients: Sequence[int], t: int) -> None:
        for k in fed.mine(clients):
            self.memories[k] = self.memories.get(k, 0.0) + self.changes[k]
