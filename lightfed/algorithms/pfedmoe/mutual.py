"""The networks of clients that train a private and a shared network, which teach each other.

The papers are named in the files of the methods. `losses` gives one loss for each network. One
backward pass of their sum updates both. In the form "separate" a network's targets are constants,
so that the sum has the gradient of each loss.
"""

from collections.abc import Iterable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.models.labelled import loss_of_labelled, mean_of_labelled
from lightfed.models.split import SplitNetwork, evaluating
from lightfed.utils.errors import UserError

Form = Literal["separate", "htfllib"]
"""The form of mutual learning. separate: the other network's outputs are constants, and the
divergence is the mean over samples. htfllib (that library's code): every loss moves both networks,
and the divergence is the mean over samples and classes."""


def kl_divergence(target: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean over the samples of KL(softmax(target) || softmax(logits)), in nats.

    Args:
        target: Logits of the teacher, (B, C).
        logits: Logits of the learner, (B, C).
        y: Labels (B,). Samples without a label have no weight.
    """
    log_p = target.log_softmax(1)
    log_q = logits.log_softmax(1)
    return mean_of_labelled((log_p.exp() * (log_p - log_q)).sum(1), y)


def _divergence(target: Tensor, logits: Tensor, y: Tensor, form: Form) -> Tensor:
    """Return the divergence of a form of mutual learning; tensors as for `kl_divergence`."""
    if form == "htfllib":
        return kl_divergence(target, logits, y) / logits.shape[1]
    return kl_divergence(target.detach(), logits, y)


class _Pair(nn.Module):
    """A private network, which is evaluated, and a shared one.

    Both map samples (B, ...) to logits (B, C).
    """

    clipped_separately: tuple[str, ...] = ("shared",)

    def __init__(self, private: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.private = private
        self.shared = shared

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the private network, (B, C)."""
        return self.private(x)


class FML(_Pair):
    """Federated mutual learning.

        L_F = alpha CE(F) + (1 - alpha) KL(G || F)
        L_G = beta CE(G) + (1 - beta) KL(F || G)

    Args:
        private: F.
        shared: G.
        alpha: Weight of the labels in the private network's loss, in [0, 1].
        beta: Weight of the labels in the shared network's loss, in [0, 1].
        form: Form of mutual learning.
    """

    packs = True
    packs_losses = True

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
        self.alpha = alpha
        self.beta = beta
        self.form: Form = form

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the losses of a batch (B, ...): "private", L_F, and "shared", L_G."""
        own = self.private(x)
        common = self.shared(x)
        return {
            "private": self.alpha * F.cross_entropy(own, y)
            + (1 - self.alpha) * _divergence(common, own, y, self.form),
            "shared": self.beta * F.cross_entropy(common, y)
            + (1 - self.beta) * _divergence(own, common, y, self.form),
        }


class FedKD(_Pair):
    """Adaptive mutual distillation of a private teacher and a shared student.

        D = CE(F) + CE(G),  M = MSE(z_F, W_h z_G)
        L_F = CE(F) + (KL(G || F) + M) / D,  L_G = CE(G) + (KL(F || G) + M) / D

    In the form "separate" D is a weight without a gradient, and W_h learns from L_G. The gradient
    of D would reverse that of the labels where D^2 is less than what it divides.

    Args:
        private: F, the teacher.
        shared: G, the student.
        form: Form of mutual learning.

    Attributes:
        projection: W_h, without bias and private; maps the features of G to as many as F has.
    """

    packs = True
    packs_losses = True
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
        """Return the losses of a batch (B, ...): "private", L_F, and "shared", L_G."""
        # The order of these operations is also that of the backward pass, and so of its sums.
        z_F = self.private.extractor(x)
        z_G = self.shared.extractor(x)
        logits_F = self.private.head(z_F)
        logits_G = self.shared.head(z_G)
        hard_F = F.cross_entropy(logits_F, y)
        hard_G = F.cross_entropy(logits_G, y)
        D = self._constant(hard_F + hard_G)
        projected = self.projection(z_G)  # W_h z_G

        soft_F = _divergence(logits_G, logits_F, y, self.form)
        soft_F = soft_F + loss_of_labelled(F.mse_loss, z_F, self._constant(projected), y)
        soft_G = _divergence(logits_F, logits_G, y, self.form)
        soft_G = soft_G + loss_of_labelled(F.mse_loss, self._constant(z_F), projected, y)
        return {"private": hard_F + soft_F / D, "shared": hard_G + soft_G / D}

    def _constant(self, value: Tensor) -> Tensor:
        """Return a loss's target, detached in the form "separate"."""
        return value if self.form == "htfllib" else value.detach()


class FedMRL(_Pair):
    """Nested representations: the leading part of z is enough for the shared network.

        z = W (z_G, z_F) + b,   L = CE(head_F(z)) + CE(head_G(z[:d]))

    z has as many elements as z_F, the features of F.

    Args:
        private: F.
        shared: G, with d features, at most as many as F has.
    """

    packs = True
    packs_losses = True
    clipped_separately = ("shared", "projection")
    private: SplitNetwork
    shared: SplitNetwork

    def __init__(self, private: SplitNetwork, shared: SplitNetwork) -> None:
        super().__init__(private, shared)
        inputs = shared.feature_dim + private.feature_dim
        self.projection = nn.Linear(inputs, private.feature_dim)  # W, b

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the private network's head, (B, C)."""
        return self.private.head(self._nested(x))

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the losses of a batch (B, ...): "private", of all of z, and "shared"."""
        z = self._nested(x)
        d = self.shared.feature_dim
        logits_F = self.private.head(z)
        logits_G = self.shared.head(z[:, :d])
        return {"private": F.cross_entropy(logits_F, y), "shared": F.cross_entropy(logits_G, y)}

    def _nested(self, x: Tensor) -> Tensor:
        """Return z, (B, features of F)."""
        z_G = self.shared.extractor(x)
        z_F = self.private.extractor(x)
        return self.projection(torch.cat((z_G, z_F), 1))


class FedAPEN(_Pair):
    """An ensemble of a private and a shared network with a learned weight.

        e = lambda p + (1 - lambda) s, of logits; lambda is the private network's share
        L_p = CE(p) + KL(s || p) + CE(lambda p + (1 - lambda) s'), L_s likewise

    where s' and the first argument of KL are constants. The share is 0.5 until it is learned
    between sessions (`learn_share`). Without learning this is the released code's "equal" training.

    Args:
        private: p.
        shared: s.

    Attributes:
        share: lambda, a buffer () that stays with the client.
    """

    packs = True
    packs_losses = True
    share: Tensor

    def __init__(self, private: nn.Module, shared: nn.Module) -> None:
        super().__init__(private, shared)
        self.register_buffer("share", torch.tensor(0.5))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the ensemble, (B, C)."""
        return _ensemble(self.private(x), self.shared(x), self.share)

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the losses of a batch (B, ...): "private", L_p, and "shared", L_s."""
        p = self.private(x)
        s = self.shared(x)
        e_of_p = _ensemble(p, s.detach(), self.share)
        e_of_s = _ensemble(p.detach(), s, self.share)
        return {
            "private": F.cross_entropy(p, y)
            + _divergence(s, p, y, "separate")
            + F.cross_entropy(e_of_p, y),
            "shared": F.cross_entropy(s, y)
            + _divergence(p, s, y, "separate")
            + F.cross_entropy(e_of_s, y),
        }

    def figures(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return lambda, "private_share"; the batch does not matter."""
        return {"private_share": self.share}

    @torch.no_grad()
    def learn_share(
        self, batches: Iterable[tuple[Tensor, Tensor]], *, lr: float = 1e-3, passes: int = 10
    ) -> None:
        """Learn lambda ("learning for adaptability"): SGD on it alone, kept within [0, 1].

        The networks do not change, so their logits are computed once for all passes.

        Args:
            batches: Samples and labels (x, y) that were held out, in the order of every pass.
            lr: Learning rate of lambda.
            passes: Number of passes over the batches.

        Raises:
            UserError: There is no batch; the key is "hold_out".
        """
        with evaluating(self):
            logits = [(self.private(x), self.shared(x), y) for x, y in batches]
        if not logits:
            raise UserError("hold_out", "no sample to learn the share from", "give a larger one")

        for _ in range(passes):
            for p, s, y in logits:
                # d CE(e) / d lambda = mean over samples of (softmax(e) - onehot(y)) . (p - s)
                error = _ensemble(p, s, self.share).softmax(1)
                error[torch.arange(len(y), device=y.device), y] -= 1
                slope = (error * (p - s)).sum(1).mean()
                self.share.sub_(lr * slope).clamp_(0, 1)


def _ensemble(p: Tensor, s: Tensor, share: Tensor) -> Tensor:
    """Return e = lambda p + (1 - lambda) s."""
    return share * p + (1 - share) * s
