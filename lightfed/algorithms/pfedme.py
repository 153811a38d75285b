"""pFedMe: personal models as Moreau envelopes around a global one.

Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020.
https://arxiv.org/abs/2006.08848

    theta_i ~ argmin f_i(theta; batch) + lambda / 2 ||theta - w_i||^2,   K steps of the optimiser
    w_i <- w_i - eta lambda (w_i - theta_i)                              after each batch
    w <- (1 - beta) w + beta sum_{i in S} n_i / n w_i

All clients receive w and train in every round; those that are drawn send w_i. theta_i starts at w
and goes on from batch to batch. R is local_steps, or a number of epochs. BatchNorm statistics of
w_i move like its weights. Deviations: the released code also decays theta (weight_decay 0.001 of
the optimiser), and reports w_i as the personal model.
"""

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.api.algorithm import Algorithm, require_argument
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.hooks import SessionContext
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Count, Positive


class PFedMe(Algorithm):
    """The server averages w_i; a client's own model is theta_i."""

    stateful = True  # a client's row is theta_i
    side_by_side = True
    no_server_step = "pFedMe has a step of its own, beta"
    holds = "its personal model"
    model: ServerModel

    def __init__(
        self,
        lam: Positive = 15.0,
        inner_steps: Count = 5,
        lr: Positive = 0.005,
        beta: Positive = 1.0,
        weights: Weights = "samples",
    ) -> None:
        """Set the envelope. The optimiser's learning rate is that of theta.

        Args:
            lam: lambda, the pull to w_i.
            inner_steps: K.
            lr: eta, of w_i; eta lambda is at most 1.
            beta: Of the server's step; 1 takes the mean, and more extrapolates.
            weights: Of the clients in the mean: by samples, or uniform.
        """
        super().__init__()
        require_argument(lr * lam <= 1, "lr", lr, f"give at most 1 / lam, {1 / lam:g}")
        self.lam, self.inner_steps, self.lr = lam, inner_steps, lr
        self.beta, self.weights = beta, weights

    @override
    def setup(self, fed: Fleet) -> None:
        fed.one_layout("pFedMe needs one for all")
        self.model = fed.new_model()
        self.local = fed.keep("local", durable=False)  # w_i, and statistics

    @override
    def round(self, fed: Fleet, t: int) -> None:
        everyone, drawn = list(range(fed.clients)), fed.participants(t)
        fed.send(self.model, everyone)  # theta_i <- w
        fed.train(everyone, t, repeat=self.inner_steps)
        fed.charge(drawn, up=4 * self.model.layout.floats.numel)
        before = (w := self.model.parameters_row).clone()
        fed.average(self.local, drawn, into=self.model.floats, weights=self.weights)
        w.copy_(before + self.beta * (w - before))

    @override
    def session_start(self, s: SessionContext) -> None:
        self.local[s.client] = s.row.floats  # w_i <- w

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        if s.step and s.step % self.inner_steps == 0:  # the last batch is done
            self.session_end(s)
        gradient.add_(s.parameters - self.local[s.client][: len(gradient)], alpha=self.lam)

    @override
    def session_end(self, s: SessionContext) -> None:
        # w_i <- w_i - eta lambda (w_i - theta_i)
        self.local[s.client] = torch.lerp(self.local[s.client], s.row.floats, self.lr * self.lam)
