"""The client of MOON: a network whose representations are compared with those of frozen models.

Li, He, Song: Model-Contrastive Federated Learning. CVPR 2021. https://arxiv.org/abs/2103.16257
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from lightfed_kernels import Entry
from torch import Tensor, nn

from lightfed.models.split import SplitNetwork
from lightfed.models.substitution import Substitution


class Contrastive(SplitNetwork):
    """head(z), z = extractor(x), where z learns to be near one model's z and far from others'.

    The other models are frozen: the received model first, and then the client's previous ones. A
    session begins with `freeze`. Outside of sessions the loss in evaluation mode has no contrast.

    Args:
        network: The network, in two parts.
        mu: Weight of the contrast.
        temperature: tau, which divides the similarities.
        most: The largest number of frozen models.

    Attributes:
        models: The number of frozen models that the session has. With fewer than two there is no
            contrast. It is the same for all clients that train side by side.
        rows_besides: The rows that a client takes besides its own, for the estimate of a pack.
        in_session: () bool, whether the frozen models are those of a session that is under way.
    """

    packs = True
    packs_losses = True
    in_session: Tensor

    def __init__(self, network: SplitNetwork, *, mu: float, temperature: float, most: int) -> None:
        super().__init__(network.extractor, network.head, feature_dim=network.feature_dim)
        self.mu = mu
        self.temperature = temperature

        # Before the first session the extractor itself stands in for all frozen models, so that a
        # trial of packs computes a contrast.
        self.models = most
        self.rows_besides = most
        self.frozen = nn.ModuleList(FrozenTensors() for _ in range(most))
        self._names: list[str] = []
        self._entries: list[Entry] = []
        self._substitution: Substitution | None = None

        # Not persistent, so that it is False again after every session.
        self.register_buffer("in_session", torch.tensor(False), persistent=False)

    def make_room(
        self, entries: Sequence[Entry], names: Sequence[str], device: torch.device
    ) -> None:
        """Make room for the tensors of frozen models.

        Args:
            entries: Where the extractor's tensors lie in a row.
            names: Their names within the extractor.
            device: The compute device.
        """
        self._entries = [*entries]
        self._names = [*names]
        for model in self._frozen_models():
            model.make_room([entry.shape for entry in entries], device)

    def freeze(self, rows: Sequence[Tensor]) -> None:
        """Begin a session: copy the extractor's tensors from the rows, (P,) each, of models."""
        self.models = len(rows)
        for model, row in zip(self._frozen_models(), rows, strict=False):
            model.copy_(row, self._entries)
        self.in_session.fill_(True)
        # A callback may have given the extractor other layers since the last session.
        self._substitution = None

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the loss by labels, "hard", and the weighted "contrast", if there is one.

        Args:
            x: Samples (B, ...).
            y: Labels (B,). Samples with the label -100 have no weight.
        """
        z = self.extractor(x)
        losses = {"hard": F.cross_entropy(self.head(z), y)}
        if self.models < 2 or not (self.training or self.in_session):
            return losses

        similarities = [F.cosine_similarity(z, frozen_z) for frozen_z in self.frozen_features(x)]
        logits = torch.stack(similarities, 1) / self.temperature  # (B, models)

        # -log of the softmax at the received model, the first one: a cross-entropy with its index.
        received = y.clamp(max=0)  # 0, or -100
        losses["contrast"] = self.mu * F.cross_entropy(logits, received)
        return losses

    def frozen_features(self, x: Tensor) -> list[Tensor]:
        """Return z (B, feature_dim) of samples (B, ...) in each frozen model."""
        if self._substitution is None:
            self._substitution = Substitution(self.extractor, self._names)
        models = [model.tensors() for model in self._frozen_models()[: self.models]]
        return self._substitution.outputs(models, x)

    def frozen_tensors(self) -> list[dict[str, Tensor]]:
        """Return the extractor's tensors by name, in each frozen model of the session."""
        models = self._frozen_models()[: self.models]
        return [dict(zip(self._names, model.tensors(), strict=True)) for model in models]

    def _frozen_models(self) -> list["FrozenTensors"]:
        return list(self.frozen)  # type: ignore[arg-type]


class FrozenTensors(nn.Module):
    """The tensors of a frozen model, in an order. Clients that train side by side have their own.

    They are buffers, because a pack stacks those of its clients; not persistent, because they
    belong to no row.
    """

    packs = True

    def make_room(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        """Make room for tensors of these shapes."""
        for position, shape in enumerate(shapes):
            self.register_buffer(str(position), torch.zeros(shape, device=device), persistent=False)

    def copy_(self, row: Tensor, entries: Sequence[Entry]) -> None:
        """Copy the tensors at these entries of a row, (P,)."""
        views = []
        for entry in entries:
            elements = row[entry.offset : entry.offset + entry.numel]
            views.append(elements.view(entry.shape))
        if views:  # an extractor may have no tensors
            torch._foreach_copy_(self.tensors(), views)

    def tensors(self) -> list[Tensor]:
        """Return the tensors."""
        return list(self._buffers.values())  # type: ignore[arg-type]
