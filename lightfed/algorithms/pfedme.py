"""pFedMe: personal models as Moreau envelopes around a global one.

Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020.
https://arxiv.org/abs/2006.08848. Algorithm 1:

    theta_i ~ argmin f_i(theta; batch) + lambda / 2 ||theta - w_i||^2,   K steps of the optimizer
    w_i <- w_i - eta lambda (w_i - theta_i)                              after each batch
    w <- (1 - beta) w + beta sum_{i in S} n_i / n w_i

All clients receive w and train in every round; those that are drawn send w_i. theta_i starts at w
and goes on from batch to batch. The paper's R is local_steps, or a number of epochs. BatchNorm
statistics of w_i move like its weights.

Deviations: the released code also decays theta (weight_decay 0.001 of the optimizer), and reports
w_i as the personal model.
"""

import torch
from torch import Tensor
from typing_extensions import override

from lightfed.api.algorithm import KEY, Algorithm
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.hooks import SessionContext
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Count, Positive
from lightfed.utils.errors import UserError


class PFedMe(Algorithm):
    """The server averages w_i; a client's own model is theta_i."""

    stateful = True  # a client's row is theta_i
    side_by_side = True
    no_late = "all clients train in every round, also those whose update is under way"
    no_server_step = "pFedMe has a step of its own, beta"
    no_unseen = "all clients train in every round of pFedMe"
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
        """Set the envelope. The learning rate of theta is the optimizer's.

        Args:
            lam: lambda, the pull to w_i.
            inner_steps: K, optimizer steps on every batch.
            lr: eta, the learning rate of w_i; eta lambda is at most 1.
            beta: How far the server steps: 1 takes the mean, and more extrapolates.
            weights: Weigh the clients by their number of samples, or all alike (uniform).
        """
        super().__init__()
        if lr * lam > 1:
            # w_i would step beyond theta_i.
            raise UserError(f"{KEY}.lr", f"{lr}", f"give at most 1 / lam, {1 / lam:g}")

        self.lam = lam
        self.inner_steps = inner_steps
        self.lr = lr
        self.beta = beta
        self.weights = weights

    @override
    def setup(self, fed: Fleet) -> None:
        fed.one_layout("pFedMe needs one for all")
        self.model = fed.new_model()
        self.local = fed.keep("local", durable=False)  # w_i, and statistics

    @override
    def round(self, fed: Fleet, t: int) -> None:
        everyone = list(range(fed.clients))
        drawn = fed.participants(t)  # S
        fed.send(self.model, everyone)  # theta_i <- w
        fed.train(everyone, t, repeat=self.inner_steps)
        fed.charge(drawn, up=4 * self.model.layout.floats.numel)  # w_i

        # w <- (1 - beta) w + beta sum_i n_i / n w_i
        w = self.model.parameters_row
        before = w.clone()
        fed.average(self.local, drawn, into=self.model.floats, weights=self.weights)
        w.copy_(before + self.beta * (w - before))

    @override
    def session_start(self, s: SessionContext) -> None:
        self.local[s.client] = s.row.floats  # w_i <- w

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        # The gradient of a new batch: the K steps on the one before are done.
        if s.step > 0 and s.step % self.inner_steps == 0:
            self._step_local(s)
        w_i = self.local[s.client][: len(gradient)]
        gradient.add_(s.parameters - w_i, alpha=self.lam)

    @override
    def session_end(self, s: SessionContext) -> None:
        self._step_local(s)  # after the last batch

    def _step_local(self, s: SessionContext) -> None:
        """w_i <- w_i - eta lambda (w_i - theta_i)."""
        w_i = self.local[s.client]
        self.local[s.client] = torch.lerp(w_i, s.row.floats, self.lr * self.lam)
