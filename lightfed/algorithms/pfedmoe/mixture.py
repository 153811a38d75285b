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
from lightfed.utils.errors import UserError


class SwitchNorm1d(nn.Module):
    """Normalizes by a learned mixture of the statistics of a sample and of the batch.

    Luo et al. 2019, Differentiable Learning-to-Normalize, https://arxiv.org/abs/1806.10779, eq. (3)
    without instance normalization, which does not apply to vectors:

        y = (x - m) / sqrt(v + eps) * weight + bias
        m = sum_i softmax(mean_weight)_i m_i,  v = sum_i softmax(var_weight)_i v_i,  i in {ln, bn}

    Variances are unbiased, as in the released code.

    Deviation: that code starts its running statistics from zeros without correction. So for the
    first thousand batches a network in evaluation divides by a variance near 0. Here the running
    statistics are divided by 1 - momentum^n after n batches; before the first batch the mean is 0
    and the variance 1.

    Args:
        num_features: F, at least 2.
        eps: Added to the variance.
        momentum: Share of the old running statistics that remains after a batch.
        debias: Whether running statistics are corrected; if not, they are as in the released code.
    """

    packs = "even"  # see lightfed.packs.known_layers
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self, num_features: int, *, eps: float = 1e-5, momentum: float = 0.997, debias: bool = True
    ) -> None:
        super().__init__()
        assert num_features >= 2, "one feature has no variance"
        self.eps = eps
        self.momentum = momentum
        self.debias = debias
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.mean_weight = nn.Parameter(torch.ones(2))
        self.var_weight = nn.Parameter(torch.ones(2))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.zeros(num_features))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.int64))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return normalized samples, (B, F).

        Raises:
            ValueError: A single sample in training, which has no variance over the batch.
        """
        if self.training:
            batch_mean, batch_variance = self._batch_statistics(x)
        else:
            batch_mean, batch_variance = self._running_statistics()
        sample_mean = x.mean(1, keepdim=True)
        sample_variance = x.var(1, keepdim=True)

        mean_shares = self.mean_weight.softmax(0)  # of the sample, of the batch
        variance_shares = self.var_weight.softmax(0)
        mean = mean_shares[0] * sample_mean + mean_shares[1] * batch_mean
        variance = variance_shares[0] * sample_variance + variance_shares[1] * batch_variance
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias

    def _batch_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance over the batch, (F,) each, and update the running ones."""
        if len(x) < 2:
            raise ValueError(f"a batch of {len(x)} in training has no variance: {tuple(x.shape)}")

        mean = x.mean(0)
        variance = x.var(0)
        with torch.no_grad():
            # No `lerp_`, which `vmap` would run client by client.
            rate = 1 - self.momentum
            self.running_mean.add_(mean.to(self.running_mean) - self.running_mean, alpha=rate)
            self.running_var.add_(variance.to(self.running_var) - self.running_var, alpha=rate)
            self.num_batches_tracked += 1
        return mean, variance

    def _running_statistics(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance over the batches so far, (F,) each."""
        if not self.debias:
            return self.running_mean, self.running_var

        has_seen_any = self.num_batches_tracked > 0
        weight = torch.where(has_seen_any, 1 - self.momentum**self.num_batches_tracked, 1.0)
        variance = torch.where(has_seen_any, self.running_var / weight, 1.0)
        return self.running_mean / weight, variance


class Gate(nn.Module):
    """The gating network H of section 4.3.

    It consists of: flatten, switchable normalization, linear, batch normalization, sigmoid, linear,
    batch normalization, softmax.

    Args:
        input_shape: The shape of a sample.
        hidden: Number of units of the first linear layer, which the paper leaves open.
        last_norm: Whether it has the second batch normalization.

    Raises:
        UserError: A sample is a single number; the key is "input_shape".
    """

    packs = True

    def __init__(
        self,
        input_shape: Sequence[int],
        *,
        hidden: int = 128,
        last_norm: bool = True,
    ) -> None:
        super().__init__()
        inputs = prod(input_shape)
        if inputs < 2:
            raise UserError(
                "input_shape",
                f"samples of {inputs} number, which the gate cannot normalize",
                "use data of at least two",
            )

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
        """Return weights of the shared and the private expert, (B, 2), with sum 1.

        In training B has to be above 1.
        """
        return self.layers(x)


class FixedGate(nn.Module):
    """A gate with constant weights.

    Args:
        general: Weight of the shared expert; the private one has the rest.
    """

    packs = True

    def __init__(self, general: float) -> None:
        super().__init__()
        self.general = general

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return the weights for every sample, (B, 2)."""
        return x.new_tensor((self.general, 1 - self.general)).expand(len(x), 2)


class MixtureClient(nn.Module):
    """A client of pFedMoE, section 4.1.

        (a_G, a_F) = H(x),  z = a_G G(x) + a_F F_ex(x),  logits = F_hd(z)

    One backward pass of the cross-entropy updates everything. The parts can have separate learning
    rates: shared (eta_theta), extractor and head (eta_omega, which the paper sets to eta_theta),
    gate (eta_phi).

    Args:
        extractor: F_ex, private; maps (B, ...) to (B, d).
        head: F_hd, private; maps (B, d) to (B, C) logits.
        shared: G, the small extractor that is sent; maps (B, ...) to (B, d).
        gate: H, private; maps (B, ...) to (B, 2), the weights of the shared and the private expert.
        batch: Inputs of any values, (B, ...), from which the numbers of features are determined.

    Attributes:
        gate_sums: A buffer, (C, 3) float64, to which `figures` adds the gate's weights by class and
            the numbers of samples; None if nobody asks for them.

    Raises:
        UserError: The extractors give different numbers of features; the key is "shared".
    """

    packs = True
    packs_losses = True
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
        own = feature_dim(extractor, batch)
        common = feature_dim(shared, batch)
        if own != common:
            raise UserError(
                "shared",
                f"its extractor gives {common} features, but the client's gives {own}",
                "use extractors with the same number of features",
            )

        self.extractor = extractor
        self.head = head
        self.shared = shared
        self.gate = gate
        self.register_buffer("gate_sums", None, persistent=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the full mixture, (B, C)."""
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """Return the mixed representations, (B, d): z = a_G G(x) + a_F F_ex(x)."""
        a_G, a_F = self.gate(x).unsqueeze(-1).unbind(1)  # (B, 1) each
        return a_G * self.shared(x) + a_F * self.extractor(x)

    def figures(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the mean weight of the shared expert in a batch, "gate_general"."""
        weights = self.gate(x)
        if self.gate_sums is not None:
            class_sums(self.gate_sums).add(y, weights)
        return {"gate_general": weights[:, 0].mean()}

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the cross-entropy of a batch, "mixture".

        Raises:
            ValueError: A single sample in training, which normalization refuses.
        """
        return {"mixture": F.cross_entropy(self(x), y)}


def class_sums(gate_sums: Tensor) -> ClassSums:
    """Return a view of (C, 3) as sums of the gate's weights and numbers of samples."""
    return ClassSums(gate_sums[:, :2], gate_sums[:, 2])
