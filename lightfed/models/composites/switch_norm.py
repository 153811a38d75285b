"""Switchable normalisation of vectors."""

import torch
from torch import Tensor, nn
from typing_extensions import override


class SwitchNorm1d(nn.Module):
    """Normalises by a learned mixture of the statistics of a sample and of the batch.

    Luo et al. 2019, Differentiable Learning-to-Normalize, https://arxiv.org/abs/1806.10779, eq. (3)
    without instance normalisation, which does not apply to vectors:

        y = (x - m) / sqrt(v + eps) * weight + bias
        m = sum_i softmax(mean_weight)_i m_i,  v = sum_i softmax(var_weight)_i v_i,  i in {ln, bn}

    Variances are unbiased, as in the released code. That code starts its running statistics from
    zeros without correction. So for the first thousand batches a network in evaluation divides by a
    variance near 0. Here they are divided by 1 - momentum^n after n batches (mean 0 and variance 1
    before the first).

    Args:
        num_features: F, at least 2.
        eps: added to the variance.
        momentum: share of the old running statistics that remains after a batch.
        debias: correct the running statistics as above; otherwise as in the released code.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self, num_features: int, *, eps: float = 1e-5, momentum: float = 0.997, debias: bool = True
    ) -> None:
        super().__init__()
        assert num_features >= 2, "one feature has no variance"
        self.eps, self.momentum, self.debias = eps, momentum, debias
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.mean_weight = nn.Parameter(torch.ones(2))
        self.var_weight = nn.Parameter(torch.ones(2))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.zeros(num_features))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.int64))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, F) -> (B, F); a ValueError for a single sample in training."""
        batch = self._batch_statistics(x) if self.training else self._running_statistics()
        means = (x.mean(1, keepdim=True), batch[0])
        variances = (x.var(1, keepdim=True), batch[1])
        mean, variance = (
            share[0] * of_sample + share[1] * of_batch
            for share, (of_sample, of_batch) in (
                (self.mean_weight.softmax(0), means),
                (self.var_weight.softmax(0), variances),
            )
        )
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias

    def _batch_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(F,) mean and variance over the batch; also updates the running ones."""
        if len(x) < 2:
            raise ValueError(f"a batch of {len(x)} in training has no variance: {tuple(x.shape)}")
        mean, variance = x.mean(0), x.var(0)
        with torch.no_grad():
            # a lerp, which vmap would run client by client
            for running, found in ((self.running_mean, mean), (self.running_var, variance)):
                running.add_(found.to(running) - running, alpha=1 - self.momentum)
            self.num_batches_tracked += 1
        return mean, variance

    def _running_statistics(self) -> tuple[Tensor, Tensor]:
        """(F,) mean and variance over the batches so far."""
        if not self.debias:
            return self.running_mean, self.running_var
        seen = self.num_batches_tracked > 0
        weight = torch.where(seen, 1 - self.momentum**self.num_batches_tracked, 1.0)
        return self.running_mean / weight, torch.where(seen, self.running_var / weight, 1.0)
