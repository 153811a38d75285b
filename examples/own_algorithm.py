"""An algorithm outside the package: FedAvgM, federated averaging with momentum at the server.

Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification. 2019. https://arxiv.org/abs/1909.06335
"""

import torch

import lightfed as lf


class FedAvgM(lf.Algorithm):
    """v <- beta v + (w - mean of w_k); w <- w - v."""

    def __init__(self, beta: float = 0.9) -> None:
        """Set the momentum `beta`, in 0..1."""
        super().__init__()
        self.beta = beta

    def setup(self, fed):
        """Server state: the model, and momentum of its parameters; checkpoints hold both."""
        fed.one_layout("FedAvgM needs one for all")
        self.model = fed.new_model()
        self.register_buffer("velocity", torch.zeros_like(self.model.parameters_row))

    def round(self, fed, t):
        """One round."""
        clients, w = fed.participants(t), self.model.parameters_row  # a view
        before = w.clone()
        fed.send(self.model, clients)  # w_k <- w
        fed.train(clients, t)
        fed.merge(clients, into=self.model)  # w <- the mean of w_k; so are BatchNorm statistics
        self.velocity.mul_(self.beta).add_(before - w)
        w.copy_(before - self.velocity)
