"""Clients that share a vector per class instead of weights: FD, FedProto, FedTGP.

`lightfed.algorithms` has the papers. In a session a client gathers the outputs of all its batches
and epochs, each as it was before the step on its batch.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.algorithms.class_means import ClassMeans, ClassSums, distances
from lightfed.models.split import SplitNetwork

Target = Literal["softmax", "raw"]
Inference = Literal["prototypes", "head"]


class ClassClient(nn.Module):
    """The handling of C vectors of `size` D that both methods share."""

    sums: Tensor
    counts: Tensor
    common: Tensor
    common_seen: Tensor

    def __init__(self, num_classes: int, size: int) -> None:
        super().__init__()
        self._shape = num_classes, size
        self._has_common = False
        # Buffers that belong to no row: clients that train side by side have each its own.
        sums, counts = torch.zeros(num_classes, size).double(), torch.zeros(num_classes).double()
        self.register_buffer("sums", sums, persistent=False)
        self.register_buffer("counts", counts, persistent=False)
        self.register_buffer("common", torch.zeros(num_classes, size), persistent=False)
        seen = torch.zeros(num_classes, dtype=torch.bool)
        self.register_buffer("common_seen", seen, persistent=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(C, D) of the exchanged vectors."""
        return self._shape

    def receive(self, common: ClassMeans) -> None:
        """Take the server's vectors, and forget all gathered ones.

        Called at the start of a session, and before an evaluation that uses them.
        """
        assert common.values.shape == self._shape, f"{tuple(common.values.shape)}"
        self.common.copy_(common.values)
        self.common_seen.copy_(common.seen)
        self._has_common = bool(common.seen.any())
        self.sums.zero_()
        self.counts.zero_()

    def upload(self) -> ClassMeans:
        """The means by class of the session's gathered outputs. On the device of the network."""
        return ClassSums(self.sums, self.counts).means()

    def _gather(self, y: Tensor, values: Tensor) -> None:
        ClassSums(self.sums, self.counts).add(y, values.detach())


class FDClient(ClassClient):
    """Federated distillation: the mean logits of a class teach the clients.

        L = CE(logits, y) + weight CE(logits, softmax(common logits of y))

    A sample of a class without common logits has only the first term.

    Args:
        net: (B, ...) -> (B, C) logits.
        num_classes: C.
        weight: of distillation, lambda.
        target: raw: the target is the logits without softmax or, if there are none, the sample's
            own; as in HtFLlib.
    """

    def __init__(
        self, net: nn.Module, num_classes: int, *, weight: float = 1.0, target: Target = "softmax"
    ) -> None:
        super().__init__(num_classes, num_classes)
        self.net, self.weight = net, weight
        self.target: Target = target

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, C) logits."""
        return self.net(x)

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The losses of a batch: "hard", by labels, and "soft", weighted; gathers its logits."""
        logits = self.net(x)
        self._gather(y, logits)
        losses = {"hard": F.cross_entropy(logits, y)}
        if self._has_common:
            losses["soft"] = self.weight * F.cross_entropy(logits, self._targets(logits, y))
        return losses

    def _targets(self, logits: Tensor, y: Tensor) -> Tensor:
        """(B, C) targets for the logits of every sample."""
        common, seen = self.common[y], self.common_seen[y, None]
        if self.target == "raw":
            return torch.where(seen, common, logits.detach().float())
        return torch.where(seen, common.softmax(1), 0)  # of zeros the loss is 0


class FedProtoClient(ClassClient):
    """Prototypes: the mean features of a class attract the clients' features.

        L = CE(logits, y) + weight MSE(z, prototype of y)

    A sample of a class without prototype has only the first term.

    Args:
        private: extractor and head.
        num_classes: C.
        weight: of the prototypes, lambda.
        inference: prototypes: classify by the nearest one in mean squared difference. The head
            classifies if there are no prototypes yet, and with "head".
    """

    def __init__(
        self,
        private: SplitNetwork,
        num_classes: int,
        *,
        weight: float = 1.0,
        inference: Inference = "prototypes",
    ) -> None:
        super().__init__(num_classes, private.feature_dim)
        self.private, self.weight = private, weight
        self.inference: Inference = inference

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, C) logits, or the negative distances to the prototypes.

        The distance to a missing prototype is infinite, and so is the cross-entropy of a sample of
        its class.
        """
        return self._scores(self.private.extractor(x), self.inference)

    def figures(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Accuracy of a batch (B, ...) with labels (B,) by the rule that `forward` does not use."""
        other: Inference = "head" if self.inference == "prototypes" else "prototypes"
        scores = self._scores(self.private.extractor(x), other)
        return {f"accuracy_{other}": (scores.argmax(1) == y).float().mean()}

    def _scores(self, features: Tensor, rule: Inference) -> Tensor:
        if rule == "head" or not self._has_common:
            return self.private.head(features)
        squares = distances(features.float(), self.common).square()
        return torch.where(self.common_seen, -squares / features.shape[1], -torch.inf)

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The losses of a batch: "hard" and "prototypes", weighted; gathers its features."""
        features = self.private.extractor(x)
        self._gather(y, features)
        losses = {"hard": F.cross_entropy(self.private.head(features), y)}
        if self._has_common:
            own = features.detach().float()
            wanted = torch.where(self.common_seen[y, None], self.common[y], own)
            losses["prototypes"] = self.weight * F.mse_loss(features, wanted)
        return losses
