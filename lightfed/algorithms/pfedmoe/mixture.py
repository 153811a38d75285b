"""The client of pFedMoE: two experts, a gate that weights them per sample, one head.

Yi, Yu, Ren, Zhang, Wang, Liu, Li: pFedMoE: Data-Level Personalization with Mixture of Experts for
Model-Heterogeneous Personalized Federated Learning. 2024. https://arxiv.org/abs/2402.01350
"""

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.algorithms.class_means import ClassSums
from lightfed.models.split import feature_dim
from lightfed.utils.errors import require


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


class Gate(nn.Module):
    """The gating network of section 4.3.

    Flatten, switchable normalisation, linear, batch normalisation, sigmoid, linear, batch
    normalisation, softmax. The paper leaves the units of the first linear layer open. `hidden` is
    their number, m. A UserError with the key "input_shape" if a sample is a single number.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        *,
        hidden: int = 128,
        last_norm: bool = True,
    ) -> None:
        super().__init__()
        inputs = prod(input_shape)
        found = f"samples of {inputs} number, which the gate cannot normalise"
        require(inputs >= 2, "input_shape", found, "use data of at least two")
        self.layers = nn.Sequential(
            nn.Flatten(),
            SwitchNorm1d(inputs),
            nn.Linear(inputs, hidden),
            nn.BatchNorm1d(hidden),
            nn.Sigmoid(),
            nn.Linear(hidden, 2),
            nn.BatchNorm1d(2) if last_norm else nn.Identity(),
            nn.Softmax(dim=1),
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, 2) weights, shared and private, with sum 1; B > 1 in training."""
        return self.layers(x)


class FixedGate(nn.Module):
    """A gate with constant weights: that of the shared expert; the private one has the rest."""

    def __init__(self, general: float) -> None:
        super().__init__()
        self.general = general

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, 2)."""
        return x.new_tensor((self.general, 1 - self.general)).expand(len(x), 2)


class MixtureClient(nn.Module):
    """A client of pFedMoE, section 4.1.

        (a_G, a_F) = H(x),  z = a_G G(x) + a_F F_ex(x),  logits = F_hd(z)

    One backward pass of the cross-entropy updates everything. The parts may have separate learning
    rates: shared (eta_theta), extractor and head (eta_omega, which the paper sets to eta_theta),
    gate (eta_phi).

    Args:
        extractor: F_ex, private: (B, ...) -> (B, d).
        head: F_hd, private: (B, d) -> (B, C) logits.
        shared: G, the small extractor that is sent: (B, ...) -> (B, d).
        gate: H, private: (B, ...) -> (B, 2), the weights of the shared and the private expert.
        batch: (B, ...) inputs of any values, to determine the feature sizes.

    Attributes:
        gate_sums: (C, 3) float64 buffer: `figures` adds the gate's weights by class, and the
            numbers of samples; None to disable.

    Raises:
        UserError: key "shared"; the extractors give different numbers of features.
    """

    clipped_separately = ("shared", "gate")
    gate_sums: Tensor | None

    def __init__(
        self,
        extractor: nn.Module,
        head: nn.Module,
        shared: nn.Module,
        gate: nn.Module,
        *,
        batch: Tensor,
    ) -> None:
        super().__init__()
        own, common = feature_dim(extractor, batch), feature_dim(shared, batch)
        found = f"its extractor gives {common} features, but the client's gives {own}"
        require(own == common, "shared", found, "use extractors with the same number of features")
        self.extractor, self.head, self.shared, self.gate = extractor, head, shared, gate
        self.register_buffer("gate_sums", None, persistent=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, C) logits of the full mixture."""
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, d) mixed representations."""
        general, personal = self.gate(x).unsqueeze(-1).unbind(1)  # (B, 1) each
        # z = a_G z_G + a_F z_F
        return general * self.shared(x) + personal * self.extractor(x)

    def figures(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The mean weight of the shared expert in a batch, "gate_general", for labels (B,)."""
        weights = self.gate(x)
        if self.gate_sums is not None:
            class_sums(self.gate_sums).add(y, weights)
        return {"gate_general": weights[:, 0].mean()}

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The cross-entropy of a batch (B, ...) with labels (B,), "mixture".

        A ValueError for a single sample in training, which normalisation rejects.
        """
        return {"mixture": F.cross_entropy(self(x), y)}


def class_sums(gate_sums: Tensor) -> ClassSums:
    """A view of (C, 3): sums of the gate's weights, and numbers of samples."""
    return ClassSums(gate_sums[:, :2], gate_sums[:, 2])
