"""The networks of clients that share a vector per class instead of weights: FD, FedProto, FedTGP.

The papers are named in the files of the methods. In a session a client gathers the outputs of all
its batches and epochs, each as it was before the step on its batch.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.algorithms.class_means import ClassMeans, ClassSums, distances
from lightfed.models.labelled import classes_of, loss_of_labelled
from lightfed.models.split import SplitNetwork

Target = Literal["softmax", "raw"]
Inference = Literal["prototypes", "head"]


class ClassClient(nn.Module):
    """Gathers a client's vectors by class, and holds the server's.

    Args:
        num_classes: C.
        size: D, the number of elements of a vector.

    Attributes:
        sums: Sums of the session's vectors by class, (C, D) float64.
        counts: Numbers of these vectors, (C,) float64.
        common: The server's vectors, (C, D).
        common_seen: Which classes have one, (C,) bool.
    """

    sums: Tensor
    counts: Tensor
    common: Tensor
    common_seen: Tensor

    def __init__(self, num_classes: int, size: int) -> None:
        super().__init__()
        self._shape = num_classes, size
        self._has_common = False

        # Buffers, so that clients that train side by side have values of their own; not persistent,
        # because they belong to no row.
        sums = torch.zeros(num_classes, size, dtype=torch.float64)
        counts = torch.zeros(num_classes, dtype=torch.float64)
        common = torch.zeros(num_classes, size)
        common_seen = torch.zeros(num_classes, dtype=torch.bool)
        self.register_buffer("sums", sums, persistent=False)
        self.register_buffer("counts", counts, persistent=False)
        self.register_buffer("common", common, persistent=False)
        self.register_buffer("common_seen", common_seen, persistent=False)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the exchanged vectors, (C, D)."""
        return self._shape

    def receive(self, common: ClassMeans) -> None:
        """Take the server's vectors, and forget all vectors that were gathered.

        This is called at the start of a session, and before an evaluation that uses the vectors.
        """
        assert common.values.shape == self._shape, f"{tuple(common.values.shape)}"
        self.common.copy_(common.values)
        self.common_seen.copy_(common.seen)
        self._has_common = bool(common.seen.any())
        self.sums.zero_()
        self.counts.zero_()

    def upload(self) -> ClassMeans:
        """Return the means by class of the session's outputs, on the device of the network."""
        return ClassSums(self.sums, self.counts).means()

    def _gather(self, y: Tensor, values: Tensor) -> None:
        """Add the outputs (B, D) of a batch with labels (B,); nothing of samples without one."""
        ClassSums(self.sums, self.counts).add(y, values.detach())


class FDClient(ClassClient):
    """Federated distillation: the mean logits of a class teach the clients.

        L = CE(logits, y) + weight CE(logits, softmax(common logits of y))

    A sample of a class without common logits has only the first term.

    Args:
        net: Maps (B, ...) to (B, C) logits.
        num_classes: C.
        weight: lambda, the weight of the distillation.
        target: With "raw", the target is the common logits without softmax, as in HtFLlib; for a
            class without any, the sample's own logits.
    """

    packs = True
    packs_losses = True

    def __init__(
        self, net: nn.Module, num_classes: int, *, weight: float = 1.0, target: Target = "softmax"
    ) -> None:
        super().__init__(num_classes, num_classes)
        self.net = net
        self.weight = weight
        self.target: Target = target

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return logits, (B, C), of samples (B, ...)."""
        return self.net(x)

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the losses of a batch, and gather its logits.

        They are "hard", by the labels, and "soft", by the common logits, times its weight.
        """
        logits = self.net(x)
        self._gather(y, logits)
        losses = {"hard": F.cross_entropy(logits, y)}
        if self._has_common:
            targets = self._targets(logits, y)
            losses["soft"] = self.weight * loss_of_labelled(F.cross_entropy, logits, targets, y)
        return losses

    def _targets(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the targets for the logits of every sample, (B, C)."""
        classes = classes_of(y)
        common = self.common[classes]
        seen = self.common_seen[classes, None]
        if self.target == "raw":
            return torch.where(seen, common, logits.detach().float())

        # A target of zeros has a loss of 0.
        return torch.where(seen, common.softmax(1), 0)


class FedProtoClient(ClassClient):
    """Prototypes: the mean features of a class attract the clients' features.

        L = CE(logits, y) + weight MSE(z, prototype of y)

    A sample of a class without prototype has only the first term.

    Args:
        private: The client's network, split into extractor and head.
        num_classes: C.
        weight: lambda, the weight of the prototypes.
        inference: With "prototypes", a sample belongs to the class of the prototype with the
            smallest mean squared difference. With "head", and as long as there are no prototypes,
            the head classifies.
    """

    packs = True
    packs_losses = True

    def __init__(
        self,
        private: SplitNetwork,
        num_classes: int,
        *,
        weight: float = 1.0,
        inference: Inference = "prototypes",
    ) -> None:
        super().__init__(num_classes, private.feature_dim)
        self.private = private
        self.weight = weight
        self.inference: Inference = inference

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return logits, (B, C), or the negative distances to the prototypes.

        The distance to a missing prototype is infinite, and so is the cross-entropy of a sample of
        its class.
        """
        return self._scores(self.private.extractor(x), self.inference)

    def figures(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the accuracy of a batch by the rule that `forward` does not use."""
        other: Inference = "head" if self.inference == "prototypes" else "prototypes"
        scores = self._scores(self.private.extractor(x), other)
        return {f"accuracy_{other}": (scores.argmax(1) == y).float().mean()}

    def _scores(self, features: Tensor, rule: Inference) -> Tensor:
        """Return a score of each class, (B, C), by a rule of inference."""
        if rule == "head" or not self._has_common:
            return self.private.head(features)
        squares = distances(features.float(), self.common).square()
        return torch.where(self.common_seen, -squares / features.shape[1], -torch.inf)

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the losses of a batch, and gather its features.

        They are "hard", by the labels, and "prototypes", times its weight.
        """
        features = self.private.extractor(x)
        self._gather(y, features)
        losses = {"hard": F.cross_entropy(self.private.head(features), y)}
        if self._has_common:
            # Without a prototype the target is the features themselves: then the loss is 0.
            own = features.detach().float()
            classes = classes_of(y)
            targets = torch.where(self.common_seen[classes, None], self.common[classes], own)
            error = loss_of_labelled(F.mse_loss, features, targets, y)
            losses["prototypes"] = self.weight * error
        return losses
