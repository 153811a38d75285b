"""The client of pFedMoE: two experts, a gate that weights them per sample, one head.

Yi, Yu, Ren, Zhang, Wang, Liu, Li: pFedMoE: Data-Level Personalization with Mixture of Experts for
Model-Heterogeneous Personalized Federated Learning. 2024. https://arxiv.org/abs/2402.01350
"""

from collections.abc import Sequence
from math import prod

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.models.composites.class_means import ClassSums
from lightfed.models.composites.split import feature_dim
from lightfed.models.composites.switch_norm import SwitchNorm1d
from lightfed.utils.errors import require


class Gate(nn.Module):
    """The gating network of section 4.3.

    Flatten, switchable normalisation, linear, batch normalisation, sigmoid, linear, batch
    normalisation, softmax. The paper leaves the units of the first linear layer open. `hidden` is
    their number, m. For `debias` see SwitchNorm1d. A UserError with the key "input_shape" if a
    sample is a single number.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        *,
        hidden: int = 128,
        debias: bool = True,
        last_norm: bool = True,
    ) -> None:
        super().__init__()
        inputs = prod(input_shape)
        found = f"samples of {inputs} number, which the gate cannot normalise"
        require(inputs >= 2, "input_shape", found, "use data of at least two")
        self.layers = nn.Sequential(
            nn.Flatten(),
            SwitchNorm1d(inputs, debias=debias),
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

    clipped_apart = ("shared", "gate")
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
