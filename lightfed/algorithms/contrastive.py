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
    """head(z), z = extractor(x), where z learns to be near one model's z and far from others'.

    Args:
        network: The network, in two parts.
        mu: Weight of the contrast.
        temperature: tau, which divides the similarities.

    Attributes:
        frozen: The extractor's tensors by name, in the received model first and then in each of the
            client's previous models. With fewer than two models there is no contrast.
    """

    frozen: Sequence[Mapping[str, Tensor]] = ()

    def __init__(self, network: SplitNetwork, *, mu: float, temperature: float) -> None:
        super().__init__(network.extractor, network.head, feature_dim=network.feature_dim)
        self.mu = mu
        self.temperature = temperature

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the loss by labels, "hard", and the weighted "contrast", if there is one.

        Args:
            x: Samples (B, ...).
            y: Labels (B,).
        """
        z = self.extractor(x)
        losses = {"hard": F.cross_entropy(self.head(z), y)}
        if len(self.frozen) < 2:
            return losses

        similarities = []
        for tensors in self.frozen:
            frozen_z = self.representation_of(tensors, x)
            similarities.append(F.cosine_similarity(z, frozen_z))
        logits = torch.stack(similarities, 1) / self.temperature  # (B, models)

        # -log of the softmax at the received model, the first one: a cross-entropy with its index.
        received = torch.zeros_like(y)
        losses["contrast"] = self.mu * F.cross_entropy(logits, received)
        return losses

    @torch.no_grad()
    def representation_of(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return z (B, feature_dim) of samples (B, ...) in a frozen model, in evaluation mode.

        Args:
            tensors: The extractor's tensors by name.
            x: The samples.
        """
        with evaluating(self.extractor):
            z: Tensor = functional_call(self.extractor, dict(tensors), (x,))
        return z
