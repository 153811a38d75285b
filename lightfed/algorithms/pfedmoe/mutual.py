"""Clients that train a private and a shared network side by side and teach each other.

`lightfed.algorithms` has the papers. `losses` gives one loss per network. One backward pass of
their sum updates both. In the form "separate" a network's targets are constants, so the sum has the
gradient of each loss.
"""

from collections.abc import Iterable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.models.split import SplitNetwork, evaluating
from lightfed.utils.errors import require

Form = Literal["separate", "htfllib"]
"""The form of mutual learning. separate: the other network's outputs are constants, and the
divergence is the mean over samples. htfllib (that library's code): every loss moves both networks,
and the divergence is the mean over samples and classes."""


def kl_divergence(target: Tensor, logits: Tensor) -> Tensor:
    """Mean over the samples of KL(softmax(target) || softmax(logits)), in nats.

    `target` (B, C) are logits of the teacher, `logits` (B, C) those of the learner.
    """
    wanted, found = target.log_softmax(1), logits.log_softmax(1)
    return (wanted.exp() * (wanted - found)).sum(1).mean()


def _divergence(target: Tensor, logits: Tensor, form: Form) -> Tensor:
    if form == "htfllib":
        return kl_divergence(target, logits) / logits.shape[1]
    return kl_divergence(target.detach(), logits)


class _Pair(nn.Module):
    """A private network, which is evaluated, and a shared one, both (B, ...) -> (B, C) logits."""

    clipped_separately: tuple[str, ...] = ("shared",)

    def __init__(self, private: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.private, self.shared = private, shared

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, C) logits of the private network."""
        return self.private(x)


class FML(_Pair):
    """Federated mutual learning.

        L_F = alpha CE(F) + (1 - alpha) KL(G || F)
        L_G = beta CE(G) + (1 - beta) KL(F || G)

    Args:
        private: F.
        shared: G.
        alpha: weight of the labels in the private network's loss, in [0, 1].
        beta: weight of the labels in the shared network's loss, in [0, 1].
        form: of mutual learning.
    """

    def __init__(
        self,
        private: nn.Module,
        shared: nn.Module,
        *,
        alpha: float = 0.5,
        beta: float = 0.5,
        form: Form = "separate",
    ) -> None:
        super().__init__(private, shared)
        self.alpha, self.beta = alpha, beta
        self.form: Form = form

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The losses of a batch (B, ...) with labels (B,): "private", L_F, and "shared", L_G."""
        own, common = self.private(x), self.shared(x)
        return {
            "private": self.alpha * F.cross_entropy(own, y)
            + (1 - self.alpha) * _divergence(common, own, self.form),
            "shared": self.beta * F.cross_entropy(common, y)
            + (1 - self.beta) * _divergence(own, common, self.form),
        }


class FedKD(_Pair):
    """Adaptive mutual distillation of a private teacher and a shared student.

        D = CE(F) + CE(G),  M = MSE(z_F, W_h z_G)
        L_F = CE(F) + (KL(G || F) + M) / D,  L_G = CE(G) + (KL(F || G) + M) / D

    In the form "separate" D is a weight without a gradient (its gradient reverses that of the
    labels where D^2 is less than what it divides) and W_h learns by L_G.

    Args:
        private: F, the teacher.
        shared: G, the student.
        form: of mutual learning.

    Attributes:
        projection: W_h without bias, private: (B, features of G) -> (B, features of F).
    """

    clipped_separately = ("shared", "projection")
    private: SplitNetwork
    shared: SplitNetwork

    def __init__(
        self, private: SplitNetwork, shared: SplitNetwork, *, form: Form = "separate"
    ) -> None:
        super().__init__(private, shared)
        self.projection = nn.Linear(shared.feature_dim, private.feature_dim, bias=False)
        self.form: Form = form

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The losses of a batch (B, ...) with labels (B,): "private", L_F, and "shared", L_G."""
        own_features, common_features = self.private.extractor(x), self.shared.extractor(x)
        own, common = self.private.head(own_features), self.shared.head(common_features)
        hard_own, hard_common = F.cross_entropy(own, y), F.cross_entropy(common, y)
        scale = self._constant(hard_own + hard_common)
        projected = self.projection(common_features)
        soft_own = _divergence(common, own, self.form) + F.mse_loss(
            own_features, self._constant(projected)
        )
        soft_common = _divergence(own, common, self.form) + F.mse_loss(
            self._constant(own_features), projected
        )
        return {"private": hard_own + soft_own / scale, "shared": hard_common + soft_common / scale}

    def _constant(self, value: Tensor) -> Tensor:
        """Detach a loss's target in the form "separate"."""
        return value if self.form == "htfllib" else value.detach()


class FedMRL(_Pair):
    """Nested representations: the leading part of z is enough for the shared network.

        z = W (z_G, z_F) + b,   L = CE(head_F(z)) + CE(head_G(z[:d]))

    z is as large as z_F, the features of F.

    Args:
        private: F.
        shared: G, of d features, at most as many as F has.
    """

    clipped_separately = ("shared", "projection")
    private: SplitNetwork
    shared: SplitNetwork

    def __init__(self, private: SplitNetwork, shared: SplitNetwork) -> None:
        super().__init__(private, shared)
        small, large = shared.feature_dim, private.feature_dim
        self.projection = nn.Linear(small + large, large)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, C) logits of the private network's head."""
        return self.private.head(self._nested(x))

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The losses of a batch (B, ...) with labels (B,): "private", of all of z, and "shared"."""
        z = self._nested(x)
        large, small = self.private.head(z), self.shared.head(z[:, : self.shared.feature_dim])
        return {"private": F.cross_entropy(large, y), "shared": F.cross_entropy(small, y)}

    def _nested(self, x: Tensor) -> Tensor:
        return self.projection(torch.cat((self.shared.extractor(x), self.private.extractor(x)), 1))


class FedAPEN(_Pair):
    """An ensemble of a private and a shared network with a learned weight.

        e = lambda p + (1 - lambda) s, of logits; lambda is the private network's share
        L_p = CE(p) + KL(s || p) + CE(lambda p + (1 - lambda) s'), L_s likewise

    where ' and the first argument of KL are constants. The share is 0.5 until it is learned between
    sessions (`learn_share`). Without learning this is the released code's "equal" training.

    Args:
        private: p.
        shared: s.

    Attributes:
        share: () lambda, a buffer that stays with the client.
    """

    share: Tensor

    def __init__(self, private: nn.Module, shared: nn.Module) -> None:
        super().__init__(private, shared)
        self.register_buffer("share", torch.tensor(0.5))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, C) logits of the ensemble."""
        return _ensemble(self.private(x), self.shared(x), self.share)

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The losses of a batch (B, ...) with labels (B,): "private", L_p, and "shared", L_s."""
        own, common = self.private(x), self.shared(x)
        taught_own = _ensemble(own, common.detach(), self.share)
        taught_common = _ensemble(own.detach(), common, self.share)
        return {
            "private": F.cross_entropy(own, y)
            + _divergence(common, own, "separate")
            + F.cross_entropy(taught_own, y),
            "shared": F.cross_entropy(common, y)
            + _divergence(own, common, "separate")
            + F.cross_entropy(taught_common, y),
        }

    def figures(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The private network's share, "private_share"; the batch does not matter."""
        return {"private_share": self.share}

    @torch.no_grad()
    def learn_share(
        self, batches: Iterable[tuple[Tensor, Tensor]], *, lr: float = 1e-3, passes: int = 10
    ) -> None:
        """Learning for adaptability: SGD on the share alone, kept within [0, 1].

        The networks do not change, so their logits are computed once for all passes. `batches` are
        (x, y) of the hold-out, in the order of every pass. A UserError with the key "hold_out" if
        there is none.
        """
        with evaluating(self):
            logits = [(self.private(x), self.shared(x), y) for x, y in batches]
        found = "no sample to learn the share from"
        require(bool(logits), "hold_out", found, "give a larger one")
        for _ in range(passes):
            for own, common, y in logits:
                # d CE(e) / d lambda = mean over samples of (softmax(e) - onehot(y)) . (p - s)
                error = _ensemble(own, common, self.share).softmax(1)
                error[torch.arange(len(y), device=y.device), y] -= 1
                slope = (error * (own - common)).sum(1).mean()
                self.share.sub_(lr * slope).clamp_(0, 1)


def _ensemble(own: Tensor, common: Tensor, share: Tensor) -> Tensor:
    return share * own + (1 - share) * common
