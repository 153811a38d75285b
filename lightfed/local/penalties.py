"""Terms of the clients' objective besides their loss, for `model.local_penalty`.

They can be added to any method that does not refuse them. A method refuses those that remember
something of a client if its clients' parameters change places between rounds: what is remembered
would then belong to other parameters. A penalty of your own derives from `LocalPenalty` and
overrides the hooks that it needs.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightfed.local.hooks import LocalPenalty, SessionContext
from lightfed.local.optimizer import Proximal
from lightfed.utils.bounds import Positive, Weight


class Pull(LocalPenalty):
    """mu / 2 ||w - w_0||^2, with w_0 the parameters at the start of the session.

    The proximal term of FedProx (Li et al., MLSys 2020, eq. 2). Its gradient is added before
    clipping.
    """

    side_by_side = True

    def __init__(self, mu: Weight) -> None:
        """Set the pull.

        Args:
            mu: Weight of the term; 0 for none.
        """
        self.mu = mu

    @override
    def proximal(self, s: SessionContext) -> Proximal | None:
        if self.mu == 0:
            return None
        return Proximal(s.received, self.mu)


class LinearTerm(LocalPenalty):
    """alpha_k <w, g_k> + alpha_k / 2 ||w - w_0||^2, then g_k <- g_k + w_k - w_0.

    The regularizer of FedDyn (Acar et al., ICLR 2021), with the signs and the scale of its released
    code: there alpha_k = alpha mean(n) / n_k, which holds clients with few samples more strongly.
    As in that code, alpha_k (g_k - w_0) joins the gradient before clipping and alpha_k w after it,
    like a weight decay. A session that the server does not use leaves g_k as it was.
    """

    side_by_side = True
    stateful = True

    def __init__(self, alpha: Positive = 0.01) -> None:
        """Set the regularization.

        Args:
            alpha: Its weight for a client with as many samples as the mean client.
        """
        self.alpha = alpha

    @override
    def setup(self, fed: Any) -> None:
        # g_k. FedDyn's server has their mean.
        self.memories = fed.keep("memory", with_server=True)

        # w_k - w_0 of this round, until it is known whether the server uses the session.
        self.changes = fed.keep("memory change", durable=False)

        samples = [fed.data.num_samples(client) for client in fed.seen]
        self.mean_samples = sum(samples) / len(samples)

    def weight(self, s: SessionContext) -> float:
        """Return alpha_k, the weight of the term for a session's client."""
        of_mean_client: float = self.alpha * self.mean_samples
        return of_mean_client / float(s.fed.data.num_samples(s.client))

    @override
    def decay_after_clipping(self, s: SessionContext) -> float:
        return self.weight(s)  # alpha_k w

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        memory = self.memories.get(s.client, 0.0)
        gradient.add_(memory - s.received, alpha=self.weight(s))

    @override
    def session_end(self, s: SessionContext) -> None:
        self.changes[s.client] = s.parameters - s.received

    @override
    def counted(self, fed: Any, clients: Sequence[int], t: int) -> None:
        for k in fed.mine(clients):
            self.memories[k] = self.memories.get(k, 0.0) + self.changes[k]
