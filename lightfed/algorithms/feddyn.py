"""FedDyn: a client's objective is corrected by what its earlier sessions have learned.

Acar, Zhao, Navarro, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic
Regularization. ICLR 2021. https://arxiv.org/abs/2111.04263

    w_k ~ argmin F_k(w) + alpha_k <w, g_k> + alpha_k / 2 ||w - theta||^2,   g_k <- g_k + w_k - theta
    theta <- mean_{k in S} w_k + 1 / N sum_{all k} g_k

As in the released code:

- Clients keep g_k, which is -1 / alpha_k times the paper's gradient.
- alpha_k = alpha mean(n) / n_k: clients with few samples are held more strongly. With equal n_k
  this is the paper's rule.
- The gradient with alpha_k (g_k - theta) is clipped (its norm at 10, by
  `trainer.gradient_clip_val`), and alpha_k w is added afterwards.

BatchNorm statistics are plain means, without memory.

Deviation: the released code reports the mean of the w_k. Here the model that is sent, theta, is
tested.
"""

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.one_model import OneModel
from lightfed.api.fleet import Fleet
from lightfed.local.penalties import LinearTerm
from lightfed.utils.bounds import Positive


class FedDyn(OneModel):
    """The mean of the participants' models, plus the mean of all clients' memories.

    Attributes:
        h: (P,) the mean of g_k over all N clients.
    """

    takes_late = True
    no_server_step = "the server's model has the memories of all clients in it"
    h: Tensor

    def __init__(self, alpha: Positive = 0.01) -> None:
        """Set the regularization.

        Args:
            alpha: Its strength for a client with as many samples as the mean client.
        """
        super().__init__()
        self.memory = LinearTerm(alpha)  # its memories are the g_k
        self.local_penalty = self.memory

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)  # theta
        self.register_buffer("h", torch.zeros_like(self.model.parameters_row))

    @override
    def round(self, fed: Fleet, t: int) -> None:
        theta = self.model.parameters_row
        before = theta.clone()

        clients = fed.participants(t)  # S
        fed.send(self.model, clients)
        fed.train(clients, t)

        merged = fed.merge(clients, into=self.model, weights="uniform")  # mean_{k in S} w_k
        # h <- h + 1 / N sum_{k in S} (w_k - theta)
        mean_change = theta - before
        if fed.keeps_late:
            # In the mean of the models late ones weigh less. h stays the mean of all g_k.
            fed.average(self.memory.changes, merged, into=mean_change, in_full=True)
        self.h += len(merged) / len(fed.seen) * mean_change
        theta += self.h
