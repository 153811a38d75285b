"""Terms of the clients' objective besides their loss, for `model.local_penalty`.

They go with any method that does not refuse them: where the parameters of a client change places
between rounds, what it remembers would belong to others. One of your own derives from
`LocalPenalty` and overrides the hooks that it needs.
"""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.contrastive import Contrastive
from lightfed.local.client_group import GroupState
from lightfed.local.hooks import LocalPenalty, SessionContext
from lightfed.local.optimizer import Proximal
from lightfed.models.build import DataSpec, blank
from lightfed.models.client_module import ClientModule
from lightfed.models.split import split
from lightfed.utils.bounds import Count, Positive, Weight
from lightfed.utils.errors import require

KEY = "model.local_penalty.init_args"


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


class Contrast(LocalPenalty):
    """A client's representations stay near its received model's, and leave its last one's (MOON).

    mu -log [ e^(cos(z, z_g) / tau) / (e^(cos(z, z_g) / tau) + sum_p e^(cos(z, z_p) / tau)) ]

    z_g is from the received model and z_p from the client's previous ones, all frozen and in
    evaluation mode, with their BatchNorm statistics. Sessions of the first round have no contrast.
    A client that trains later for the first time has held its initial model until then. z is
    what the network's head takes: the output of its `extractor` or, without one, the input of the
    linear layer that gives the logits. With several previous models a client's last one counts
    again for each round that it has missed.
    """

    stateful = True

    def __init__(self, mu: Weight = 1.0, temperature: Positive = 0.5, pool: Count = 1) -> None:
        """Set the contrast.

        Args:
            mu: Its weight in a client's loss.
            temperature: tau.
            pool: Number of previous models that a client keeps.
        """
        self.mu, self.temperature, self.pool = mu, temperature, pool

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        client = ClientModule.of(module, method="a contrast")
        plain = not (hasattr(client.net, "losses") or client.net._forward_hooks)
        found, fix = "a contrast, and the method changes losses or logits too", "choose another"
        require(plain, "model.local_penalty", found, fix)
        network = split(client.net, blank(data, samples=2), key="model.clients")
        client.net = Contrastive(network, mu=self.mu, temperature=self.temperature)

    @override
    def setup(self, fed: Any) -> None:
        self.previous = fed.keep("previous")  # (models, P), the newest last
        self.last = fed.keep("last round")  # of the client's sessions
        for state in fed.groups:
            state.flops *= 1 + (1 + self.pool) / state.passes  # of the frozen models

    @override
    def session_start(self, s: SessionContext) -> None:
        net: Any = s.module.net
        layout = s.group.layout
        models = [s.row.floats.clone(), *self._pool(s.client, s.round, s.group)]
        prefix = "net.extractor."
        net.frozen = [
            {name.removeprefix(prefix): v for name, v in each.items() if name.startswith(prefix)}
            for each in map(layout.floats.views, models)
        ]

    def _pool(self, client: int, t: int, group: GroupState) -> Sequence[Tensor]:
        """(P,) the client's model after each of the last rounds, the newest last."""
        if client not in self.previous:
            initial = group.initial.floats.to(group.store.device)
            return [initial] * min(max(0, t), self.pool)
        found = [*self.previous[client]]
        missed = max(0, t - 1 - int(self.last[client]))
        return (found + found[-1:] * min(missed, self.pool))[-self.pool :]

    @override
    def trained(self, fed: Any, clients: Sequence[int], t: int) -> None:
        for k in fed.mine(clients):
            models = [*self._pool(k, t, fed.state(k)), fed.row(k).floats.to(fed.device)]
            self.previous[k] = torch.stack(models[-self.pool :])
            self.last[k] = torch.tensor(t)
