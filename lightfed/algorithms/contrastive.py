"""The client of MOON: a network whose representations are compared with those of frozen models.

Li, He, Song: Model-Contrastive Federated Learning. CVPR 2021. https://arxiv.org/abs/2103.16257
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from lightfed.models.split import SplitNetwork, evaluating


class Contrastive(SplitNetwork):
    """head(z), z = extractor(x); z learns to be near the received model's and far from others.

    Args:
        network: its parts.
        mu: weight of the contrast.
        temperature: of the similarities.

    Attributes:
        frozen: tensors of the extractor, by name, in the received model and then in each of the
            client's previous ones; with fewer than two models there is no contrast.
    """

    frozen: Sequence[Mapping[str, Tensor]] = ()

    def __init__(self, network: SplitNetwork, *, mu: float, temperature: float) -> None:
        super().__init__(network.extractor, network.head, feature_dim=network.feature_dim)
        self.mu, self.temperature = mu, temperature

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Of (B, ...) samples and (B,) labels: "hard", by labels, and "contrast", weighted."""
        z = self.extractor(x)
        losses = {"hard": F.cross_entropy(self.head(z), y)}
        if len(self.frozen) > 1:
            others = [self._representation(tensors, x) for tensors in self.frozen]
            alike = torch.stack([F.cosine_similarity(z, other) for other in others], 1)
            first = torch.zeros_like(y)  # the received model's z is the one to be near to
            losses["contrast"] = self.mu * F.cross_entropy(alike / self.temperature, first)
        return losses

    @torch.no_grad()
    def _representation(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """(B, feature_dim) z of a model, in evaluation mode."""
        with evaluating(self.extractor):
            z: Tensor = functional_call(self.extractor, dict(tensors), (x,))
        return z
